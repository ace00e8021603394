"""What rows are recognised as, and which of them cannot be trained on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qlora_sweep.sweep.data.files import Broken, RowsError
from qlora_sweep.sweep.data.kinds import (
    Asked,
    Example,
    Layout,
    example_of,
    on_completions,
    recognised,
)
from tests.sweep.data.layouts import layout_of

INSTRUCTION = layout_of("instruction")
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
SYSTEM = {"role": "system", "content": "Be kind."}
THEIRS = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        (("id", "text", "label"), "text"),
        (("instruction", "input", "output", "text"), "instruction"),
        (("instruction", "output"), "instruction"),
        (("prompt", "completion"), "prompt-completion"),
        (("text", "messages"), "messages"),
        (("conversations", "id"), "conversations"),
        (("prompt", "chosen", "rejected"), "preference"),
        (("prompt", "messages", "chosen", "rejected"), "messages"),
    ],
)
def test_the_kind_is_recognised_by_the_columns(columns: tuple[str, ...], kind: str) -> None:
    assert recognised("mine", dict.fromkeys(columns, "x")).kind == kind


def test_what_was_typed_overrules_the_columns() -> None:
    assert recognised("mine", {"messages": [], "text": "x"}, Asked("text")).kind == "text"
    for format in ("auto", "text"):
        samples = {"messages": [], "story": "x"}
        assert recognised("mine", samples, Asked(format, "story")).columns == {"text": "story"}


@pytest.mark.parametrize(
    ("columns", "typed", "words"),
    [
        (("story", "label"), (), "its columns are story, label, and none of messages"),
        (("prompt", "chosen"), (), "prompt, chosen, and no 'rejected', which pairs need"),
        (("prompt", "rejected"), (), "and no 'chosen', which pairs need"),
        (tuple(f"c{number}" for number in range(100)), (), "c11 and 88 more"),
        (("story",), ("auto", "stroy"), "no column 'stroy'; did you mean 'story'?"),
        (("text",), ("messages",), "no column 'messages', which data.format"),
        (("prompt",), ("prompt-completion",), "no column 'completion', which"),
        (("text",), ("messages", "text"), "are both given: keep one"),
    ],
)
def test_columns_that_do_not_go_with_what_was_typed_are_named(
    columns: tuple[str, ...], typed: tuple[str, ...], words: str
) -> None:
    with pytest.raises(RowsError) as refused:
        recognised("mine", dict.fromkeys(columns, "x"), Asked(*typed))
    assert words in str(refused.value)


def test_loss_is_on_completions_by_default_where_trl_has_it() -> None:
    kinds = ("text", "messages", "conversations", "prompt-completion", "instruction")
    assert [on_completions(kind) for kind in kinds] == [False, False, False, True, True]
    assert on_completions("messages", True)
    assert not on_completions("instruction", False)
    with pytest.raises(RowsError, match="no completions of their own"):
        on_completions("text", True)


def test_an_instruction_is_put_as_alpaca_put_it() -> None:
    row = {"instruction": "Add.", "input": "", "output": "4"}
    plain = example_of(row, INSTRUCTION)
    assert plain.completion == "4"
    preamble = (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request."
    )
    asked = "### Instruction:\nAdd.\n\n### Response:\n"
    assert plain.prompt == f"{preamble}\n\n{asked}"
    given = str(example_of(row | {"input": "2, 2"}, INSTRUCTION).prompt)
    assert given.endswith("### Instruction:\nAdd.\n\n### Input:\n2, 2\n\n### Response:\n")
    assert given.startswith("Below is an instruction that describes a task, paired with an")
    more = row | {"system": "Be kind.", "history": json.dumps([["2?", "Two."]])}
    before = "### Instruction:\n2?\n\n### Response:\nTwo.\n\n"
    assert example_of(more, INSTRUCTION).prompt == f"Be kind.\n\n{before}{asked}"


@pytest.mark.parametrize(
    ("kind", "row", "expected"),
    [
        ("text", {"text": " a "}, Example("", " a ")),
        ("prompt-completion", {"prompt": "2 =", "completion": " 2"}, Example("2 =", " 2")),
        (
            "prompt-completion",
            {"prompt": TURNS[:1], "completion": json.dumps(TURNS[1:])},
            Example(TURNS[:1], TURNS[1:]),
        ),
        ("messages", {"messages": TURNS}, Example([], TURNS)),
        ("messages", {"messages": json.dumps(TURNS)}, Example([], TURNS)),
        ("messages", {"messages": THEIRS}, Example([], TURNS)),
        ("conversations", {"conversations": THEIRS}, Example([], TURNS)),
        (
            "conversations",
            {"conversations": THEIRS, "system": "Be kind."},
            Example([], [SYSTEM, *TURNS]),
        ),
        ("conversations", {"conversations": THEIRS, "system": " "}, Example([], TURNS)),
        (
            "conversations",
            {"conversations": [*THEIRS, {"from": "observation", "value": "42"}]},
            Example([], [*TURNS, {"role": "tool", "content": "42"}]),
        ),
        # What a table makes of turns.
        ("messages", {"messages": [turn | {"name": None} for turn in TURNS]}, Example([], TURNS)),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"text": "h"}, {"text": "i"}]}, TURNS[1]]},
            Example([], TURNS),
        ),
        (
            "messages",
            {"messages": [TURNS[0], CALL], "tools": json.dumps([{"name": "add"}])},
            Example([], [TURNS[0], CALL], [{"name": "add"}]),
        ),
        (
            "messages",
            {
                "messages": [SYSTEM | {"content": ""}, *TURNS],
                "chat_template_kwargs": {"a": 1},
                "tools": {},
            },
            Example([], [SYSTEM | {"content": ""}, *TURNS], None, {"a": 1}),
        ),
    ],
)
def test_a_row_is_what_its_kind_says(kind: str, row: dict[str, Any], expected: Example) -> None:
    assert example_of(row, layout_of(kind)) == expected
    assert example_of({"story": "a"}, Layout("text", {"text": "story"})) == Example("", "a")


def messages(*turns: Any) -> dict[str, Any]:
    return {"messages": list(turns)}


@pytest.mark.parametrize(
    ("kind", "row", "reason"),
    [
        ("text", {}, "text is missing"),
        ("text", {"text": None}, "text is null"),
        ("text", {"text": " \n\t"}, "text is empty"),
        ("text", {"text": 3.5}, "text must be text, got 3.5"),
        ("instruction", {"instruction": "a"}, "output is missing"),
        ("instruction", {"instruction": "", "output": "b"}, "instruction is empty"),
        ("instruction", {"instruction": "a", "input": 7, "output": "b"}, "input must be text"),
        (
            "instruction",
            {"instruction": "a", "output": "b", "history": [["a"]]},
            "history must be a list of pairs",
        ),
        ("prompt-completion", {"prompt": "a", "completion": ""}, "completion is empty"),
        ("prompt-completion", {"prompt": TURNS, "completion": "b"}, "must be a list of turns, got"),
        ("prompt-completion", {"prompt": TURNS, "completion": TURNS[:1]}, "no turn of the assis"),
        # Several answers are no chat.
        ("prompt-completion", {"prompt": "a", "completion": ["b", "c"]}, "must be text or turns"),
        ("prompt-completion", {"prompt": ["a"], "completion": ["b", "c"]}, "must be text or turns"),
        ("messages", {}, "messages is missing"),
        ("messages", messages(), "messages is empty"),
        ("messages", {"messages": "hello"}, "messages must be a list of turns, got 'hello'"),
        ("messages", messages(3), "turn 1: must map role and content, got 3"),
        ("messages", messages(TURNS[0]), "messages: no turn of the assistant"),
        ("messages", messages({"role": "bard", "content": "a"}), "turn 1: unknown role 'bard'; kn"),
        ("messages", messages({"role": ["user"], "content": "a"}), 'unknown role ["user"]'),
        ("messages", messages({"role": "tool_call", "content": "a"}), "write the call as tool_cal"),
        ("messages", messages({"content": "a"}), "turn 1: role is missing"),
        ("messages", messages(TURNS[0], {"role": "assistant"}), "turn 2: content is missing"),
        ("messages", messages(TURNS[0] | {"content": " "}), "turn 1: content is empty"),
        ("messages", messages(TURNS[0] | {"content": 1}), "content must be text, got 1"),
        ("messages", messages(TURNS[0] | {"content": [{"type": "image"}]}), "parts that are no te"),
        ("messages", messages(TURNS[0] | {"weight": "x"}), "weight must be 0 or 1"),
        ("messages", {"messages": TURNS, "tools": 3}, "tools must be a list, got 3"),
        ("messages", {"messages": TURNS, "chat_template_kwargs": []}, "must map keys to values"),
        ("messages", {"messages": [SYSTEM, *TURNS], "system": "b"}, "system is a column and anot"),
    ],
)
def test_a_row_that_cannot_be_trained_on_has_a_reason(
    kind: str, row: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Broken) as broken:
        example_of(row, layout_of(kind))
    assert reason in broken.value.reason
