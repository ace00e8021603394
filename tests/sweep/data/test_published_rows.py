"""Datasets in the shapes that people publish, and what people reported of neighbours: each row is
what TRL makes of it, or the message says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from qlora_sweep.sweep.data.encoding import tokenized
from qlora_sweep.sweep.data.files import DatasetSource, RowsError
from qlora_sweep.sweep.data.kinds import ReadingOptions, example_of, first_rows
from tests.sweep.data.judged_by_trl import (
    labelled,
    preference_rows,
    supervised_rows,
    template_named,
)
from tests.sweep.data.layouts import written_rows
from tests.tables import cases

CASES = Path(__file__).parents[2] / "data" / "cases"
pytestmark = pytest.mark.filterwarnings("ignore")

Labelled = list[tuple[list[int], list[int]]]
Read = Callable[..., tuple[Labelled, str]]
AUTO = ReadingOptions()


@pytest.fixture
def tokenizer(shipped: Any) -> Iterator[Any]:
    own = shipped.chat_template
    yield shipped
    shipped.chat_template = own


@pytest.fixture
def ours(tokenizer: Any, tmp_path: Path) -> Read:
    """Returns ids and labels of the rows of a file, none of which is broken, and the notes."""

    def read(
        rows: Any, asked: ReadingOptions = AUTO, only: bool | None = None
    ) -> tuple[Labelled, str]:
        if isinstance(rows, list):
            rows = written_rows(tmp_path / "rows.jsonl", rows)
        found, broken, notes = tokenized(str(rows), tokenizer, asked, completions_only=only)
        assert broken == []
        pairs = zip(found["input_ids"], found["completion_mask"], strict=True)
        return [labelled(ids, mask) for ids, mask in pairs], "; ".join(notes)

    return read


@pytest.fixture
def theirs(tokenizer: Any, tmp_path: Path) -> Callable[[Sequence[Any]], Labelled]:
    def read(rows: Sequence[Any]) -> Labelled:
        from datasets import Dataset

        given = Dataset.from_list([*rows], on_mixed_types="use_json")
        if "chosen" in rows[0]:
            return preference_rows(tokenizer, given)
        return supervised_rows(tokenizer, given, tmp_path)

    return read


def learned(tokenizer: Any, labels: Sequence[int]) -> str:
    return str(tokenizer.decode([token for token in labels if token >= 0]))


def refusal(ours: Read, *given: Any) -> str:
    with pytest.raises(RowsError) as refused:
        ours(*given)
    return str(refused.value)


def turns(*dataset: str, system: str = "") -> list[dict[str, str]]:
    sides = ("user", "assistant")
    found = [{"role": sides[n % 2], "content": text} for n, text in enumerate(dataset)]
    return [{"role": "system", "content": system}, *found] if system else found


def said(*dataset: str, system: str = "") -> list[dict[str, Any]]:
    """Return turns as ShareGPT has them."""
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    of_chat = turns(*dataset, system=system)
    return [{"from": names[turn["role"]], "value": turn["content"]} for turn in of_chat]


# Files that were reported


def rows_of(name: str) -> list[dict[str, Any]]:
    text = (CASES / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def pairs_of(prompt: str, completion: str, name: str) -> list[dict[str, Any]]:
    return [{"prompt": row[prompt], "completion": row[completion]} for row in rows_of(name)]


SPREAD = [{"prompt": f"Say {n}", "completion": str(n)} for n in range(6)]


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        ("json_text.jsonl", "auto", rows_of("json_text.jsonl")),
        ("json_pairs.jsonl", "preference", rows_of("json_pairs.jsonl")),
        ("qa.jsonl", "auto", pairs_of("question", "answer", "qa.jsonl")),
        ("query_response.jsonl", "auto", pairs_of("query", "response", "query_response.jsonl")),
        ("pretty.jsonl", "auto", SPREAD),
        ("concat.jsonl", "auto", SPREAD),
        ("single.json", "auto", SPREAD[1:2]),
        (
            "xtuner.jsonl",
            "auto",
            [
                {"prompt": turns(f"Say {n}", system="Be brief."), "completion": [answer]}
                for n in range(6)
                for answer in [{"role": "assistant", "content": str(n)}]
            ],
        ),
    ],
)
def test_a_reported_file_is_what_trl_makes_of_it(
    name: str, asked: str, expected: Any, ours: Read, theirs: Any
) -> None:
    assert ours(CASES / name, ReadingOptions(asked))[0] == theirs(expected)


@pytest.mark.parametrize("name", ["swift_loss", "axolotl_train"])
@pytest.mark.parametrize("only", [None, True])
def test_a_turn_that_says_so_carries_no_loss(
    name: str, only: bool | None, ours: Read, tokenizer: Any
) -> None:
    found, notes = ours(CASES / f"{name}.jsonl", only=only)
    for number, (ids, labels) in enumerate(found):
        assert "Wrong draft." in tokenizer.decode(ids)
        text = learned(tokenizer, labels)
        assert "Wrong" not in text
        assert f"{number}." in text
        assert ("Again" in text) == (only is None)
    assert notes == ""


def test_images_are_refused_and_empty_lists_of_them_read(ours: Read) -> None:
    assert "line 1: column 'images'" in refusal(ours, CASES / "images_llamafactory.jsonl")
    later = [row | {"images": []} for row in rows_of("images_llamafactory.jsonl")]
    assert len(ours(later)[0]) == 6
    later[4]["images"] = ["a.jpg"]
    assert "line 5: column 'images'" in refusal(ours, later)


THOUGHTS_LEFT_OUT = "leaves thoughts out of what is supervised, in {0} of {0}"


def test_thoughts_that_the_template_leaves_out_are_told(
    ours: Read, theirs: Any, tokenizer: Any
) -> None:
    path = CASES / "reasoning_content.jsonl"
    found, notes = ours(path)
    assert "reasoning_content" in notes
    assert THOUGHTS_LEFT_OUT.format(6) in notes
    assert found == theirs(rows_of(path.name))
    tokenizer.chat_template = template_named("qwen3")
    assert ours(path)[1] == ""
    for only in (None, True):
        notes = ours(CASES / "reasoning_text.jsonl", only=only)[1]
        assert "keys of turns not read: reasoning;" in notes
        assert THOUGHTS_LEFT_OUT.format(6) in notes
        assert "adds an empty <think></think>" in notes


def test_thoughts_of_earlier_answers_that_the_template_leaves_out_are_told(
    ours: Read, tokenizer: Any
) -> None:
    tokenizer.chat_template = template_named("qwen3")
    thought = "<think>\nhm, so be it\n</think>\n\nno"
    assert ours([{"messages": turns("?", thought)}] * 2)[1] == ""
    again = thought.replace("hm", "well")
    notes = ours([{"messages": turns("?", thought, "?", again)}] * 2)[1]
    assert notes.endswith(f"{THOUGHTS_LEFT_OUT.format(2)} examples")


@pytest.mark.parametrize("kind", ["parquet", "saved", "JSON in Parquet"])
def test_nulls_that_a_table_added_are_not_trained_on(
    kind: str, ours: Read, tokenizer: Any, tmp_path: Path
) -> None:
    import pyarrow.parquet as pq
    from datasets import Dataset

    tokenizer.chat_template = template_named("qwen3")
    path = CASES / "toolcalls.parquet"
    if kind == "saved":
        path = tmp_path / "saved"
        Dataset(pq.read_table(CASES / "toolcalls.parquet")).save_to_disk(path)
    elif kind == "JSON in Parquet":
        path = tmp_path / "a.parquet"
        rows = rows_of("toolcalls.jsonl")
        Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(path)
    found, notes = ours(path)
    assert "null" not in tokenizer.decode(found[0][0])
    assert notes.startswith("keys of turns not read: name;")
    assert found == ours(CASES / "toolcalls.jsonl")[0]


def test_calls_of_tools_are_trls_and_a_null_that_was_written_is_trained_on(
    ours: Read, theirs: Any, tokenizer: Any
) -> None:
    tokenizer.chat_template = template_named("qwen3")
    call = {"function": {"name": "tide", "arguments": {"harbour": None, "hour": 7}}}
    other = {"function": {"name": "ferry", "arguments": {"line": "B"}}}
    rows = rows_of("toolcalls.jsonl")
    for each in (call, other):
        turn = {"role": "assistant", "content": "", "tool_calls": [each]}
        rows.append({"messages": [*turns("?"), turn]})
    found, _ = ours(rows)
    assert '"harbour": null' in tokenizer.decode(found[-2][0])
    assert found == theirs(rows)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (CASES / "wrapped.json", 'under "data"'),
        ([{str(n): {"prompt": "a", "completion": "b"} for n in range(3)}], "values of its keys"),
        ([{"left": turns("a?", "b."), "right": turns("a?", "c.")}], "left and right each hold"),
    ],
)
def test_rows_under_a_key_are_told(rows: Any, words: str, ours: Read) -> None:
    assert words in refusal(ours, rows)


# Published shapes

SHAPES = yaml.safe_load(
    r"""
