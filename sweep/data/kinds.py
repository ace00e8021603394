"""What a row of a dataset is: recognised by its columns, and read as an example.

A `RowLayout` says which kind rows are of and which columns hold it; `example_of` and `pair_of` read
a row by one.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from qlora_sweep.sweep.data.files import Broken, Place, Read, RowsError, is_nothing, quoted

PREFERENCE = "preference"
CHATS = ("messages", "conversations")
"""Kinds whose rows are turns of a chat, in a column that may hold them as JSON."""
KINDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt-completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    PREFERENCE: ("chosen", "rejected"),
    "text": ("text",),
}
"""Fields of each kind, the most telling kind first; each has a column of its name, as a rule."""
_FOR_TEMPLATE = ("tools", "chat_template_kwargs")
_OF_CHATS = ("system",) + _FOR_TEMPLATE
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "messages": _OF_CHATS,
    "conversations": _OF_CHATS,
    "prompt-completion": _FOR_TEMPLATE,
    "instruction": ("input", "system", "history"),
    PREFERENCE: ("prompt",) + _FOR_TEMPLATE,
    "text": (),
}
"""Fields that a row may have beside those."""
_PROMPTS = ("prompt", "question", "query", "instruction", "problem", "input")
_COMPLETIONS = ("completion", "response", "answer", "output", "solution")
"""Columns of published datasets that hold what is asked and what is answered."""
_ALSO_NAMED = {"input": ("input", "context"), "system": ("system", "system_prompt")}
"""Of an instruction's fields."""
ROLES = ("system", "developer", "user", "assistant", "tool")
ROLES_OF_OTHERS = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""As ShareGPT names them."""
LOSS_KEYS = ("weight", "loss", "train")
"""Of a turn, whether it carries loss: as OpenAI, ms-swift and axolotl name it."""
_ALPACA = (
    "Below is an instruction that describes a task{also}. "
    "Write a response that appropriately completes the request."
)
"""How the prompt begins that the Alpaca data were published with, where no system is given."""
_ALPACA_ALSO = ", paired with an input that provides further context"
_SPEAKERS = re.compile(
    r"(user|human|instruction|question)\b.*(assistant|response|answer)", re.I | re.S
)
"""A text in which both sides speak."""


_NAMES_SHOWN = 12
"""Of columns or keys, in a message."""


@dataclass(frozen=True, slots=True)
class ReadingOptions:
    """How a person wants rows read; what is not said is recognised."""

    format: str = "auto"
    text_column: str | None = None
    prompt_column: str | None = None
    completion_column: str | None = None


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How rows are read."""

    kind: str
    columns: Mapping[str, str]
    """Of each field that rows may have, by its name in `KINDS`."""
    are_named: bool = False
    """Whether a person named them."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Which columns are read as something that they are not called."""
        columns = self.columns.items()
        renamed = [f"{shown(column)} as {name}" for name, column in columns if name != column]
        if self.are_named or not renamed:
            return ()
        if "prompt" in self.columns and "completion" in self.columns:
            renamed.append("joined as they are")
        return (f"read as {self.kind}: {', '.join(renamed)}",)


def on_completions(kind: str, asked: bool | None = None) -> bool:
    """Return whether loss is on completions alone. Where that is not asked, as TRL has it: where a
    row is a prompt and its completion, which Alpaca's fields are too.

    Raises:
        RowsError: rows are texts, and have none.
    """
    if kind == PREFERENCE:
        if asked is False:
            why = "pairs carry loss on their completions alone"
            raise RowsError(f"{why}: leave data.completions_only out")
        return True
    if kind == "text" and asked:
        raise RowsError(
            "rows of one text have no completions of their own: leave data.completions_only out, "
            "or name another data.format"
        )
    if asked is None:
        return kind in ("prompt-completion", "instruction")
    return asked


# Recognised


