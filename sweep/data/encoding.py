"""The rows of a dataset as tokens: rendered, tokenized, and with loss where it belongs.

    rows, broken, notes = tokenized("dataset.jsonl", tokenizer)

An `Encoder` makes tokens of rows, and `encoded` reads and encodes at once. transformers, datasets
and TRL are imported where they are needed.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qlora_sweep.sweep.data.collation import INPUT, MASK
from qlora_sweep.sweep.data.files import Broken, Place, Read, RowsError, Source, is_nothing
from qlora_sweep.sweep.data.kinds import (
    CHATS,
    LOSS_KEYS,
    PREFERENCE,
    Asked,
    Example,
    Layout,
    all_broken,
    common_length,
    example_of,
    first_rows,
    on_completions,
    pair_of,
    shown,
    turns_in,
)

CHARACTERS_MAX = 8_000_000
"""Of a row, for which a tokenizer takes a gigabyte and more."""
_MARKS = re.compile(r"\{\%-?\s*generation\s*-?%\}")
_ALL_SILENT = "every turn of the assistant is said to carry no loss"
_UNTOLD = "the chat template renders the assistant's turns so that they cannot be told apart"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A row as text, and where its loss is: everywhere, behind a prompt, or in some spans."""

    text: str
    prompt: str | None = None
    """The tokens that the whole text has in common with it carry no loss."""
    spans: list[tuple[int, int]] | None = None
    """Of the characters that alone carry loss, in order."""
    is_templated: bool = False
    """Whether it went through a chat template, which brings the special tokens."""
    rejected: Rendered | None = None
    """Of a pair, what was rejected."""

    def carries(self, character: int) -> bool:
        """Return whether a character carries loss."""
        if self.spans is not None:
            return any(begin <= character < end for begin, end in self.spans)
        return self.prompt is None or character >= common_length(self.prompt, self.text)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A row's tokens."""

    ids: NDArray[np.int32]
    mask: NDArray[np.int8]
    """1 where a token carries loss."""
    rejected: Tokens | None = None
    """Of a pair, what was rejected."""

    @property
    def members(self) -> tuple[Tokens, ...]:
        """The row, and of a pair both."""
        return (self,) if self.rejected is None else (self, self.rejected)

    @property
    def differs_from(self) -> int:
        """Of a pair, the first token in which one differs from the other."""
        assert self.rejected is not None
        return common_length(self.ids, self.rejected.ids)

    @property
    def loss_count(self) -> int:
        """Tokens that carry loss: never the first, which nothing comes before to predict it."""
        return int(self.mask[1:].sum())