OpenHermes:
  made: {conversations: [{from: system, value: Be kind.}, {from: human, value: "a?"},
    {from: gpt, value: b.}], source: x, id: null}
  chat: [Be kind., "a?", b.]
  note: "columns not read: source"
LIMA:
  made: {conversations: ["a?", b., "c?", d.], source: wiki}
  chat: ["", "a?", b., "c?", d.]
  note: source
LMSYS:
  made: {conversation_id: "1", model: m, turn: 1,
    conversation: [{role: user, content: "a?"}, {role: assistant, content: b.}]}
  chat: ["", "a?", b.]
  note: conversation as messages
Hermes function calling:
  made:
    conversations:
      - {from: system, value: Call functions.}
      - {from: human, value: "Tide?"}
      - {from: gpt, value: &call "<tool_call>\n{\"name\": \"tide\"}\n</tool_call>"}
      - {from: tool, value: 2.1 m}
      - {from: gpt, value: 2.1 metres.}
    tools: &tools '[{"type": "function", "function": {"name": "tide", "parameters": {}}}]'
  plain:
    messages:
      - {role: system, content: Call functions.}
      - {role: user, content: "Tide?"}
      - {role: assistant, content: *call}
      - {role: tool, content: 2.1 m}
      - {role: assistant, content: 2.1 metres.}
    tools: *tools
  note: "columns not read: tools (by the chat template)"
