"""What a name says is to be trained, and what would be smaller."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig, canonical
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.sweep.finetuning.subject import (
    next_smaller,
    subject_of,
)
from qlora_sweep.sweep.predict.memory.prediction import Fit
from tests.sweep.export.studies import a_study, export

WINNER = TrialConfig(micro_batch_size=8, lora_rank=32)
LARGE = TrialConfig(micro_batch_size=4, seq_len=512)


def study(name: str) -> StudySnapshot:
    """Read study a10, or demo; there is no other."""
    if name not in ("a10", "demo-study"):
        raise InputError(f"no study '{name}'")
    return a_study(WINNER, name=name, model=load_model_spec("mistral-7b-v0.3"))


def of(name: str, *, number: int | None = None, model: str | None = None) -> Any:
    return subject_of(name, number=number, model=model, read_study=study)


def test_the_winner_of_a_study_comes_with_its_record() -> None:
    subject = of("a10")
    assert subject.config == WINNER
    assert subject.words == "the winner of study 'a10', trial 17"
    assert subject.record.measurement.tokens_per_second == 16_800.0
    other = of("a10", model="demo")
    assert (other.model.name, other.record) == ("demo", None)


def test_a_shipped_model_is_the_standard_recipe_where_no_study_has_its_name() -> None:
    assert of("demo").config == TrialConfig()
    assert "no study 'demo'" in of("demo").words


def test_a_model_without_sdpa_is_trained_with_eager_attention(tmp_path: Path) -> None:
    file = tmp_path / "alone.json"
    file.write_text(json.dumps({"lora_rank": 4}))
    for name in ("gpt-oss-20b", str(file), "a10"):
        subject = of(name, model="gpt-oss-20b")
        assert subject.config.attention == "eager"
        assert "transformers has no sdpa attention" in subject.words
    file.write_text(json.dumps({"attention": "sdpa"}))
    assert of(str(file), model="gpt-oss-20b").config.attention == "sdpa"


def test_a_file_is_a_configuration_alone_or_as_an_export_writes_it(tmp_path: Path) -> None:
    alone, exported = tmp_path / "alone.json", tmp_path / "exported.json"
    alone.write_text(json.dumps({"lora_rank": 4}))
    exported.write_text(export(study("a10"), format="json"))
    assert of(str(alone), model="demo").config == TrialConfig(lora_rank=4)
    subject = of(str(exported))
    layers = {"target_modules": ("k_proj", "o_proj", "q_proj", "v_proj")}
    assert subject.config == canonical(WINNER).model_copy(update=layers)
    assert (subject.model.name, subject.record.number) == ("mistral-7b-v0.3", 17)
    assert of(str(exported), model="demo").record is None
    with pytest.raises(InputError, match="says no model: name one with --model"):
        of(str(alone))
    with pytest.raises(InputError, match="--trial is of a study"):
        of(str(alone), number=1)


@pytest.mark.parametrize(
    ("name", "number", "said"),
    [
        ("a10", 7, "has no trial 7"),
        ("dmo", None, "did you mean 'demo'"),
        ('{"lora_rnk": 4}', None, "lora_rank"),
        ('{"config": 3, "model": "demo"}', None, "not whole"),
        ("{", None, "x.json"),
    ],
)
def test_what_is_no_study_and_no_configuration_is_named(
    tmp_path: Path, name: str, number: int | None, said: str
) -> None:
    if not name.isalnum():
        (tmp_path / "x.json").write_text(name)
        name = str(tmp_path / "x.json")
    with pytest.raises(InputError, match=said):
        of(name, number=number, model="demo")


def forecaster(
    budget: int, needs: Callable[[TrialConfig], int] | None, is_valid: Any = lambda _: True
) -> Any:
    """Return what predicts a configuration's memory; None predicts nothing."""

    def fits(bytes_: int, room: int) -> Fit:
        return Fit.YES if bytes_ <= room else Fit.NO

    def expect(config: TrialConfig) -> Any:
        if needs is None:
            return SimpleNamespace(memory=None)
        bytes_ = needs(config)
        memory = SimpleNamespace(
            peak_allocated_bytes=bytes_,
            fits=lambda room: fits(bytes_, room),
            needed_bytes=lambda room: max(bytes_, room),
        )
        return SimpleNamespace(memory=memory, fit=fits(bytes_, budget))

    return SimpleNamespace(budget_bytes=budget, expect=expect, is_valid=is_valid)


def by_rows(config: TrialConfig) -> int:
    """Memory that is the same for two rows and more."""
    return 2**30 if config.micro_batch_size == 1 else 2**31


@pytest.mark.parametrize(
    ("expects", "words"),
    [
        # Less than was predicted of what ran out.
        (forecaster(2**32, by_rows), "predicted: 1.00 GiB"),
        (forecaster(1, None, lambda other: other.micro_batch_size < 2), "not predicted"),
    ],
)
def test_what_is_named_after_out_of_memory(expects: Any, words: str) -> None:
    told = next_smaller(LARGE, expects, has_run_out=True)
    assert told == f"micro_batch_size 1, effective_batch_size 4 ({words}): --set micro_batch_size=1"