class Encoder:
    """Makes tokens of rows, as TRL's SFT trainer does.

    Chats go through the tokenizer's template, and have their special tokens from it. Other rows
    begin as the tokenizer begins them, and end with the end-of-sequence token. With loss on
    completions alone, that is on what TRL's completion mask and assistant mask have: a completion
    from where the tokens of its prompt end, of a chat the assistant's turns. Turns of the
    assistant's that say so (`LOSS_KEYS`) carry none in either case.

    Args:
        tokenizer: of transformers.
        layout: how rows are read.
        completions_only: whether loss is on completions and the assistant's turns alone.

    Raises:
        RowsError: rows are chats, and the tokenizer has no template for them.
    """

    def __init__(self, tokenizer: Any, layout: Layout, *, completions_only: bool) -> None:
        self._tokenizer = tokenizer
        self._layout = layout
        self._completions_only = completions_only
        are_chats = any(name in CHATS for name in layout.columns)
        self._is_marking = completions_only and are_chats
        self._templates: dict[bool, str] = {}
        self._end: int | None = tokenizer.eos_token_id
        self._special = dict(tokenizer.special_tokens_map)
        self._fast = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        if are_chats:
            self._template(has_tools=False)
        self._unread = _Unread(layout, completions_only=completions_only)

    @property
    def silenced(self) -> int:
        """Rows so far with turns of the assistant's that are said to carry no loss."""
        return self._unread.silenced

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of the rows so far: what they say and nothing reads."""
        return self._unread.notes()

    @property
    def unmarked_template(self) -> str | None:
        """The template of chats whose turns are told apart by comparing, as neither it nor TRL
        marks them; None where turns are marked, or all of a row carries loss."""
        if not self._is_marking:
            return None
        template = self._template(has_tools=False)
        return None if _MARKS.search(template) else template

    def rendered(self, fields: Mapping[str, Any]) -> Rendered:
        """Return a row as text. Raises Broken."""
        if self._layout.kind == PREFERENCE:
            chosen, rejected = pair_of(fields, self._layout)
            examples = [chosen, rejected]
        else:
            examples = [example_of(fields, self._layout)]
        found = [self._rendered(example) for example in examples]
        self._unread.see(fields, examples, found)
        return found[0] if len(found) == 1 else replace(found[0], rejected=found[1])

    def _rendered(self, example: Example) -> Rendered:
        if isinstance(example.completion, str):
            assert isinstance(example.prompt, str)
            prompt = example.prompt if self._completions_only else None
            rendered = Rendered(example.prompt + example.completion, prompt)
        else:
            rendered = self._of_chat(example)
        text = rendered.text
        if len(text) > CHARACTERS_MAX:
            most = f"at most {CHARACTERS_MAX:,}"
            raise Broken(f"{len(text):,} characters, of {most}: split it into rows")
        try:
            text.isascii() or text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise Broken(f"holds {half!r}, half of a surrogate pair, which is no text") from None
        return rendered

    def tokens(self, rows: Sequence[Rendered]) -> list[Tokens]:
        """Return the tokens of each row."""
        if self._layout.kind == PREFERENCE:
            chosen = self._all_tokens(rows)
            rejected = self._all_tokens([row.rejected for row in rows if row.rejected])
            return [_paired(*pair) for pair in zip(chosen, rejected, strict=True)]
        return self._all_tokens(rows)

    def _all_tokens(self, rows: Sequence[Rendered]) -> list[Tokens]:
        found: dict[int, Tokens] = {}
        for is_templated in (True, False):
            chosen = {i: row for i, row in enumerate(rows) if row.is_templated == is_templated}
            made = self._tokens(list(chosen.values()), adds=not is_templated)
            found |= zip(chosen, made, strict=True)
        return [found[index] for index in range(len(rows))]

    # Chats

    def _of_chat(self, example: Example) -> Rendered:
        assert isinstance(example.prompt, list)
        assert isinstance(example.completion, list)
        prompt = example.prompt
        said = [*prompt, *example.completion]
        turns = [{key: turn[key] for key in turn if key not in LOSS_KEYS} for turn in said]
        silent = {index for index, turn in enumerate(said) if _is_silent(turn)}
        silent -= set(range(len(prompt)))
        if silent and (prompt or self._layout.kind == PREFERENCE):
            key = next(key for key in LOSS_KEYS if said[min(silent)].get(key, 1) == 0)
            raise Broken(f"turn {min(silent) + 1}: {key} is false, which is heeded in chats alone")
        template = self._template(has_tools=example.tools is not None)

        def render(
            turns: Sequence[Any], *, tools: list[Any] | None = example.tools, **options: Any
        ) -> Any:
            from transformers.utils.chat_template_utils import render_jinja_template

            texts, marked = render_jinja_template(
                conversations=[turns],
                tools=tools,
                chat_template=template,
                **options,
                **{**self._special, **example.options},
            )
            return (texts[0], marked[0]) if "return_assistant_tokens_mask" in options else texts[0]

        spans: list[tuple[int, int]] | None = None
        before: str | None = None
        try:
            are_told = not prompt and (self._completions_only or bool(silent))
            if are_told and _MARKS.search(template):
                text, spans = render(turns, return_assistant_tokens_mask=True)
            else:
                text = render(turns)
            _check_said(turns, text)
            if are_told and spans is None:
                spans = _spans_by_comparing(turns, text, render)
            elif self._layout.kind == PREFERENCE:
                before = render(prompt, add_generation_prompt=True)
            elif self._completions_only and prompt:
                before = _prompt(turns, len(prompt), text, render)
            self._unread.see_keys(turns, text, render, has_tools=example.tools is not None)
        except Broken:
            raise
        except Exception as error:
            # Code of somebody's, written for rows of theirs.
            from jinja2 import TemplateError

            verb = "refuses it" if isinstance(error, TemplateError) else "fails"
            raise Broken(f"the chat template {verb}: {error}") from error
        if spans is not None and self._completions_only:
            spans = _without_silent(spans, turns, silent)
        elif spans is not None:
            if silent == _answers(turns):
                raise Broken(_ALL_SILENT)
            spans = _all_but(_without_silent(spans, turns, _answers(turns) - silent), len(text))
        return Rendered(text, before, spans, is_templated=True)

    def _template(self, *, has_tools: bool) -> str:
        """Return the chat template, of chats with loss on the assistant's turns alone one that
        marks these: the tokenizer's own, or TRL's for it."""
        if has_tools not in self._templates:
            try:
                own = self._tokenizer.get_chat_template(tools=[{}] if has_tools else None)
            except ValueError as error:
                name = self._tokenizer.name_or_path
                raise RowsError(
                    f"the tokenizer of '{name}' has no chat template, which these texts need: name "
                    "one that has with --set data.tokenizer=NAME (an instruct model's, say)"
                ) from error
            if self._is_marking and not _MARKS.search(own):
                from trl.chat_template_utils import get_training_chat_template

                # It has none for this template, or this one fails on what it tries.
                with suppress(Exception):
                    own = get_training_chat_template(self._tokenizer) or own
            self._templates[has_tools] = own
        return self._templates[has_tools]

    # Tokens

    def _tokens(self, rows: Sequence[Rendered], *, adds: bool) -> list[Tokens]:
        prompts = iter(self._ids([row.prompt for row in rows if row.prompt is not None], adds))
        texts = [row.text for row in rows]
        if self._fast is None or all(row.spans is None for row in rows):
            whole = self._ids(texts, adds)
            masks = [
                np.ones(len(ids), np.int8) if row.spans is None else self._slow_mask(row, ids, adds)
                for row, ids in zip(rows, whole, strict=True)
            ]
        else:
            encodings = self._fast.encode_batch(texts, add_special_tokens=adds)
            whole = [np.asarray(encoding.ids, np.int32) for encoding in encodings]
            masks = [_mask_of(*pair) for pair in zip(rows, encodings, strict=True)]
        found = []
        for row, ids, mask in zip(rows, whole, masks, strict=True):
            if row.prompt is not None:
                mask[: common_length(next(prompts), ids)] = 0
            if adds and self._end is not None and (not len(ids) or ids[-1] != self._end):
                ids, mask = np.append(ids, np.int32(self._end)), np.append(mask, np.int8(1))
            found.append(Tokens(ids, mask))
        return found

    def _ids(self, texts: Sequence[str], adds: bool) -> list[NDArray[np.int32]]:
        if self._fast is not None:
            encoded = self._fast.encode_batch_fast(list(texts), add_special_tokens=adds)
            return [np.asarray(encoding.ids, np.int32) for encoding in encoded]
        slow = [self._tokenizer(one, add_special_tokens=adds, verbose=False) for one in texts]
        return [np.asarray(one["input_ids"], np.int32) for one in slow]

    def _slow_mask(self, row: Rendered, ids: NDArray[np.int32], adds: bool) -> NDArray[np.int8]:
        """Return the mask of a row by a tokenizer that is Python, and knows no characters."""
        mask = np.zeros(len(ids), np.int8)
        for begin, end in row.spans or ():
            first, last = self._ids([row.text[:begin], row.text[:end]], adds)
            is_last = end == len(row.text)
            mask[common_length(first, ids) : len(ids) if is_last else common_length(last, ids)] = 1
        return mask


def _paired(chosen: Tokens, rejected: Tokens) -> Tokens:
    """Return a pair whose completions begin at the same token: the first that either has."""
    begin = min(int(one.mask.argmax()) for one in (chosen, rejected))
    for one in (chosen, rejected):
        one.mask[begin:] = 1
    return replace(chosen, rejected=rejected)


def _mask_of(row: Rendered, encoding: Any) -> NDArray[np.int8]:
    """Return 1 for the tokens of a row's spans; one that lies across an edge belongs to it."""

    def token_at(character: int) -> int:
        # Some characters belong to no token, such as blanks that a tokenizer trims.
        for at in range(character, min(len(row.text), character + 64)):
            token = encoding.char_to_token(at)
            if token is not None:
                return int(token)
        return len(encoding)

    if row.spans is None:
        return np.ones(len(encoding), np.int8)
    mask = np.zeros(len(encoding), np.int8)
    for begin, end in row.spans:
        last = encoding.char_to_token(end - 1)
        mask[token_at(begin) : token_at(end) if last is None else last + 1] = 1
    return mask


