"""What texts add to a space, and what may be asked of one only with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from search_spaces.dimensions import Choices
from search_spaces.errors import InputError
from search_spaces.feasibility import refuse_without_texts
from search_spaces.loading import Length, load_space, with_texts
from search_spaces.space import SearchSpace

LENGTHS = (Length(256, 0.04), Length(1024, 0.0))
QUALITY = {
    "objectives": ["tokens_per_second", "eval_loss"],
    "weights": "pretrained",
    "data": "mine.jsonl",
}
TOKENS = {"texts": "mine.jsonl", "quality_tokens": 500}


def a_space(**changes: Any) -> SearchSpace:
    values = {"name": "mine", "dimensions": {"lora_rank": {"choices": [8, 16]}}, **changes}
    return SearchSpace.model_validate(values)


def choices_of(space: SearchSpace, key: str) -> tuple[Any, ...]:
    dimension = space.dimensions[key]
    assert isinstance(dimension, Choices)
    return dimension.choices


def test_packing_is_searched_where_nobody_fixed_it() -> None:
    offered = with_texts(a_space(), LENGTHS, names_its_lengths=False)
    assert choices_of(offered.space, "packing") == ("none", "packed", "grouped")
    assert any("Packing is searched" in note for note in offered.notes)


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({"fixed": {"packing": "packed"}}, ()),
        ({"dimensions": {"packing": {"choices": ["none", "packed"]}}}, ()),
        ({}, ("packing",)),
    ],
)
def test_packing_that_somebody_named_is_kept(
    changes: dict[str, Any], held: tuple[str, ...]
) -> None:
    space = a_space(**changes)
    offered = with_texts(space, LENGTHS, names_its_lengths=False, held=held).space
    assert offered.dimensions.get("packing") == space.dimensions.get("packing")
    assert offered.fixed == space.fixed
    # The baseline does not pack though every trial does.
    assert offered.baseline_config().packing == "none"


def test_a_presets_lengths_give_way_to_those_of_the_texts_and_that_is_said() -> None:
    offered = with_texts(load_space("a10"), LENGTHS, names_its_lengths=False)
    assert choices_of(offered.space, "seq_len") == (256, 1024)
    (said,) = [note for note in offered.notes if "Lengths" in note]
    assert "in place of 512, 1024, 2048" in said
    assert "256 (cuts 4 %)" in said
    assert "--seq-len" in said


@pytest.mark.parametrize("held", [(), ("seq_len",)])
def test_lengths_that_a_person_named_are_kept(held: tuple[str, ...]) -> None:
    space = a_space(dimensions={"seq_len": {"choices": [64, 128]}})
    offered = with_texts(space, LENGTHS, names_its_lengths=not held, held=held)
    assert choices_of(offered.space, "seq_len") == (64, 128)
    assert not any("Lengths" in note for note in offered.notes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dimensions": {"packing": {"choices": ["none", "grouped"]}}}, "packing grouped needs a"),
        ({"fixed": {"packing": "packed"}}, "packing packed needs a dataset.*--data"),
        ({"baseline": {"packing": "packed"}}, "packing packed needs a dataset.*--data"),
        ({"objectives": ["eval_loss"]}, "eval_loss needs a dataset.*weights: pretrained"),
        ({**QUALITY, "weights": "random", "model": "./b"}, "eval_loss needs weights: pre.*'./b'"),
        ({**QUALITY, "data": {"texts": "x", "eval_fraction": 0.0}}, "data.eval_fraction above 0"),
        ({"data": TOKENS}, r"quality_tokens 500 .*add eval_loss .*or leave"),
        ({"fixed": {"packing": "none"}}, None),
        ({"fixed": {"packing": "packed"}, "data": "x.jsonl"}, None),
        (QUALITY, None),
        ({**QUALITY, "data": TOKENS}, None),
    ],
)
def test_what_needs_a_dataset_is_refused_without_one_with_what_to_do(
    changes: dict[str, Any], said: str | None
) -> None:
    if said is None:
        refuse_without_texts(a_space(**changes))
        return
    with pytest.raises(InputError, match=said):
        refuse_without_texts(a_space(**changes))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data: mine.jsonl", "{beside}/mine.jsonl"),
        ("data: {texts: mine.jsonl}", "{beside}/mine.jsonl"),
        # What is not beside the file may be a hub id.
        ("data: org/set", "org/set"),
    ],
)
def test_a_dataset_is_a_path_beside_the_space_file_or_a_hub_id(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "mine.jsonl").write_text("")
    (beside / "space.yaml").write_text(f"{text}\ndimensions: {{lora_rank: [8, 16]}}\n")
    monkeypatch.chdir(tmp_path)
    data = load_space("beside/space.yaml").data
    assert data is not None
    assert (data.texts, data.eval_fraction) == (expected.format(beside=beside), 0.05)