def first_rows(
    rows: Iterable[Read], name: str, asked: ReadingOptions | None = None
) -> tuple[list[Read], tuple[str, ...], RowLayout]:
    """Return as many rows as tell their kind, their columns, and how they are read.

    Args:
        rows: of the dataset, which go on behind those that are returned.
        name: of the dataset.
        asked: how they are to be read.

    Raises:
        RowsError: there are none, none of them can be read, or they are of no known kind.
    """
    seen: list[Read] = []
    samples: dict[str, Any] = {}
    readable = 0
    for place, fields in rows:
        seen.append((place, fields))
        if isinstance(fields, dict):
            readable += 1
            for column, value in fields.items():
                if column not in samples or is_nothing(samples[column]):
                    samples[str(column)] = value
        if (samples and readable >= 100) or len(seen) == 10_000:
            break
    if not seen:
        raise RowsError(f"{name}: no rows in it")
    if not samples:
        place, why = seen[0]
        if not isinstance(why, Broken):
            why = Broken("an empty object")
        raise RowsError(all_broken(place, why, len(seen), name))
    try:
        layout = recognised(name, samples, asked)
    except RowsError:
        if len(seen) == 1:
            _refuse_wrapped(name, samples)
        raise
    return seen, tuple(samples), layout


def all_broken(place: Place, broken: Broken, count: int, name: str) -> str:
    """Return why there is nothing to train on, with the first row that shows it."""
    which = "its one row is broken"
    if count > 1:
        which = f"all {count:,} rows are broken, the first"
    return f"{name}: {which}: {place.file}: line {place.line}: {broken.reason}"


def _refuse_wrapped(name: str, row: Mapping[str, Any]) -> None:
    """Refuse a file of one object under a key of which stand the rows."""
    values = list(row.values())
    if len(values) > 1 and _are_objects(values) and len(set(map(tuple, values))) == 1:
        raise RowsError(
            f"{name}: it is one object, and its rows are the values of its keys: write them alone "
            "as a list to a file"
        )
    lengths = {}
    for column, value in row.items():
        if _are_objects(value) and not _is_chat(value):
            lengths[column] = len(value)
    if lengths:
        key = json.dumps(max(lengths, key=lambda column: lengths[column]))
        raise RowsError(
            f"{name}: it is one object, and its rows stand under {key}, where datasets reads them "
            f"with field={key}: write that list alone to a file"
        )


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(x, Mapping) for x in value)


def recognised(
    name: str, samples: Mapping[str, Any], asked: ReadingOptions | None = None
) -> RowLayout:
    """Return how rows are read.

    Args:
        name: of the dataset.
        samples: by column, a value of it, which says something where any does.
        asked: how they are to be read.

    Raises:
        RowsError: a column that is not there, or rows of no known kind.
    """
    asked = asked or ReadingOptions()
    if asked.text_column is not None or asked.prompt_column or asked.completion_column:
        return _of_named_columns(name, samples, asked)
    for kind, fields in KINDS.items():
        if asked.format in ("auto", kind) and set(fields) <= set(samples):
            return _layout(kind, samples)
    usual = _usual_layout(samples)
    if usual is not None and asked.format in ("auto", usual.kind):
        return usual
    if asked.format != "auto":
        missing = next(field for field in KINDS[asked.format] if field not in samples)
        raise RowsError(
            _no_column(name, missing, samples, f", which data.format {asked.format} needs")
        )
    raise RowsError(_unknown(name, samples))


def _of_named_columns(name: str, samples: Mapping[str, Any], asked: ReadingOptions) -> RowLayout:
    """Return how rows are read whose columns were named."""
    named = {
        "text": asked.text_column,
        "prompt": asked.prompt_column,
        "completion": asked.completion_column,
    }
    given = {}
    words = []
    for name_of_field, column in named.items():
        if column is not None:
            given[name_of_field] = column
            words.append(f"data.{name_of_field}_column {column}")
    kind = "prompt-completion"
    if "text" in given:
        kind = "text"
    elif list(given) == ["prompt"] and samples.keys() >= set(KINDS[PREFERENCE]):
        kind = PREFERENCE
    if kind == "text" and len(given) > 1:
        raise RowsError(f"{' and '.join(words)} are both given: keep one")
    if asked.format not in ("auto", kind):
        raise RowsError(
            f"{' and '.join(words)} and data.format {asked.format} are both given: keep one"
        )
    if kind == "prompt-completion" and len(given) == 1:
        other = "prompt"
        if "prompt" in given:
            other = "completion"
        raise RowsError(f"{words[0]}: name the {other}'s too, with --set data.{other}_column=NAME")
    if len(set(given.values())) < len(given):
        raise RowsError(f"{' and '.join(words)} are the same column")
    for column in given.values():
        if column not in samples:
            raise RowsError(_no_column(name, column, samples))
    return RowLayout(kind, {**_layout(kind, samples).columns, **given}, are_named=True)