def _said(turn: Mapping[str, Any]) -> str:
    return str(turn.get("content") or "").strip()


def _answer(turn: Mapping[str, Any]) -> str:
    """Return what a turn says behind its thoughts."""
    return _said(turn).rpartition("</think>")[2].strip()


def _place(turn: Mapping[str, Any], text: str, first: int) -> tuple[int, int]:
    """Return where a turn's words begin and end, without thoughts that the template leaves out; -1
    and ``first`` where they are not there."""
    found = ((text.find(words, first), words) for words in (_said(turn), _answer(turn)) if words)
    # A later turn may say the same with its thoughts.
    places = [(begin, begin + len(words)) for begin, words in found if begin >= 0]
    return min(places, default=(-1, first))


def _check_said(turns: Sequence[Mapping[str, Any]], text: str) -> None:
    """Refuse a template that leaves out what is said; thoughts before an answer it may."""
    for number, turn in enumerate(turns, start=1):
        is_said = turn["role"] in ("user", "assistant") and not turn.get("tool_calls")
        if is_said and _answer(turn)[-32:] not in text:
            raise Broken(f"the chat template leaves out what turn {number} says")


def _prompt(
    turns: Sequence[Any], count: int, text: str, render: Callable[..., Any], *, clips: bool = False
) -> str:
    """Return what a turn's prompt is: the turns before it, with what prompts for it.

    Where a template prompts for a turn otherwise than it renders one, what both have in common is
    the prompt's; ``clips`` cuts it there.
    """
    prompted: str = render(turns[:count], add_generation_prompt=True) if count else ""
    if count and text.startswith(prompted):
        return prompted
    if count and text.startswith(render(turns[:count])):
        return prompted[: common_length(prompted, text)] if clips else prompted
    # Some templates tell the turns before otherwise once this one follows. Its own words are looked
    # for, one turn after another, as an answer may repeat what was asked.
    begin, end = -1, 0
    for turn in turns[: count + 1]:
        begin, end = _place(turn, text, end)
    if begin < 0:
        raise Broken(_UNTOLD)
    return text[:begin]


