"""Datasets in the shapes that people publish, and what people reported of neighbours: each row is
what TRL makes of it, or the message says what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.sweep.data.encoding import tokenized
from qlora_sweep.sweep.data.files import RowsError, Source
from qlora_sweep.sweep.data.kinds import Asked, Example, example_of, first_rows
from tests.sweep.data.judged_by_trl import (
    labelled,
    preference_rows,
    supervised_rows,
    template_named,
)

CASES = Path(__file__).parents[2] / "data" / "cases"
pytestmark = pytest.mark.filterwarnings("ignore")

Labelled = list[tuple[list[int], list[int]]]


@pytest.fixture
def tokenizer(shipped: Any) -> Iterator[Any]:
    own = shipped.chat_template
    yield shipped
    shipped.chat_template = own


def written(directory: Path, rows: Sequence[Any]) -> Path:
    path = directory / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def ours(
    path: Path, tokenizer: Any, asked: Asked | None = None, only: bool | None = None
) -> tuple[Labelled, str]:
    """Return ids and labels of all rows, none of which is broken, and the notes."""
    rows, broken, notes = tokenized(str(path), tokenizer, asked or Asked(), completions_only=only)
    assert broken == []
    pairs = zip(rows["input_ids"], rows["completion_mask"], strict=True)
    return [labelled(ids, mask) for ids, mask in pairs], "; ".join(notes)


def theirs(tokenizer: Any, rows: Sequence[Any], directory: Path, **options: Any) -> Labelled:
    from datasets import Dataset

    given = Dataset.from_list([*rows], on_mixed_types="use_json")
    if "chosen" in rows[0]:
        return preference_rows(tokenizer, given)
    return supervised_rows(tokenizer, given, directory, **options)


def turns(*texts: str, system: str = "") -> list[dict[str, str]]:
    sides = ("user", "assistant")
    found = [{"role": sides[n % 2], "content": text} for n, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *found] if system else found


def said(*texts: str, system: str = "") -> list[dict[str, Any]]:
    """Return turns as ShareGPT has them."""
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    of_chat = turns(*texts, system=system)
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
    name: str, asked: str, expected: Any, tokenizer: Any, tmp_path: Path
) -> None:
    found, _ = ours(CASES / name, tokenizer, Asked(asked))
    assert found == theirs(tokenizer, expected, tmp_path)


def test_dolly_is_put_as_alpaca_put_it(tokenizer: Any) -> None:
    source = Source(str(CASES / "dolly.jsonl"))
    rows, _, layout = first_rows(source, "dolly")
    example = example_of({"instruction": "Add.", "context": "2, 2", "response": "4"}, layout)
    assert str(example.prompt).endswith("Instruction:\nAdd.\n\n### Input:\n2, 2\n\n### Response:\n")
    assert example.completion == "4"
    assert len(rows) == 6


@pytest.mark.parametrize("name", ["swift_loss", "axolotl_train"])
@pytest.mark.parametrize("only", [None, True])
def test_a_turn_that_says_so_carries_no_loss(name: str, only: bool | None, tokenizer: Any) -> None:
    found, notes = ours(CASES / f"{name}.jsonl", tokenizer, only=only)
    for number, (ids, labels) in enumerate(found):
        assert "Wrong draft." in tokenizer.decode(ids)
        learned = tokenizer.decode([token for token in labels if token >= 0])
        assert "Wrong" not in learned
        assert f"{number}." in learned
        assert ("Again" in learned) == (only is None)
    assert notes == ""


def test_images_are_refused_and_empty_lists_of_them_read(tokenizer: Any, tmp_path: Path) -> None:
    path = CASES / "images_llamafactory.jsonl"
    with pytest.raises(RowsError, match="line 1: column 'images' holds images"):
        ours(path, tokenizer)
    with pytest.raises(ValueError, match="vision-related"):
        theirs(tokenizer, rows_of(path.name), tmp_path)
    later = [row | {"images": []} for row in rows_of(path.name)]
    assert len(ours(written(tmp_path, later), tokenizer)[0]) == 6
    later[4]["images"] = ["a.jpg"]
    with pytest.raises(RowsError, match="line 5: column 'images'"):
        ours(written(tmp_path, later), tokenizer)


def test_thoughts_that_the_template_leaves_out_are_told(tokenizer: Any, tmp_path: Path) -> None:
    name = "reasoning_content.jsonl"
    found, notes = ours(CASES / name, tokenizer)
    assert "keys of turns not read: reasoning_content" in notes
    assert "leaves thoughts out of what is supervised, in 6 of 6" in notes
    assert found == theirs(tokenizer, rows_of(name), tmp_path)
    tokenizer.chat_template = template_named("qwen3")
    assert ours(CASES / name, tokenizer)[1] == ""
    for only in (None, True):
        notes = ours(CASES / "reasoning_text.jsonl", tokenizer, only=only)[1]
        assert "keys of turns not read: reasoning;" in notes
        assert "leaves thoughts out of what is supervised, in 6 of 6" in notes
        assert "adds an empty <think></think>" in notes
    # Thoughts in the text, of which the template leaves the earlier ones out.
    thought = "<think>\nhm, so be it\n</think>\n\nno"
    path = written(tmp_path, [{"messages": turns("?", thought)}] * 2)
    assert ours(path, tokenizer)[1] == ""
    again = thought.replace("hm", "well")
    path = written(tmp_path, [{"messages": turns("?", thought, "?", again)}] * 2)
    assert (
        ours(path, tokenizer)[1]
        == "the chat template leaves thoughts out of what is supervised, in 2 of 2 examples"
    )


@pytest.mark.parametrize("kind", ["parquet", "saved", "JSON in Parquet"])
def test_nulls_that_a_table_added_are_not_trained_on(
    kind: str, tokenizer: Any, tmp_path: Path
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
    found, notes = ours(path, tokenizer)
    lines, _ = ours(CASES / "toolcalls.jsonl", tokenizer)
    assert found == lines
    assert "null" not in tokenizer.decode(found[0][0])
    assert notes.startswith("keys of turns not read: name;")
    assert lines == theirs(tokenizer, rows_of("toolcalls.jsonl"), tmp_path)


def test_a_null_that_was_written_is_trained_on_as_in_trl(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = template_named("qwen3")
    call = {"function": {"name": "tide", "arguments": {"harbour": None, "hour": 7}}}
    other = {"function": {"name": "ferry", "arguments": {"line": "B"}}}
    rows = [
        {"messages": [*turns("?"), {"role": "assistant", "content": "", "tool_calls": [each]}]}
        for each in (call, other)
    ]
    found, _ = ours(written(tmp_path, rows), tokenizer)
    assert '"harbour": null' in tokenizer.decode(found[0][0])
    assert found == theirs(tokenizer, rows, tmp_path)


def test_rows_under_a_key_are_told(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(RowsError, match='its rows stand under "data"'):
        ours(CASES / "wrapped.json", tokenizer)
    by_id = {str(number): {"prompt": "a", "completion": "b"} for number in range(3)}
    with pytest.raises(RowsError, match="its rows are the values of its keys"):
        ours(written(tmp_path, [by_id]), tokenizer)
    one_comparison = {"left": turns("a?", "b."), "right": turns("a?", "c.")}
    with pytest.raises(RowsError, match="left and right each hold a chat"):
        ours(written(tmp_path, [one_comparison]), tokenizer)


# Published shapes

CALL = '<tool_call>\n{"name": "tide", "arguments": {"harbour": "Northport"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}]
DIALOGUE = "\n\nHuman: Where?\n\nAssistant: In the"
SHAPES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], str]] = {
    "OpenHermes": (
        [{"conversations": said("a?", "b.", system="Be kind."), "source": "x", "id": None}],
        [{"messages": turns("a?", "b.", system="Be kind.")}],
        "columns not read: source",
    ),
    "LIMA": (
        [{"conversations": ["a?", "b.", "c?", "d."], "source": "wiki"}],
        [{"messages": turns("a?", "b.", "c?", "d.")}],
        "source",
    ),
    "UltraChat and No Robots": (
        [{"prompt": "a?", "prompt_id": "7", "messages": turns("a?", "b."), "category": "Chat"}],
        [{"messages": turns("a?", "b.")}],
        "prompt, prompt_id, category",
    ),
    "LMSYS": (
        [{"conversation_id": "1", "model": "m", "conversation": turns("a?", "b."), "turn": 1}],
        [{"messages": turns("a?", "b.")}],
        "conversation as messages",
    ),
    "turns as JSON": (
        [{"conversations": json.dumps(turns("a?", "b."))}],
        [{"messages": turns("a?", "b.")}],
        "",
    ),
    "Hermes function calling": (
        [
            {
                "conversations": [
                    *said("Tide?", CALL, system="Call functions."),
                    {"from": "tool", "value": "2.1 m"},
                    {"from": "gpt", "value": "2.1 metres."},
                ],
                "tools": json.dumps(TOOLS),
            }
        ],
        [
            {
                "messages": [
                    *turns("Tide?", CALL, system="Call functions."),
                    {"role": "tool", "content": "2.1 m"},
                    {"role": "assistant", "content": "2.1 metres."},
                ],
                "tools": json.dumps(TOOLS),
            }
        ],
        "columns not read: tools (by the chat template)",
    ),
    "GSM8K": (
        [{"question": "2 + 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}],
        [{"prompt": "2 + 2?", "completion": "2 + 2 = <<2+2=4>>4\n#### 4"}],
        "question as prompt, answer as completion",
    ),
    "MetaMath": (
        [{"type": "GSM", "query": "2 + 2?", "original_question": "1?", "response": "It is 4."}],
        [{"prompt": "2 + 2?", "completion": "It is 4."}],
        "columns not read: type, original_question",
    ),
    "input and output": (
        [{"Input": "a", "Output": "b"}],
        [{"prompt": "a", "completion": "b"}],
        "Input as prompt",
    ),
    "a header with blanks": (
        [{"prompt": "a", " completion": " b", "": 0}],
        [{"prompt": "a", "completion": " b"}],
        "' completion' as completion, joined as they are; columns not read: ''",
    ),
    "KTO": (
        [{"prompt": "a?", "completion": "b", "label": True}],
        [{"prompt": "a?", "completion": "b"}],
        "columns not read: label",
    ),
    "HH-RLHF": (
        [{"chosen": f"{DIALOGUE} hall.", "rejected": f"{DIALOGUE} attic."}],
        [{"chosen": f"{DIALOGUE} hall.", "rejected": f"{DIALOGUE} attic."}],
        "",
    ),
    "UltraFeedback": (
        [
            {
                "prompt": "a?",
                "chosen": turns("a?", "b."),
                "rejected": turns("a?", "c."),
                "score_chosen": 8.5,
            }
        ],
        [
            {
                "prompt": turns("a?"),
                "chosen": [{"role": "assistant", "content": "b."}],
                "rejected": [{"role": "assistant", "content": "c."}],
            }
        ],
        "columns not read: score_chosen",
    ),
    "Orca's pairs": (
        [{"system": "Be kind.", "question": "a? ", "chosen": "b", "rejected": "c"}],
        [{"prompt": "a? ", "chosen": "b", "rejected": "c"}],
        "columns not read: system",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_published_shape_is_what_trl_makes_of_its_rows(
    name: str, tokenizer: Any, tmp_path: Path
) -> None:
    made, expected, note = SHAPES[name]
    asked = Asked("preference" if "chosen" in expected[0] else "auto")
    found, notes = ours(written(tmp_path, made * 3), tokenizer, asked)
    assert found == theirs(tokenizer, expected * 3, tmp_path)
    assert note in notes
    assert note or not notes


ORCA = {"id": "1", "system_prompt": "You are kind.", "question": "2 + 2?", "response": "4"}
HISTORY = {"query": "And 3?", "response": "Three.", "history": [["2?", "Two."]]}
CONTEXT = {"question": "Where?", "context": "The hall.", "answer": "There."}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        (ORCA, "You are kind.\n\n### Instruction:\n2 + 2?\n\n### Response:\n"),
        (HISTORY, "### Response:\nTwo.\n\n### Instruction:\nAnd 3?\n\n### Response:\n"),
        (CONTEXT, "### Instruction:\nWhere?\n\n### Input:\nThe hall.\n\n### Response:\n"),
        (
            {"instruction": "Add.", "context": "2, 2", "output": "4"},
            "### Instruction:\nAdd.\n\n### Input:\n2, 2\n\n### Response:\n",
        ),
    ],
)
def test_what_a_question_is_about_is_in_its_prompt(
    row: dict[str, Any], prompt: str, tmp_path: Path
) -> None:
    path = str(written(tmp_path, [row] * 3))
    rows, _, layout = first_rows(Source(path), path)
    (example, *_) = [example_of(fields, layout) for _, fields in rows if isinstance(fields, dict)]
    assert isinstance(example, Example)
    assert str(example.prompt).endswith(prompt)


@pytest.mark.parametrize(
    ("row", "words", "is_text"),
    [
        # Squad's answers are no text.
        (
            {"question": "Where?", "context": "The hall.", "answers": {"text": ["hall"]}},
            "data.prompt_column=NAME --set data.completion_column=NAME",
            False,
        ),
        ({"frage": "Wo?", "antwort": "Da."}, "data.completion_column=NAME", False),
        ({"prompt": "a", "response": "b", "answer": "c"}, "data.prompt_column=NAME", False),
        (
            {"system": "FUNCTIONS: none", "chat": "USER: Where?\n\nASSISTANT: In the hall."},
            "--set data.text_column=chat",
            True,
        ),
        ({"story": "Once.", "id": 7}, "--set data.text_column=NAME", True),
        ({" Frage": "Wo?", "": "Da."}, "its columns are ' Frage', '', and", False),
        ({"input_ids": [1, 5], "labels": [-100, 5]}, "tokens are not read", False),
        (
            {"id": "1", "left": turns("a?", "b."), "right": turns("a?", "c.")},
            "left and right each hold a chat: keep one of these columns",
            False,
        ),
    ],
)
def test_the_settings_that_say_what_unknown_columns_are_are_named(
    row: dict[str, Any], words: str, is_text: bool, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(RowsError) as refused:
        ours(written(tmp_path, [row] * 3), tokenizer)
    assert words in str(refused.value)
    assert ("text_column" in str(refused.value)) == is_text


def test_columns_may_be_named(tokenizer: Any, tmp_path: Path) -> None:
    row = {"frage": "Wo? ", "antwort": "Da.", "text": "x", "chosen": "Da.", "rejected": "Nein."}
    path = written(tmp_path, [row] * 3)
    named = Asked(prompt_column="frage", completion_column="antwort")
    expected = [{"prompt": "Wo? ", "completion": "Da."}] * 3
    assert ours(path, tokenizer, named)[0] == theirs(tokenizer, expected, tmp_path)
    pairs = Asked("preference", prompt_column="frage")
    expected = [{"prompt": "Wo? ", "chosen": "Da.", "rejected": "Nein."}] * 3
    assert ours(path, tokenizer, pairs)[0] == theirs(tokenizer, expected, tmp_path)
    # Of pairs whose completions are whole chats, the chosen ones alone.
    path = written(tmp_path, SHAPES["UltraFeedback"][0] * 3)
    chosen = Asked(prompt_column="prompt", completion_column="chosen")
    expected = [{"prompt": turns("a?"), "completion": turns("a?", "b.")[1:]}] * 3
    assert ours(path, tokenizer, chosen)[0] == theirs(tokenizer, expected, tmp_path)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (Asked(prompt_column="frage"), "name the completion's too"),
        (Asked(completion_column="antwort"), "name the prompt's too"),
        (Asked(prompt_column="frge", completion_column="antwort"), "did you mean 'frage'?"),
        (Asked(prompt_column="frage", completion_column="frage"), "the same column"),
        (Asked("messages", None, "frage", "antwort"), "are both given: keep one"),
        (Asked("auto", "frage", "frage", "antwort"), "are both given: keep one"),
    ],
)
def test_names_that_do_not_go_together_are_refused(
    asked: Asked, words: str, tokenizer: Any, tmp_path: Path
) -> None:
    path = written(tmp_path, [{"frage": "Wo?", "antwort": "Da."}])
    with pytest.raises(RowsError) as refused:
        ours(path, tokenizer, asked)
    assert words in str(refused.value)


def test_turns_of_xtuner_all_carry_loss_on_their_outputs(tokenizer: Any, tmp_path: Path) -> None:
    given = [{"input": "a?", "output": "yes"}, {"input": "b?", "output": "no"}]
    found, _ = ours(written(tmp_path, [{"conversation": given}]), tokenizer)
    learned = tokenizer.decode([token for token in found[0][1] if token >= 0])
    assert "yes" in learned
    assert "no" in learned
    assert "?" not in learned


def test_weights_of_the_users_turns_are_no_fault(tokenizer: Any, tmp_path: Path) -> None:
    # As in SlimOrca, whose users' turns have weight 0.
    weighted = [
        turn | {"weight": None if turn["from"] == "system" else float(turn["from"] == "gpt")}
        for turn in said("a?", "b.", system="Be kind.")
    ]
    path = written(tmp_path, [{"conversations": weighted}] * 3)
    plain = [{"messages": turns("a?", "b.", system="Be kind.")}] * 3
    found, notes = ours(path, tokenizer)
    assert found == theirs(tokenizer, plain, tmp_path)
    assert notes == "keys of turns not read: weight (of user)"
    assert ours(path, tokenizer, only=True)[1] == ""