input and output:
  made: {Input: a, Output: b}
  plain: {prompt: a, completion: b}
  note: Input as prompt
a header with blanks:
  made: {prompt: a, " completion": " b", "": 0}
  plain: {prompt: a, completion: " b"}
  note: "' completion' as completion, joined as they are; columns not read: ''"
UltraFeedback:
  made:
    prompt: "a?"
    chosen: [&asked {role: user, content: "a?"}, &b {role: assistant, content: b.}]
    rejected: [*asked, &c {role: assistant, content: c.}]
    score_chosen: 8.5
  plain: {prompt: [*asked], chosen: [*b], rejected: [*c]}
  note: "columns not read: score_chosen"
Orca's pairs:
  made: {system: Be kind., question: "a? ", chosen: b, rejected: c}
  plain: {prompt: "a? ", chosen: b, rejected: c}
  note: "columns not read: system"
"""
)
"""What is published, and as a plain row or the turns of a chat, which begin with the system's."""


@pytest.mark.parametrize("name", SHAPES)
def test_a_published_shape_is_what_its_plain_rows_are(name: str, ours: Read) -> None:
    """Plain rows are what TRL makes of them: test_tokens.py."""
    shape = SHAPES[name]
    plain = shape.get("plain")
    if plain is None:
        system, *chat = shape["chat"]
        plain = {"messages": turns(*chat, system=system)}
    asked = AUTO
    if "chosen" in plain:
        asked = ReadingOptions("preference")
    found, notes = ours([shape["made"]], asked)
    assert found == ours([plain], asked)[0]
    assert shape["note"] in notes


ORCA = {"id": "1", "system_prompt": "You are kind.", "question": "2 + 2?", "response": "4"}
HISTORY = {"query": "And 3?", "response": "Three.", "history": [["2?", "Two."]]}
CONTEXT = {"question": "Where?", "context": "The hall.", "answer": "There."}