def _spans_by_comparing(
    turns: Sequence[Any], text: str, render: Callable[..., Any]
) -> list[tuple[int, int]]:
    """Return the assistant's turns by what a template without marks makes of the turns up to each,
    with what it closes them by."""
    spans = []
    for index, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        begin = len(_prompt(turns, index, text, render, clips=True))
        through = text if index + 1 == len(turns) else render(turns[: index + 1])
        end = len(through)
        if not text.startswith(through):
            # Some leave an earlier turn's thoughts out: then its own words are looked for.
            found, end = _place(turn, text, begin)
            if found < 0:
                raise Broken(_UNTOLD)
            words = text[found:end]
            closing = through[through.rfind(words) + len(words) :]
            end += common_length(closing, text[end:])
        spans.append((begin, end))
    return spans


def _is_silent(turn: Mapping[str, Any]) -> bool:
    """Return whether a turn of the assistant's says that it carries no loss."""
    return turn["role"] == "assistant" and any(turn.get(key, 1) == 0 for key in LOSS_KEYS)


def _answers(turns: Sequence[Mapping[str, Any]]) -> set[int]:
    return {index for index, turn in enumerate(turns) if turn["role"] == "assistant"}


def _without_silent(
    spans: list[tuple[int, int]], turns: Sequence[Any], silent: set[int]
) -> list[tuple[int, int]]:
    """Return the spans that hold something, without those of turns that carry no loss."""
    answers = sorted(_answers(turns))
    if silent & set(answers):
        if len(spans) != len(answers):
            raise Broken(f"{_UNTOLD}, so that none can be without loss")
        pairs = zip(spans, answers, strict=True)
        spans = [span for span, index in pairs if index not in silent]
        if not spans:
            raise Broken(_ALL_SILENT)
    spans = [(int(begin), int(end)) for begin, end in spans if begin < end]
    if not spans:
        raise Broken(_UNTOLD)
    return spans