def _layout(kind: str, samples: Mapping[str, Any]) -> RowLayout:
    """Return how rows of a kind are read whose columns have its fields' names."""
    fields = KINDS[kind] + _OPTIONAL[kind]
    columns = _present(fields, samples)
    if kind == "instruction":
        columns |= _instruction_columns(samples, without=columns.values())
    if kind == PREFERENCE and "prompt" not in columns and isinstance(samples["chosen"], str):
        prompts = _named(_PROMPTS, samples)
        # Where the completions begin with it, they hold their prompt.
        if len(prompts) == 1 and str(samples[prompts[0]]).strip() not in samples["chosen"]:
            columns["prompt"] = prompts[0]
    return RowLayout(kind, columns)


def _present(fields: Iterable[str], samples: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns that have a field's name, by that."""
    return {field: field for field in fields if field in samples}


def _named(names: Iterable[str], samples: Mapping[str, Any]) -> list[str]:
    """Return the columns that have one of some names, in the names' order, in any case of letters
    and with blanks around."""
    written = {column.strip().lower(): column for column in samples}
    return [written[name] for name in names if name in written]


def _instruction_columns(samples: Mapping[str, Any], *, without: Iterable[str]) -> dict[str, str]:
    """Return the columns of an instruction's further fields."""
    found = {}
    for name in _OPTIONAL["instruction"]:
        for column in _named(_ALSO_NAMED.get(name, (name,)), samples):
            if column not in without:
                found[name] = column
                break
    return found


def _usual_layout(samples: Mapping[str, Any]) -> RowLayout | None:
    """Return how rows are read whose columns are called as in published datasets; None where that
    is not known."""
    chats = _chat_columns(samples)
    if len(chats) == 1:
        kind = "messages"
        if all("from" in turn for turn in turns_in(samples[chats[0]])):
            kind = "conversations"
        return RowLayout(kind, {kind: chats[0]} | _present(_OPTIONAL[kind], samples))
    if _are_inputs(samples.get("conversation")):
        return RowLayout("prompt-completion", {"messages": "conversation"})
    prompts = _named(_PROMPTS, samples)
    completions = _named(_COMPLETIONS, samples)
    if len(prompts) > 1:
        # Beside a question it is what the question is about.
        prompts = [column for column in prompts if column.lower() != "input"]
    if len(prompts) != 1 or len(completions) != 1:
        return None
    columns = {"instruction": prompts[0], "output": completions[0]}
    more = _instruction_columns(samples, without=columns.values())
    if prompts[0].lower() != "instruction":
        more = {field: column for field, column in more.items() if not is_nothing(samples[column])}
        if not more:
            columns = {"prompt": prompts[0], "completion": completions[0]}
            return RowLayout("prompt-completion", columns)
    return RowLayout("instruction", columns | more)


def _chat_columns(samples: Mapping[str, Any]) -> list[str]:
    """Return the columns that hold a chat."""
    return [column for column, value in samples.items() if _is_chat(turns_in(value))]


def _no_column(name: str, column: str, samples: Mapping[str, Any], why: str = "") -> str:
    hint = f"known are {names_shown(samples)}"
    near = difflib.get_close_matches(column, samples, n=1)
    if near:
        hint = f"did you mean {near[0]!r}?"
    return f"{name}: no column {column!r}{why}; {hint}"


def shown(column: str) -> str:
    """Return a column's name for messages: quoted where it could not be seen."""
    if column and column.strip() == column:
        return column
    return quoted(column)


def names_shown(names: Iterable[str]) -> str:
    """Return the first dozen of some names, for messages, and how many more there are."""
    words = list(map(shown, names))
    text = ", ".join(words[:_NAMES_SHOWN])
    if len(words) > _NAMES_SHOWN:
        text += f" and {len(words) - _NAMES_SHOWN} more"
    return text


def _unknown(name: str, samples: Mapping[str, Any]) -> str:
    """Return that the columns are of no known kind, and which settings say how they are read."""
    known = "none of " + ", ".join(map(" with ".join, KINDS.values()))
    missing = set(KINDS[PREFERENCE]) - samples.keys()
    if len(missing) == 1:
        known = f"no {missing.pop()!r}, which pairs need"
    texts = []
    dialogues = []
    has_parts = False
    for column, value in samples.items():
        if isinstance(value, str):
            texts.append(column)
            if _SPEAKERS.search(value):
                dialogues.append(column)
        elif isinstance(value, list | dict):
            has_parts = True
    chats = _chat_columns(samples)
    if "input_ids" in samples:
        cure = "tokens are not read: name the texts that they were made of"
    elif len(chats) > 1:
        cure = f"{' and '.join(chats)} each hold a chat: keep one of these columns"
    elif len(texts) == 1 and not has_parts:
        cure = "name the one with the texts with --set data.text_column=NAME"
    elif len(dialogues) == 1:
        column = dialogues[0]
        cure = f"if {column} is all of an example, --set data.text_column={column} says so"
    else:
        cure = (
            "name what is asked and what is answered, both texts, with "
            "--set data.prompt_column=NAME --set data.completion_column=NAME"
        )
    return f"{name}: its columns are {names_shown(samples)}, and {known}: {cure}"


# Read


@dataclass(frozen=True, slots=True)
class Example:
    """What a row holds: a prompt and its completion, as texts or as turns that a chat template
    takes. A text has the prompt "", a chat []."""

    prompt: str | list[dict[str, Any]]
    completion: str | list[dict[str, Any]]
    tools: list[Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """For the template, ``chat_template_kwargs`` of the row."""


def example_of(fields: Mapping[str, Any], layout: RowLayout) -> Example:
    """Return what a row holds. Raises Broken where it cannot be trained on."""
    kind = layout.kind
    columns = layout.columns
    if kind == "text":
        return Example("", _text(fields, columns["text"]))
    if kind == "instruction":
        return _instruction(fields, columns)
    prompt: list[dict[str, Any]] = []
    if "messages" in columns and kind == "prompt-completion":
        completion = _turns(fields, columns["messages"])
        roles = _roles(completion)
        if roles.count("assistant") == 1 and roles[-1] == "assistant":
            prompt = completion[:-1]
            completion = completion[-1:]
    elif kind == "prompt-completion":
        asked = fields.get(columns["prompt"])
        answered = fields.get(columns["completion"])
        if not isinstance(asked, list) and not isinstance(answered, list):
            return Example(_text(fields, columns["prompt"]), _text(fields, columns["completion"]))
        completion = _turns(fields, columns["completion"])
        if isinstance(asked, str) and not turns_in(asked):
            count = _turns_of_prompt(completion, asked, columns["completion"])
            prompt = completion[:count]
            completion = completion[count:]
        else:
            prompt = _turns(fields, columns["prompt"])
    else:
        completion = _turns(fields, columns[kind], may_be_texts=True)
        system = _optional_text(fields, columns.get("system"))
        if system:
            turn = {"role": "system", "content": system}
            if completion[0]["role"] != "system":
                completion.insert(0, turn)
            elif completion[0] != turn:
                raise Broken(f"system is a column and another turn of {columns[kind]}")
    if "assistant" not in _roles(completion):
        name = columns.get("completion") or columns.get(kind, "conversation")
        raise Broken(f"{name}: no turn of the assistant")
    tools, options = _for_template(fields)
    return Example(prompt, completion, tools, options)


def _roles(turns: Sequence[Mapping[str, Any]]) -> list[str]:
    return [turn["role"] for turn in turns]


def _turns_of_prompt(turns: Sequence[Mapping[str, Any]], prompt: str, column: str) -> int:
    """Return how many turns a prompt is that is given as the text of the first of the user's."""
    for index, turn in enumerate(turns):
        if turn["role"] == "user" and turn["content"] == prompt:
            return index + 1
        if turn["role"] == "user":
            break
    raise Broken(f"prompt is text, and {column} are turns that do not begin with it")


def _for_template(fields: Mapping[str, Any]) -> tuple[list[Any] | None, dict[str, Any]]:
    """Return what a row has for its chat template: tools, and options."""
    tools = _decoded(fields.get("tools"))
    options = _decoded(fields.get("chat_template_kwargs"))
    if is_nothing(tools):
        tools = None
    if not isinstance(tools, list | None):
        raise Broken(f"tools must be a list, got {quoted(tools)}")
    if not isinstance(options, dict | None):
        raise Broken(f"chat_template_kwargs must map keys to values, got {quoted(options)}")
    return tools, options or {}


def pair_of(fields: Mapping[str, Any], layout: RowLayout) -> tuple[Example, Example]:
    """Return what a row of a pair holds: its chosen and its rejected example, of one prompt, which
    is what both begin with where it is not given, as in TRL. Raises Broken.
    """
    are_turns = isinstance(fields.get("chosen"), list) or isinstance(fields.get("rejected"), list)
    read: Callable[..., Any] = _text
    if are_turns:
        read = _turns
    chosen = read(fields, "chosen")
    rejected = read(fields, "rejected")
    column = layout.columns.get("prompt", "prompt")
    prompt: Any = fields.get(column)
    if isinstance(prompt, str) and not prompt.strip():
        prompt = None
    if are_turns and isinstance(prompt, str) and not turns_in(prompt):
        _turns_of_prompt(chosen, prompt, "chosen")
        prompt = None
    if prompt is None:
        shared = common_length(chosen, rejected)
        end = min(shared, len(chosen) - 1, len(rejected) - 1)
        if end == shared and not are_turns and chosen[:end].endswith(" "):
            end -= 1
        prompt = chosen[:end]
        chosen = chosen[end:]
        rejected = rejected[end:]
    else:
        prompt = read(fields, column)
    if chosen == rejected:
        raise Broken("chosen and rejected are the same")
    if are_turns and not prompt:
        raise Broken("chosen and rejected have no turn in common, and there is no prompt")
    tools, options = _for_template(fields)
    return Example(prompt, chosen, tools, options), Example(prompt, rejected, tools, options)


def common_length(left: Any, right: Any) -> int:
    """Return how much two texts, the tokens or the turns of two, have in common from their
    beginning."""
    shorter = min(len(left), len(right))
    if isinstance(left, str | list):
        left = np.array(list(left))
        right = np.array(list(right))
    others = np.flatnonzero(left[:shorter] != right[:shorter])
    if len(others) == 0:
        return shorter
    return int(others[0])


def _given(fields: Mapping[str, Any], column: str) -> Any:
    """Return a column's value. Raises Broken where there is none."""
    value = fields.get(column)
    if value is not None:
        return value
    if column in fields:
        raise Broken(f"{column} is null")
    raise Broken(f"{column} is missing")


def _text(fields: Mapping[str, Any], column: str) -> str:
    value = _given(fields, column)
    if not isinstance(value, str):
        raise Broken(f"{column} must be text, got {quoted(value)}")
    if not value.strip():
        raise Broken(f"{column} is empty")
    return value


def _optional_text(fields: Mapping[str, Any], column: str | None) -> str:
    """Return a text, or "" where there is none or but blanks."""
    if column is None or fields.get(column) is None:
        return ""
    value = fields[column]
    if isinstance(value, str) and not value.strip():
        return ""
    return _text(fields, column)


def _instruction(fields: Mapping[str, Any], columns: Mapping[str, str]) -> Example:
    """Return Alpaca's fields as its prompt; what comes before, in ``history``, in the same form."""
    instruction = _text(fields, columns["instruction"])
    output = _text(fields, columns["output"])
    context = _optional_text(fields, columns.get("input"))
    system = _optional_text(fields, columns.get("system"))
    history = _decoded(fields.get(columns.get("history", "history"))) or []
    if not isinstance(history, list) or not all(map(_is_pair_of_texts, history)):
        raise Broken(f"history must be a list of pairs of texts, got {quoted(history)}")
    also = ""
    given = ""
    if context:
        also = _ALPACA_ALSO
        given = f"### Input:\n{context}\n\n"
    prompt = f"{system or _ALPACA.format(also=also)}\n\n"
    for asked, answered in history:
        prompt += f"### Instruction:\n{asked}\n\n### Response:\n{answered}\n\n"
    prompt += f"### Instruction:\n{instruction}\n\n{given}### Response:\n"
    return Example(prompt, output)


def _is_pair_of_texts(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and all(isinstance(text, str) for text in value)


def _decoded(value: Any) -> Any:
    """Return what a text of JSON holds in a column that never has texts; else the value."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def turns_in(value: Any) -> list[Any]:
    """Return the turns of a list of them, which may be kept as JSON; [] of anything else.

    JSON is a list of turns where each item has a role: other JSON is text.
    """
    if isinstance(value, list):
        return value
    if isinstance(value, str) and value.lstrip().startswith("["):
        decoded = _decoded(value)
        if isinstance(decoded, list) and _is_chat(decoded):
            return decoded
    return []


def _is_chat(value: Any) -> bool:
    return _are_objects(value) and all("role" in turn or "from" in turn for turn in value)


def _are_inputs(value: Any) -> bool:
    """Return whether a value is turns as xtuner has them: each an input and its output."""
    return _are_objects(value) and all("output" in turn for turn in value)


def _turns(
    fields: Mapping[str, Any], column: str, *, may_be_texts: bool = False
) -> list[dict[str, Any]]:
    """Return a row's turns with role and content, by whatever names they have those.

    Args:
        fields: the row's.
        column: which has them.
        may_be_texts: whether a list of texts is a chat, and not several answers or the like.
    """
    value = _given(fields, column)
    given = turns_in(value)
    if not given:
        if is_nothing(value):
            raise Broken(f"{column} is empty")
        raise Broken(f"{column} must be a list of turns, got {quoted(value)}")
    if all(isinstance(turn, str) for turn in given):
        if not may_be_texts:
            raise Broken(f"{column} must be text or turns, got {quoted(value)}")
        # As in LIMA: the user and the assistant by turns.
        sides = ("user", "assistant")
        given = [{"role": sides[n % 2], "content": text} for n, text in enumerate(given)]
    elif _are_inputs(given) and not _is_chat(given):
        given = list(chain.from_iterable(map(_turns_of_input, given)))
    try:
        return [_turn(number, turn) for number, turn in enumerate(given, start=1)]
    except Broken as broken:
        raise Broken(f"{column}: {broken.reason}") from None


def _turns_of_input(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the turns of an input with its output, as xtuner has them."""
    turns = []
    for role, name in (("system", "system"), ("user", "input"), ("assistant", "output")):
        content = given.get(name)
        if content or role == "assistant":
            turns.append({"role": role, "content": content})
    return turns


def _turn(number: int, given: Any) -> dict[str, Any]:
    where = f"turn {number}"
    if not isinstance(given, Mapping):
        raise Broken(f"{where}: must map role and content, got {quoted(given)}")
    # Parquet gives each turn all keys that any turn has.
    turn = {key: value for key, value in given.items() if value is not None}
    for key, sharegpt_key in (("role", "from"), ("content", "value")):
        if key not in turn and sharegpt_key in turn:
            turn[key] = turn.pop(sharegpt_key)
    role = turn.get("role")
    content = turn.get("content")
    if role is None:
        raise Broken(f"{where}: role is missing")
    if isinstance(role, str):
        role = ROLES_OF_OTHERS.get(role, role)
    turn["role"] = role
    if role not in ROLES:
        known = f"known are {', '.join(chain(ROLES, ROLES_OF_OTHERS))}"
        if role in ("function_call", "tool_call"):
            known = "write the call as tool_calls of a turn of the assistant"
        raise Broken(f"{where}: unknown role {quoted(role)}; {known}")
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise Broken(f"{where}: content has parts that are no text")
            texts.append(part["text"])
        content = "".join(texts)
        turn["content"] = content
    calls = turn.get("tool_calls")
    if content is None and not calls:
        raise Broken(f"{where}: content is missing")
    if not isinstance(content, str | None):
        raise Broken(f"{where}: content must be text, got {quoted(content)}")
    may_be_empty = calls or role in ("system", "developer", "tool")
    if not may_be_empty and not str(content).strip():
        raise Broken(f"{where}: content is empty")
    for key in LOSS_KEYS:
        if turn.get(key, 1) not in (0, 1):
            raise Broken(f"{where}: {key} must be 0 or 1, got {quoted(turn[key])}")
    return turn