@pytest.mark.parametrize(
    ("row", "prompt"),
    cases(
        r"""
        {id: '1', system_prompt: You are kind., question: '2 + 2?', response: '4'}
            | "You are kind.\n\n### Instruction:\n2 + 2?\n\n### Response:\n"
        {query: 'And 3?', response: Three., history: [['2?', Two.]]}
            | "### Response:\nTwo.\n\n### Instruction:\nAnd 3?\n\n### Response:\n"
        {question: 'Where?', context: The hall., answer: There.}
            | "### Instruction:\nWhere?\n\n### Input:\nThe hall.\n\n### Response:\n"
        {instruction: Add., context: '2, 2', response: '4', category: qa}
            | "### Instruction:\nAdd.\n\n### Input:\n2, 2\n\n### Response:\n"
        """
    ),
)
def test_what_a_question_is_about_is_in_its_prompt(
    row: dict[str, Any], prompt: str, tmp_path: Path
) -> None:
    path = str(written_rows(tmp_path / "rows.jsonl", [row] * 3))
    _, _, layout = first_rows(DatasetSource(path), path)
    assert str(example_of(row, layout).prompt).endswith(prompt)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        # Squad's answers are no text.
        (
            {"question": "Where?", "context": "The hall.", "answers": {"text": ["hall"]}},
            "data.prompt_column=NAME --set data.completion_column=NAME",
        ),
        ({"prompt": "a", "response": "b", "answer": "c"}, "data.prompt_column=NAME"),
        (
            {"system": "FUNCTIONS: none", "chat": "USER: Where?\n\nASSISTANT: In the hall."},
            "--set data.text_column=chat",
        ),
        ({"story": "Once.", "id": 7}, "--set data.text_column=NAME"),
        ({" Frage": "Wo?", "": "Da."}, "' Frage', ''"),
        ({"input_ids": [1, 5], "labels": [-100, 5]}, "tokens are not read"),
    ],
)
def test_the_settings_that_say_what_unknown_columns_are_are_named(
    row: dict[str, Any], words: str, ours: Read
) -> None:
    assert words in refusal(ours, [row] * 3)


def test_columns_may_be_named(ours: Read) -> None:
    row = {"frage": "Wo? ", "antwort": "Da.", "text": "x", "chosen": "Da.", "rejected": "Nein."}
    named = ReadingOptions(prompt_column="frage", completion_column="antwort")
    assert ours([row], named)[0] == ours([{"prompt": "Wo? ", "completion": "Da."}])[0]
    pair = {"prompt": "Wo? ", "chosen": "Da.", "rejected": "Nein."}
    named = ReadingOptions("preference", prompt_column="frage")
    assert ours([row], named)[0] == ours([pair], ReadingOptions("preference"))[0]
    # Of pairs whose completions are whole chats, the chosen ones alone.
    chosen = ReadingOptions(prompt_column="prompt", completion_column="chosen")
    expected = [{"prompt": turns("a?"), "completion": turns("a?", "b.")[1:]}]
    assert ours([SHAPES["UltraFeedback"]["made"]], chosen)[0] == ours(expected)[0]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (ReadingOptions(prompt_column="frage"), "data.completion_column=NAME"),
        (ReadingOptions(completion_column="antwort"), "data.prompt_column=NAME"),
        (
            ReadingOptions(prompt_column="frge", completion_column="antwort"),
            "did you mean 'frage'?",
        ),
        (ReadingOptions(prompt_column="frage", completion_column="frage"), "the same column"),
        (ReadingOptions("messages", None, "frage", "antwort"), "are both given"),
        (ReadingOptions("auto", "frage", "frage", "antwort"), "are both given"),
    ],
)
def test_names_that_do_not_go_together_are_refused(
    asked: ReadingOptions, words: str, ours: Read
) -> None:
    assert words in refusal(ours, [{"frage": "Wo?", "antwort": "Da."}], asked)


def test_turns_of_xtuner_all_carry_loss_on_their_outputs(ours: Read, tokenizer: Any) -> None:
    given = [{"input": "a?", "output": "yes"}, {"input": "b?", "output": "no"}]
    (row,), _ = ours([{"conversation": given}])
    assert learned(tokenizer, row[1]).strip() == "yes</s>no</s>"


def test_weights_of_the_users_turns_are_no_fault(ours: Read) -> None:
    # As in SlimOrca, whose users' turns have weight 0.
    chat = said("a?", "b.", system="Be kind.")
    for turn in chat:
        turn["weight"] = float(turn["from"] == "gpt")
    chat[0]["weight"] = None
    found, notes = ours([{"conversations": chat}])
    assert found == ours([{"messages": turns("a?", "b.", system="Be kind.")}])[0]
    assert notes == "keys of turns not read: weight (of user)"
    assert ours([{"conversations": chat}], only=True)[1] == ""
