"""What rows are recognised as, and which of them cannot be trained on."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from qlora_sweep.sweep.data.files import Broken, RowsError
from qlora_sweep.sweep.data.kinds import Example, ReadingOptions, example_of, recognised
from tests.sweep.data.layouts import layout_of
from tests.tables import cases

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
SYSTEM = {"role": "system", "content": "Be kind."}
THEIRS = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ("id text label", "text"),
        ("instruction input output text", "instruction"),
        ("prompt completion", "prompt-completion"),
        ("prompt chosen rejected", "preference"),
        ("prompt messages chosen rejected", "messages"),
    ],
)
def test_the_kind_is_recognised_by_the_columns(columns: str, kind: str) -> None:
    assert recognised("mine", dict.fromkeys(columns.split(), "x")).kind == kind


def test_what_was_typed_overrules_the_columns() -> None:
    assert recognised("mine", {"messages": [], "text": "x"}, ReadingOptions("text")).kind == "text"
    named = ReadingOptions(text_column="story")
    assert recognised("mine", {"messages": [], "story": "x"}, named).columns == {"text": "story"}


@pytest.mark.parametrize(
    ("columns", "typed", "words"),
    [
        ("story label", (), "story, label, and none of messages"),
        ("prompt chosen", (), "no 'rejected'"),
        (" ".join(f"c{number}" for number in range(100)), (), "c11 and 88 more"),
        ("story", ("auto", "stroy"), "did you mean 'story'"),
        ("prompt", ("prompt-completion",), "no column 'completion'"),
    ],
)
def test_columns_that_do_not_go_with_what_was_typed_are_named(
    columns: str, typed: tuple[str, ...], words: str
) -> None:
    with pytest.raises(RowsError, match=words):
        recognised("mine", dict.fromkeys(columns.split(), "x"), ReadingOptions(*typed))


def test_an_instruction_is_put_as_alpaca_put_it() -> None:
    row = {"instruction": "Add.", "input": "2, 2", "output": "4"}
    begins = "Below is an instruction that describes a task"
    asked = "Write a response that appropriately completes the request.\n\n### Instruction:\nAdd."
    example = example_of(row, layout_of("instruction"))
    also = ", paired with an input that provides further context. "
    ends = "\n\n### Input:\n2, 2\n\n### Response:\n"
    assert example == Example(begins + also + asked + ends, "4")
    plain = example_of(row | {"input": ""}, layout_of("instruction"))
    assert plain.prompt == f"{begins}. {asked}\n\n### Response:\n"


READ = """
- - prompt-completion
  - {prompt: [{role: user, content: hi}], completion: '[{"role": "assistant", "content": "yo"}]'}
  - {prompt: [{role: user, content: hi}], completion: [{role: assistant, content: yo}]}
- - messages
  - {messages: '[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]'}
  - {completion: &turns [&user {role: user, content: hi}, &answer {role: assistant, content: yo}]}
- - conversations
  - system: Be kind.
    conversations: [&human {from: human, value: hi}, &gpt {from: gpt, value: yo}]
  - {completion: [{role: system, content: Be kind.}, *user, *answer]}
- - conversations
  - {system: " ", conversations: [*human, *gpt, {from: observation, value: "42"}]}
  - {completion: [*user, *answer, {role: tool, content: "42"}]}
# What a table makes of turns.
- - messages
  - {messages: [{role: user, content: hi, name: null}, {<<: *answer, name: null}]}
  - {completion: *turns}
- - messages
  - {messages: [{role: user, content: [{text: h}, {text: i}]}, *answer]}
  - {completion: *turns}
- - messages
  - tools: '[{"name": "add"}]'
    messages: [*user, &call {role: assistant, tool_calls: [{function: {name: add, arguments: {}}}]}]
  - {completion: [*user, *call], tools: [{name: add}]}
- - messages
  - messages: [{role: system, content: ""}, *user, *answer]
    chat_template_kwargs: {a: 1}
    tools: {}
  - {completion: [{role: system, content: ""}, *user, *answer], options: {a: 1}}
"""


@pytest.mark.parametrize(("kind", "row", "expected"), yaml.safe_load(READ))
def test_a_row_is_what_its_kind_says(
    kind: str, row: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert example_of(row, layout_of(kind)) == Example(**{"prompt": [], **expected})


def reason_of(kind: str, row: dict[str, Any]) -> str:
    with pytest.raises(Broken) as broken:
        example_of(row, layout_of(kind))
    return broken.value.reason


BROKEN = """
- [text, {}, text is missing]
- [text, {text: null}, text is null]
- [text, {text: " \\n\\t"}, text is empty]
- [text, {text: 3.5}, got 3.5]
- [instruction, {instruction: a, input: 7, output: b}, input must be text]
- [instruction, {instruction: a, output: b, history: [[a]]}, history must]
- - prompt-completion
  - prompt: &turns [&user {role: user, content: hi}, {role: assistant, content: yo}]
    completion: b
  - "a list of turns, got"
- [prompt-completion, {prompt: *turns, completion: [*user]}, no turn of the assis]
# Several answers are no chat.
- [prompt-completion, {prompt: a, completion: [b, c]}, text or turns]
- [messages, {messages: []}, messages is empty]
- [messages, {messages: *turns, tools: 3}, "tools must be a list, got 3"]
- [messages, {messages: *turns, chat_template_kwargs: []}, chat_template_kwargs must]
- [messages, {messages: [{role: system, content: a}, *user], system: b}, system is a column]
"""


@pytest.mark.parametrize(("kind", "row", "reason"), yaml.safe_load(BROKEN))
def test_a_row_that_cannot_be_trained_on_has_a_reason(
    kind: str, row: dict[str, Any], reason: str
) -> None:
    assert reason in reason_of(kind, row)


@pytest.mark.parametrize(
    ("turn", "reason"),
    cases(
        """
        3 | got 3
        {role: bard, content: a} | unknown role 'bard'
        {role: [user], content: a} | unknown role ["user"]
        {role: tool_call, content: a} | tool_calls
        {content: a} | role is missing
        {role: assistant} | content is missing
        {role: user, content: ' '} | content is empty
        {role: user, content: 1} | content must be text, got 1
        {role: user, content: [{type: image}]} | no text
        {role: user, content: a, weight: x} | weight must be 0 or 1
        """
    ),
)
def test_a_turn_that_cannot_be_trained_on_is_named_with_its_reason(turn: Any, reason: str) -> None:
    found = reason_of("messages", {"messages": [*TURNS, turn]})
    assert "turn 3" in found
    assert reason in found
