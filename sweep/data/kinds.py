"""The kinds of rows: which one columns stand for, and what a row of each kind holds.

A row that cannot be trained on is a `Broken` with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from search_spaces.errors import InputError, did_you_mean, listed, quote
from search_spaces.texts import TextsKind

TEXT_COLUMN = "text"
ROLES = ("system", "developer", "user", "assistant", "tool")
ROLES_OF_OTHERS = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""As ShareGPT names them."""
_CALLS = ("function_call", "tool_call")
"""ShareGPT's too, and no role that a chat template knows."""
_MAY_BE_EMPTY = ("system", "developer", "tool")
_NEEDED: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt-completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": (TEXT_COLUMN,),
}
"""Columns of each kind, the most telling kind first."""
_ALPACA = (
    "Below is an instruction that describes a task{also}. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n{context}### Response:\n"
)
"""The prompt that the Alpaca data were published with; trainers use it for these columns."""
_ALPACA_ALSO = ", paired with an input that provides further context"


@dataclass(frozen=True)
class Broken:
    """Why a row cannot be trained on."""

    reason: str


@dataclass(frozen=True)
class Text:
    """A row of one text."""

    text: str


@dataclass(frozen=True)
class Pair:
    """A row of a prompt and what is to follow it."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Chat:
    """A row of turns, as chat templates take them."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    prompt_turns: int = 0
    """The first turns, of which no loss comes even where the assistant's."""
    options: dict[str, Any] = field(default_factory=dict)
    """For the template, ``chat_template_kwargs`` of the row."""


Row = Text | Pair | Chat


def recognised(
    columns: Sequence[str], *, format: str, text_column: str | None, source: str
) -> TextsKind:
    """Return the kind of rows that have such columns.

    Args:
        columns: names, in the source's order.
        format: the kind that was asked for; ``auto`` recognises it.
        text_column: the column that was named as the one with the texts.
        source: the texts' name.

    Raises:
        InputError: a column that was named, or that the format needs, is not there; or no kind of
            rows has these columns.
    """
    if text_column is not None:
        if format not in ("auto", "text"):
            raise InputError(
                f"data.text_column {text_column} and data.format {format} are both given: keep one"
            )
        _require(text_column, columns, source=source, why="")
        return "text"
    if format != "auto":
        for column in _NEEDED[format]:
            _require(column, columns, source=source, why=f", which data.format {format} needs")
        return cast(TextsKind, format)
    for kind, needed in _NEEDED.items():
        if set(needed) <= set(columns):
            return cast(TextsKind, kind)
    raise InputError(
        f"{source}: its columns are {_listed_columns(columns)}, and none of "
        f"{listed(' with '.join(needed) for needed in _NEEDED.values())}: name the one with the "
        "texts with --set data.text_column=NAME"
    )


def _require(column: str, columns: Sequence[str], *, source: str, why: str) -> None:
    if column not in columns:
        raise InputError(f"{source}: no column {quote(column)}{why}{did_you_mean(column, columns)}")


def _listed_columns(columns: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in columns[:12])
    return f"{shown} and {len(columns) - 12} more" if len(columns) > 12 else shown


def parsed(values: Mapping[str, Any], kind: TextsKind, *, text_column: str | None) -> Row | Broken:
    """Return what a row holds, or why it cannot be trained on."""
    match kind:
        case "text":
            column = text_column or TEXT_COLUMN
            fault = _text_fault(values, column)
            return Broken(fault) if fault else Text(values[column])
        case "instruction":
            return _instruction(values)
        case "prompt-completion":
            return _pair(values)
        case "messages" | "conversations":
            return _chat(values, kind)


def _text_fault(values: Mapping[str, Any], column: str) -> str | None:
    """Return what is wrong with a field that is to be a text; None where nothing is."""
    match values.get(column):
        case None:
            return f"{column} is {'null' if column in values else 'missing'}"
        case str() as text:
            return None if text.strip() else f"{column} is empty"
        case other:
            return f"{column} must be text, got {quote(other)}"


def _instruction(values: Mapping[str, Any]) -> Row | Broken:
    for column in _NEEDED["instruction"]:
        if fault := _text_fault(values, column):
            return Broken(fault)
    context = values.get("input") or ""
    if not isinstance(context, str):
        return Broken(f"input must be text, got {quote(context)}")
    prompt = _ALPACA.format(
        also=_ALPACA_ALSO if context.strip() else "",
        instruction=values["instruction"],
        context=f"### Input:\n{context}\n\n" if context.strip() else "",
    )
    return Pair(prompt, values["output"])