def _all_but(spans: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """Return what is between some spans of a text."""
    ends = [0, *(end for _, end in spans)]
    begins = [*(begin for begin, _ in spans), length]
    return [(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]


# What nothing reads

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of turns in which datasets keep thoughts."""
_THINKING = re.compile(r"<think>(.*?)</think>", re.S)
_EMPTY_THOUGHTS = re.compile(
    r"[<\[]([\w:|]{0,20}(?:think|thought|reason)\w{0,20})[>\]]\s*[<\[]/\1[>\]]", re.IGNORECASE
)
_TRIED_MAX = 100
"""Rows that are rendered without a key of their turns, to see whether it is read."""
_NAMES_SHOWN = 12


class _Unread:
    """What rows say and nothing reads, and what a chat template makes of thoughts."""

    def __init__(self, layout: Layout, *, completions_only: bool) -> None:
        self._layout = layout
        self._completions_only = completions_only
        self._rows = 0
        self._tries: Counter[str] = Counter()
        self._tools_tried = 0
        self._reads_tools = False
        self._columns: dict[str, None] = {}
        self._keys: dict[str, bool] = {}
        """Of turns, and whether the template reads each."""
        self._counts: Counter[str] = Counter()
        """Rows of which something is to be told."""

    def see(
        self, fields: Mapping[str, Any], examples: Sequence[Example], rendered: Sequence[Rendered]
    ) -> None:
        """Take a row in, with what it was read and rendered as."""
        self._rows += 1
        are_texts = isinstance(examples[0].completion, str)
        read = {
            column
            for name, column in self._layout.columns.items()
            if not (are_texts and name in ("tools", "chat_template_kwargs"))
        }
        for column, value in fields.items():
            if column not in read and column not in self._columns and not is_nothing(value):
                self._columns[column] = None
        found: set[str] = set()
        for example, text in zip(examples, rendered, strict=True):
            if isinstance(example.completion, str):
                if self._layout.kind != "text" and turns_in(example.completion):
                    found.add("JSON")
            else:
                found |= set(self._of_chat(example.prompt, example.completion, text))
        self._counts.update(found)

    def _of_chat(self, prompt: Any, completion: Any, rendered: Rendered) -> Iterator[str]:
        text = rendered.text
        for turn in [*prompt, *completion]:
            for key in LOSS_KEYS:
                is_other = turn["role"] != "assistant" and key in turn
                if is_other and bool(turn[key]) == self._completions_only:
                    self._keys[f"{key} (of {turn['role']})"] = False
        for turn in completion:
            if _is_silent(turn):
                yield "silent"
            elif turn["role"] == "assistant":
                unread = [key for key in _THOUGHTS if self._keys.get(key) is False and key in turn]
                thoughts = [turn[key] for key in _THOUGHTS if isinstance(turn.get(key), str)]
                thoughts += _THINKING.findall(str(turn.get("content")))
                places = [text.rfind(thought.strip()[-32:]) for thought in thoughts]
                if unread or any(place < 0 or not rendered.carries(place) for place in places):
                    yield "thoughts"
        empty = [
            each for each in _EMPTY_THOUGHTS.finditer(text) if rendered.carries(each.end() - 1)
        ]
        written = "\n".join(str(turn.get("content")) for turn in [*prompt, *completion])
        # What was written so is no template's.
        if empty and len(empty) > len(_EMPTY_THOUGHTS.findall(written)):
            yield "empty thoughts"

    def see_keys(
        self, turns: Sequence[Any], text: str, render: Callable[..., Any], *, has_tools: bool
    ) -> None:
        """See which keys of turns their template reads, and whether it does tools: what it renders
        without them differs."""

        def is_read(turns: Sequence[Any], **options: Any) -> bool:
            try:
                return bool(render(turns, **options) != text)
            except Exception:  # noqa: BLE001 - somebody's code, which misses what is left out
                return True

        if has_tools and not self._reads_tools and self._tools_tried < _TRIED_MAX:
            self._tools_tried += 1
            self._reads_tools = is_read(turns, tools=None)
        keys = {key for turn in turns for key in turn} - {"role", "content"}
        keys = {key for key in keys if not self._keys.get(key) and self._tries[key] < _TRIED_MAX}
        self._tries.update(keys)
        if not keys or not is_read(_without(turns, keys)):
            self._keys |= dict.fromkeys(keys, False)
            return
        for key in keys:
            self._keys[key] = is_read(_without(turns, {key}))

    @property
    def silenced(self) -> int:
        """Rows with turns of the assistant's that are said to carry no loss."""
        return self._counts["silent"]

    def notes(self) -> tuple[str, ...]:
        """Return what of that a person should know."""
        keys = [key for key, is_read in self._keys.items() if not is_read]
        columns = list(self._columns)
        if self._tools_tried and not self._reads_tools:
            columns.append("tools (by the chat template)")
        named = (("columns", columns), ("keys of turns", keys))
        unread = [f"{what} not read: {_listed(names)}" for what, names in named if names]
        found = ["; ".join(unread)] if unread else []
        of_all = {
            key: f"{count:,} of {self._rows:,} examples" for key, count in self._counts.items()
        }
        if thoughts := of_all.get("thoughts"):
            found.append(
                f"the chat template leaves thoughts out of what is supervised, in {thoughts}"
            )
        if "empty thoughts" in of_all:
            found.append(
                "the chat template adds an empty <think></think>, or its like, that is supervised, "
                f"in {of_all['empty thoughts']}: to answer without thoughts is learned"
            )
        if "JSON" in of_all:
            found.append(
                f"turns that are written as JSON are trained on as text, as in TRL, in "
                f"{of_all['JSON']}: write them as lists"
            )
        return tuple(found)


def _without(turns: Sequence[Mapping[str, Any]], keys: set[str]) -> list[dict[str, Any]]:
    return [{key: turn[key] for key in turn if key not in keys} for turn in turns]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(map(shown, names[:_NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")


# Read and encoded


def encoded(rows: Iterable[Read], encoder: Encoder) -> Iterator[tuple[Place, Tokens | Broken]]:
    """Yield each row as tokens that carry loss, or why it is left out.

    Some thousand rows are read and rendered ahead: tokenizers let go of Python's lock, so one
    thread is enough to have both going.
    """
    ahead: deque[Future[list[tuple[Place, Tokens | Broken]]]] = deque()
    with ThreadPoolExecutor(max_workers=1) as thread:
        for batch in _batches(rows, encoder):
            ahead.append(thread.submit(_tokens_of, batch, encoder))
            if len(ahead) > 2:
                yield from ahead.popleft().result()
        for left in ahead:
            yield from left.result()


def _batches(
    rows: Iterable[Read], encoder: Encoder
) -> Iterator[list[tuple[Place, Rendered | Broken]]]:
    """Yield rows as texts, a thousand or two million characters at a time."""
    batch: list[tuple[Place, Rendered | Broken]] = []
    characters = 0
    for place, fields in rows:
        try:
            row = fields if isinstance(fields, Broken) else encoder.rendered(fields)
        except Broken as broken:
            row = broken
        characters += len(row.text) if isinstance(row, Rendered) else 0
        batch.append((place, row))
        if len(batch) >= 1000 or characters >= 2_000_000:
            yield batch
            batch, characters = [], 0
    yield batch


def _tokens_of(
    batch: list[tuple[Place, Rendered | Broken]], encoder: Encoder
) -> list[tuple[Place, Tokens | Broken]]:
    tokens = iter(encoder.tokens([row for _, row in batch if isinstance(row, Rendered)]))
    made = ((place, row if isinstance(row, Broken) else next(tokens)) for place, row in batch)
    return [(place, row if isinstance(row, Broken) else _unless_empty(row)) for place, row in made]


def _unless_empty(row: Tokens) -> Tokens | Broken:
    """Return a row, or why there is nothing to learn from its tokens."""
    if not all(one.loss_count for one in row.members):
        return Broken("no token of it carries loss")
    if row.rejected is not None and np.array_equal(row.ids, row.rejected.ids):
        return Broken("chosen and rejected are the same tokens")
    return row


def tokenized(
    name: str, tokenizer: Any, asked: Asked, *, completions_only: bool | None = None
) -> tuple[Any, list[tuple[Place, Broken]], tuple[str, ...]]:
    """Return a dataset's rows as tokens, with the columns `INPUT` and `MASK`, its broken rows, and
    what a person should know of it; a pair as two rows, where ``preference`` is asked for.

    Raises:
        RowsError: the dataset cannot be read, or no row of it can be trained on.
    """
    from datasets import Dataset

    source = Source(name)
    first, _, layout = first_rows(source, name, asked)
    if layout.kind == PREFERENCE != asked.format:
        raise RowsError(f"{name}: its rows are pairs of completions, and this trains on texts")
    only = on_completions(layout.kind, completions_only)
    encoder = Encoder(tokenizer, layout, completions_only=only)
    kept: list[Tokens] = []
    broken: list[tuple[Place, Broken]] = []
    for place, row in encoded(chain(first, source), encoder):
        if isinstance(row, Tokens):
            kept.extend(row.members)
        else:
            broken.append((place, row))
    if not kept:
        raise RowsError(all_broken(*broken[0], len(broken), name))
    columns = {INPUT: [row.ids for row in kept], MASK: [row.mask for row in kept]}
    return Dataset.from_dict(columns), broken, (*source.notes, *layout.notes, *encoder.notes)
