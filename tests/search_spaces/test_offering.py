"""What texts add to a space, and what may be asked of one only with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from search_spaces.dimensions import Choices
from search_spaces.errors import InputError
from search_spaces.feasibility import refuse_without_texts
from search_spaces.loading import Length, load_space, parse_space, with_texts
from search_spaces.space import SearchSpace

LENGTHS = (Length(256, 0.04), Length(1024, 0.0))
QUALITY = {
    "objectives": ["tokens_per_second", "eval_loss"],
    "weights": "pretrained",
    "data": "mine.jsonl",
}


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
    offered = with_texts(space, LENGTHS, names_its_lengths=True, held=held).space
    assert offered.dimensions.get("packing") == space.dimensions.get("packing")
    assert offered.fixed == space.fixed


def test_the_baseline_does_not_pack_though_every_trial_does() -> None:
    space = a_space(fixed={"packing": "packed"})
    offered = with_texts(space, LENGTHS, names_its_lengths=False).space
    assert offered.baseline_config().packing == "none"
    assert offered.config({"lora_rank": 8, "seq_len": 256}).packing == "packed"


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
    "changes",
    [
        {"dimensions": {"packing": {"choices": ["none", "grouped"]}}},
        {"fixed": {"packing": "packed"}},
        {"baseline": {"packing": "packed"}},
    ],
)
def test_packing_without_texts_is_refused_with_what_to_do(changes: dict[str, Any]) -> None:
    space = a_space(**changes)
    with pytest.raises(InputError, match=r"packing (packed|grouped) needs a dataset.*--data"):
        refuse_without_texts(space)
    refuse_without_texts(space.model_copy(update={"data": a_space(data="x.jsonl").data}))


def test_packing_none_needs_no_texts() -> None:
    refuse_without_texts(a_space(fixed={"packing": "none"}))


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"data": None}, "a dataset"),
        ({"weights": "random"}, "weights: pretrained"),
        ({"data": {"texts": "mine.jsonl", "eval_fraction": 0.0}}, "data.eval_fraction above 0"),
    ],
)
def test_a_held_out_loss_is_refused_with_all_that_is_missing(
    changes: dict[str, Any], missing: str
) -> None:
    with pytest.raises(InputError, match="eval_loss needs") as caught:
        refuse_without_texts(a_space(**{**QUALITY, **changes}))
    assert missing in str(caught.value)
    refuse_without_texts(a_space(**QUALITY))


def test_all_that_is_missing_for_a_held_out_loss_is_said_at_once() -> None:
    with pytest.raises(InputError) as caught:
        refuse_without_texts(a_space(objectives=["eval_loss"]))
    assert "a dataset" in str(caught.value)
    assert "weights: pretrained" in str(caught.value)


def test_that_weights_are_real_has_to_be_said_whatever_the_model_has() -> None:
    space = a_space(**{**QUALITY, "weights": "random"}, model="./base")
    with pytest.raises(InputError, match=r"eval_loss needs weights: pretrained in the .*'./base'"):
        refuse_without_texts(space)


def test_tokens_for_a_loss_that_is_not_searched_for_are_refused() -> None:
    data = {"texts": "mine.jsonl", "quality_tokens": 500}
    with pytest.raises(InputError, match=r"quality_tokens 500 .*add eval_loss .*or leave"):
        refuse_without_texts(a_space(data=data))
    refuse_without_texts(a_space(**{**QUALITY, "data": data}))


@pytest.mark.parametrize("text", ["data: mine.jsonl", "data: {texts: mine.jsonl}"])
def test_texts_are_named_by_a_path_or_a_section(text: str) -> None:
    space = parse_space(f"{text}\ndimensions: {{lora_rank: [8, 16]}}", label="mine.yaml")
    assert space.data is not None
    assert (space.data.texts, space.data.eval_fraction) == ("mine.jsonl", 0.05)


def test_a_path_in_a_space_file_is_relative_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "mine.jsonl").write_text("")
    (beside / "space.yaml").write_text("data: mine.jsonl\ndimensions: {lora_rank: [8, 16]}\n")
    monkeypatch.chdir(tmp_path)
    data = load_space("beside/space.yaml").data
    assert data is not None
    assert data.texts == str(beside / "mine.jsonl")


def test_what_is_not_beside_the_file_may_be_a_hub_id(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text("data: org/set\ndimensions: {lora_rank: [8, 16]}\n")
    data = load_space(str(tmp_path / "space.yaml")).data
    assert data is not None
    assert data.texts == "org/set"