def _pair(values: Mapping[str, Any]) -> Row | Broken:
    if isinstance(values.get("prompt"), list) and isinstance(values.get("completion"), list):
        return _chat_pair(values)
    for column in _NEEDED["prompt-completion"]:
        if fault := _text_fault(values, column):
            return Broken(fault)
    return Pair(values["prompt"], values["completion"])


def _chat_pair(values: Mapping[str, Any]) -> Row | Broken:
    """Return a prompt and a completion that are turns each."""
    prompt = _turns(values, "prompt", needs_assistant=False)
    completion = _turns(values, "completion")
    if isinstance(prompt, Broken) or isinstance(completion, Broken):
        return prompt if isinstance(prompt, Broken) else cast(Broken, completion)
    return _with_extras(values, [*prompt, *completion], prompt_turns=len(prompt))


def _chat(values: Mapping[str, Any], column: str) -> Row | Broken:
    turns = _turns(values, column)
    return turns if isinstance(turns, Broken) else _with_extras(values, turns)


def _with_extras(
    values: Mapping[str, Any], turns: list[dict[str, Any]], *, prompt_turns: int = 0
) -> Row | Broken:
    """Return a chat with the tools and options that its row may bring for the template."""
    tools, options = _decoded(values.get("tools")), _decoded(values.get("chat_template_kwargs"))
    if tools is not None and not isinstance(tools, list):
        return Broken(f"tools must be a list, got {quote(tools)}")
    if options is not None and not isinstance(options, dict):
        return Broken(f"chat_template_kwargs must map keys to values, got {quote(options)}")
    return Chat(turns, tools or None, prompt_turns, options or {})


def _decoded(value: Any) -> Any:
    """Return what a cell of CSV or Parquet holds that has JSON for a text; else the value."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _turns(
    values: Mapping[str, Any], column: str, *, needs_assistant: bool = True
) -> list[dict[str, Any]] | Broken:
    """Return a row's turns with role and content, whoever named them, or what is wrong."""
    value = _decoded(values.get(column))
    if value is None:
        return Broken(f"{column} is {'null' if column in values else 'missing'}")
    if not isinstance(value, list):
        return Broken(f"{column} must be a list of turns, got {quote(value)}")
    if not value:
        return Broken(f"{column} is empty")
    turns: list[dict[str, Any]] = []
    for number, given in enumerate(value, start=1):
        turn = _turn(given)
        if isinstance(turn, str):
            return Broken(f"{column}: turn {number}: {turn}")
        turns.append(turn)
    if needs_assistant and not any(turn["role"] == "assistant" for turn in turns):
        return Broken(f"{column}: no turn of the assistant")
    return turns


def _turn(given: Any) -> dict[str, Any] | str:
    """Return a turn as templates take it, or what is wrong with it."""
    if not isinstance(given, Mapping):
        return f"must map role and content, got {quote(given)}"
    # Parquet gives each turn all keys that any turn has.
    turn = {key: value for key, value in given.items() if value is not None}
    for own, others in (("role", "from"), ("content", "value")):
        if own not in turn and others in turn:
            turn[own] = turn.pop(others)
    role = turn.get("role")
    if role is None:
        return "role is missing"
    turn["role"] = role = ROLES_OF_OTHERS.get(role, role) if isinstance(role, str) else role
    if role in _CALLS:
        return (
            f"unknown role {quote(role)}: write the call as tool_calls of a turn of the assistant"
        )
    if role not in ROLES:
        return f"unknown role {quote(role)}; known are {', '.join((*ROLES, *ROLES_OF_OTHERS))}"
    return _with_content(turn)


def _with_content(turn: dict[str, Any]) -> dict[str, Any] | str:
    content = turn.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            return "content has parts that are no text"
        turn["content"] = content = "".join(cast(list[str], texts))
    if content is None and turn.get("tool_calls"):
        return turn
    if content is None:
        return "content is missing"
    if not isinstance(content, str):
        return f"content must be text, got {quote(content)}"
    is_needed = turn["role"] not in _MAY_BE_EMPTY and not turn.get("tool_calls")
    return "content is empty" if is_needed and not content.strip() else turn
