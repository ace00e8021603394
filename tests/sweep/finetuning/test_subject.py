"""What a name says is to be trained, and what would be smaller."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from search_spaces.config import TrialConfig, canonical
from search_spaces.errors import InputError, NothingFits
from search_spaces.models import load_model_spec
from storage.definition import StudySnapshot
from sweep.export.formats import export
from sweep.finetuning.subject import (
    Subject,
    candidates,
    next_smaller,
    refuse_too_large,
    subject_of,
)
from sweep.predict.memory.prediction import Fit
from tests.sweep.export.studies import a_study

WINNER = TrialConfig(micro_batch_size=8, lora_rank=32)


def missing(name: str) -> StudySnapshot:
    raise InputError(f"no study '{name}'")


def of(name: str, **options: object) -> Subject:
    values = {"number": None, "model": None, "read_study": missing, **options}
    return subject_of(name, **values)  # type: ignore[arg-type]


def study(**options: object) -> StudySnapshot:
    return a_study(WINNER, model=load_model_spec("mistral-7b-v0.3"), **options)  # type: ignore[arg-type]


def test_the_winner_of_a_study_comes_with_its_record() -> None:
    subject = of("a10", read_study=lambda _: study(name="a10"))
    assert subject.config == WINNER
    assert subject.words == "the winner of study 'a10', trial 17"
    assert subject.record is not None
    assert subject.record.measurement.tokens_per_second == 16_800.0
    other = of("a10", model="demo", read_study=lambda _: study())
    assert (other.model.name, other.record) == ("demo", None)


def test_a_trial_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match="has no trial 7"):
        of("a10", number=7, read_study=lambda _: study())


def test_a_shipped_model_is_the_standard_recipe_where_no_study_has_its_name() -> None:
    assert of("demo").config == TrialConfig()
    assert "no study 'demo'" in of("demo").words
    assert of("demo", read_study=lambda _: study(name="demo")).config == WINNER
    with pytest.raises(InputError, match=r"no study 'dmo'.*did you mean 'demo'"):
        of("dmo")
    with pytest.raises(InputError, match="no study 'demo'"):
        of("demo", number=3)


def test_a_file_is_a_configuration_alone_or_as_an_export_writes_it(tmp_path: Path) -> None:
    alone, exported = tmp_path / "alone.json", tmp_path / "exported.json"
    alone.write_text(json.dumps({"lora_rank": 4}))
    exported.write_text(export(study(name="a10"), format="json"))
    assert of(str(alone), model="demo").config == TrialConfig(lora_rank=4)
    subject = of(str(exported))
    layers = {"target_modules": ("k_proj", "o_proj", "q_proj", "v_proj")}
    assert subject.config == canonical(WINNER).model_copy(update=layers)
    assert subject.model.name == "mistral-7b-v0.3"
    assert subject.record is not None
    assert subject.record.label == "trial 17 of study 'a10'"
    assert of(str(exported), model="demo").record is None
    with pytest.raises(InputError, match="says no model: name one with --model"):
        of(str(alone))
    with pytest.raises(InputError, match="--trial is of a study"):
        of(str(alone), number=1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"lora_rnk": 4}', "lora_rank"),
        ('{"config": 3, "model": "demo"}', "not whole"),
        ("[]", "object"),
        ("{", "x.json"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InputError, match=said):
        of(str(tmp_path / "x.json"), model="demo")


def test_smaller_configurations_train_the_same_before_they_train_another_thing() -> None:
    config = TrialConfig(micro_batch_size=6, seq_len=512, checkpoint_fraction=0.5)
    found = list(candidates(config))
    assert [c.micro_batch_size for c in found[:3]] == [3, 2, 1]
    assert {c.samples_per_step for c in found} == {6}
    assert found[3].checkpoint_fraction == 1.0
    shortest = [c.seq_len for c in found]
    assert shortest == sorted(shortest, reverse=True)
    assert shortest[-1] == 1


class Predicted:
    """What needs so many bytes."""

    def __init__(self, bytes_: int, budget: int) -> None:
        self.peak_allocated_bytes, self.fit = bytes_, self.fits_in(bytes_, budget)
        self.memory = self

    @staticmethod
    def fits_in(bytes_: int, budget: int) -> Fit:
        return Fit.YES if bytes_ <= budget else Fit.NO

    def fits(self, budget: int) -> Fit:
        return self.fits_in(self.peak_allocated_bytes, budget)

    def needed_bytes(self, budget: int) -> int:
        return max(self.peak_allocated_bytes, budget)


def forecaster(
    budget: int, needs: Callable[[TrialConfig], int] | None, is_valid: Any = lambda _: True
) -> Any:
    """Return what predicts a configuration's memory; None predicts nothing."""

    def expect(config: TrialConfig) -> Any:
        nothing = SimpleNamespace(memory=None)
        return nothing if needs is None else Predicted(needs(config), budget)

    return SimpleNamespace(budget_bytes=budget, expect=expect, is_valid=is_valid)


def by_tokens(config: TrialConfig) -> int:
    return config.tokens_per_micro_batch * 2**20


def by_rows(config: TrialConfig) -> int:
    """Memory that is the same for two rows and more."""
    return 2**30 if config.micro_batch_size == 1 else 2**31


def test_what_is_predicted_not_to_fit_is_refused_with_the_next_smaller_that_does() -> None:
    config = TrialConfig(micro_batch_size=4, seq_len=512)
    with pytest.raises(NothingFits) as refused:
        refuse_too_large(config, forecaster(1100 * 2**20, by_tokens))
    for words in ("needs 2.00 GiB", "budget is 1.07 GiB", "micro_batch_size 2", "1.00 GiB"):
        assert words in str(refused.value)
    refuse_too_large(config, forecaster(2**31, by_tokens))
    refuse_too_large(config, forecaster(1, None))
    assert next_smaller(config, forecaster(1, by_tokens)) is None
    # After out of memory: less than was predicted of what ran out.
    told = next_smaller(config, forecaster(2**32, by_rows), has_run_out=True)
    assert told == "micro_batch_size 1, effective_batch_size 4 (predicted: 1.00 GiB)"
    valid = forecaster(1, None, is_valid=lambda other: other.micro_batch_size < 2)
    told = next_smaller(config, valid, has_run_out=True)
    assert told == "micro_batch_size 1, effective_batch_size 4 (not predicted)"
