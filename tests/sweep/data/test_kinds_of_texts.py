"""What rows are recognised as, and which of them cannot be trained on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from search_spaces.errors import InputError
from sweep.data.kinds import Broken, Chat, Pair, Text, parsed, recognised

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def kind_of(*columns: str, format: str = "auto", text_column: str | None = None) -> str:
    return recognised(columns, format=format, text_column=text_column, source="mine.jsonl")


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        (("text",), "text"),
        (("id", "text", "label"), "text"),
        (("instruction", "input", "output"), "instruction"),
        (("instruction", "output"), "instruction"),
        (("instruction", "input", "output", "text"), "instruction"),
        (("prompt", "completion"), "prompt-completion"),
        (("messages",), "messages"),
        (("conversations", "id"), "conversations"),
        (("text", "messages"), "messages"),
    ],
)
def test_the_kind_is_recognised_by_the_columns(columns: tuple[str, ...], kind: str) -> None:
    assert kind_of(*columns) == kind


def test_what_was_typed_overrules_the_columns() -> None:
    assert kind_of("messages", "text", format="text") == "text"
    assert kind_of("messages", "story", text_column="story") == "text"
    assert kind_of("messages", "story", text_column="story", format="text") == "text"


@pytest.mark.parametrize(
    ("columns", "typed", "words"),
    [
        (("story", "label"), {}, "its columns are 'story', 'label', and none of messages"),
        (("story",), {"text_column": "stroy"}, "no column 'stroy'; did you mean 'story'?"),
        (
            ("text",),
            {"format": "messages"},
            "no column 'messages', which data.format",
        ),
        (("prompt",), {"format": "prompt-completion"}, "no column 'completion', which"),
        (("text",), {"text_column": "text", "format": "messages"}, "are both given: keep one"),
    ],
)
def test_columns_that_do_not_go_with_what_was_typed_are_named(
    columns: tuple[str, ...], typed: dict[str, str], words: str
) -> None:
    with pytest.raises(InputError) as refused:
        kind_of(*columns, **typed)
    assert words in str(refused.value)


def test_of_many_columns_a_dozen_are_named() -> None:
    with pytest.raises(InputError, match="'c11' and 88 more"):
        kind_of(*(f"c{number}" for number in range(100)))


def row(kind: Any, values: dict[str, Any], text_column: str | None = None) -> Any:
    return parsed(values, kind, text_column=text_column)


def test_a_text_is_taken_from_the_column_that_was_named() -> None:
    assert row("text", {"text": "a"}) == Text("a")
    assert row("text", {"text": "a", "story": " b "}, "story") == Text(" b ")


def test_an_instruction_is_put_as_alpaca_put_it() -> None:
    plain = row("instruction", {"instruction": "Add.", "input": "", "output": "4"})
    assert plain.completion == "4"
    assert plain.prompt.endswith("### Instruction:\nAdd.\n\n### Response:\n")
    assert "Input" not in plain.prompt
    given = row("instruction", {"instruction": "Add.", "input": "2, 2", "output": "4"})
    assert given.prompt.endswith("### Instruction:\nAdd.\n\n### Input:\n2, 2\n\n### Response:\n")
    assert given.prompt.startswith("Below is an instruction that describes a task, paired with an")
    assert row("instruction", {"instruction": "Add.", "output": "4"}) == plain


def test_a_prompt_and_its_completion_are_texts_or_turns() -> None:
    assert row("prompt-completion", {"prompt": "2 + 2 =", "completion": " 4"}) == Pair(
        "2 + 2 =", " 4"
    )
    chat = row("prompt-completion", {"prompt": TURNS[:1], "completion": TURNS[1:]})
    assert chat == Chat(TURNS, None, prompt_turns=1)


def test_sharegpts_turns_are_the_same_as_the_hubs() -> None:
    theirs = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    assert row("conversations", {"conversations": theirs}) == Chat(TURNS)
    assert row("conversations", {"conversations": TURNS}) == Chat(TURNS)
    assert row("messages", {"messages": theirs}) == Chat(TURNS)
    for tool in ("tool", "observation"):
        told = [*theirs, {"from": tool, "value": "42"}]
        expected = Chat([*TURNS, {"role": "tool", "content": "42"}])
        assert row("conversations", {"conversations": told}) == expected


def test_what_a_table_makes_of_turns_is_undone() -> None:
    padded = [turn | {"tool_calls": None, "name": None} for turn in TURNS]
    assert row("messages", {"messages": padded}) == Chat(TURNS)
    assert row("messages", {"messages": json.dumps(TURNS)}) == Chat(TURNS)
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"text": "i"}]}, TURNS[1]]
    assert row("messages", {"messages": parts}) == Chat(TURNS)


def test_tools_and_what_they_are_called_with_reach_the_template() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    chat = row("messages", {"messages": [TURNS[0], call], "tools": json.dumps([{"name": "add"}])})
    assert chat == Chat([TURNS[0], call], [{"name": "add"}])


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        ("text", {}, "text is missing"),
        ("text", {"text": None}, "text is null"),
        ("text", {"text": ""}, "text is empty"),
        ("text", {"text": " \n\t"}, "text is empty"),
        ("text", {"text": 3.5}, "text must be text, got 3.5"),
        ("text", {"text": ["a"]}, "text must be text, got ['a']"),
        ("instruction", {"instruction": "a"}, "output is missing"),
        ("instruction", {"instruction": "", "output": "b"}, "instruction is empty"),
        (
            "instruction",
            {"instruction": "a", "input": 7, "output": "b"},
            "input must be text, got 7",
        ),
        ("prompt-completion", {"prompt": "a", "completion": ""}, "completion is empty"),
        ("prompt-completion", {"prompt": TURNS, "completion": "b"}, "prompt must be text, got"),
        (
            "prompt-completion",
            {"prompt": TURNS[:1], "completion": TURNS[:1]},
            "completion: no turn of the assistant",
        ),
        ("messages", {}, "messages is missing"),
        ("messages", {"messages": []}, "messages is empty"),
        ("messages", {"messages": "hello"}, "messages must be a list of turns, got 'hello'"),
        ("messages", {"messages": {"role": "user"}}, "messages must be a list of turns"),
        ("messages", {"messages": ["hello"]}, "turn 1: must map role and content, got 'hello'"),
        ("messages", {"messages": TURNS[:1]}, "messages: no turn of the assistant"),
        (
            "messages",
            {"messages": [{"role": "narrator", "content": "a"}]},
            "turn 1: unknown role 'narrator'; known are system, developer, user",
        ),
        ("messages", {"messages": [{"role": ["user"], "content": "a"}]}, "unknown role ['user']"),
        (
            "conversations",
            {"conversations": [{"from": "function_call", "value": "{}"}]},
            "turn 1: unknown role 'function_call': write the call as tool_calls",
        ),
        ("messages", {"messages": [{"content": "a"}]}, "turn 1: role is missing"),
        ("messages", {"messages": [TURNS[0], {"role": "assistant"}]}, "turn 2: content is missing"),
        (
            "messages",
            {"messages": [TURNS[0], {"role": "assistant", "content": " "}]},
            "turn 2: content is empty",
        ),
        ("messages", {"messages": [{"role": "user", "content": 1}]}, "content must be text, got 1"),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "content has parts that are no text",
        ),
        ("messages", {"messages": TURNS, "tools": 3}, "tools must be a list, got 3"),
        (
            "conversations",
            {"conversations": [{"from": "bing", "value": "a"}]},
            "conversations: turn 1: unknown role 'bing'",
        ),
    ],
)
def test_a_row_that_cannot_be_trained_on_has_a_reason(
    kind: str, values: dict[str, Any], reason: str
) -> None:
    found = row(kind, values)
    assert isinstance(found, Broken)
    assert reason in found.reason


def test_only_systems_and_tools_may_say_nothing() -> None:
    silent = [{"role": "system", "content": ""}, *TURNS, {"role": "tool", "content": ""}]
    assert row("messages", {"messages": silent}) == Chat(silent)
