"""A study that takes over what another one measured."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.storage.definition import StudySnapshot, Target
from qlora_sweep.storage.reading import read_study
from qlora_sweep.storage.records import Diverged, OutOfMemory
from qlora_sweep.storage.study import OpenStudy, open_study
from qlora_sweep.sweep.running.replay import ReplayRunner
from qlora_sweep.sweep.sampling.samplers import make_sampler
from qlora_sweep.sweep.study.carrying import carry_over, holding, refuse_incomparable
from tests.storage.builders import changed, confirmed
from tests.sweep.simulated_device import BUDGET, a_definition, a_record, a_space, train
from tests.sweep.study.driven import a_forecaster, drive
from tests.sweep.terminal.test_summary import a_snapshot

WIDER = {
    "dimensions": {**a_space().model_dump()["dimensions"], "lora_rank": [8, 16]},
    "fixed": {"target_modules": "attention"},
}


def opened(home: Path, name: str, **changes: Any) -> OpenStudy:
    space = a_space(**changes)
    return open_study(
        name,
        url=f"sqlite:///{home}/sweep.db",
        definition=a_definition(**changes),
        sampler=make_sampler("guided", space, seed=0, forecaster=a_forecaster()),
        environment={},
        home=home,
    )


def anything(_: TrialConfig) -> bool:
    return True


def snapshot(home: Path, name: str) -> StudySnapshot:
    return read_study(name, url=f"sqlite:///{home}/sweep.db", home=home)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> StudySnapshot:
    home = tmp_path_factory.mktemp("source")
    with opened(home, "narrow", trials=8) as study:
        drive(study)
    return snapshot(home, "narrow")


def test_what_is_taken_over_costs_nothing(source: StudySnapshot, tmp_path: Path) -> None:
    kept = [r for r in source.records if r.verdict in ("fits", "oom")]
    with opened(tmp_path, "wide", **WIDER) as study:
        sampler = study.study.sampler
        assert sampler.outlook(study.study).gain == math.inf, "nothing fits that it knows of"
        assert carry_over(study, source, is_valid=lambda _: False) == 0
        assert carry_over(study, source, is_valid=anything) == len(kept)
        assert study.ledger.trials_spent() == 0
        assert sampler.outlook(study.study).gain < math.inf
    stored = snapshot(tmp_path, "wide").records
    assert [(r.config, r.outcome) for r in stored] == [(r.config, r.outcome) for r in kept]
    assert [r.carried.number for r in stored] == [r.number for r in kept]
    assert {r.carried.study for r in stored} == {"narrow"}
    assert sum(r.device_seconds + r.wall_seconds for r in stored) == 0.0
    assert sum(r.is_baseline for r in stored) == 1


def test_it_is_never_run_again(source: StudySnapshot, tmp_path: Path) -> None:
    runner = ReplayRunner(otherwise=train)
    with opened(tmp_path, "wide", trials=5, **WIDER) as study:
        taken = carry_over(study, source, is_valid=anything)
        drive(study, runner)
        assert len(study.records()) <= taken + 5
    assert not {r.config for r in source.records if r.verdict != "pruned_slow"} & set(runner.ran)


def test_to_carry_over_again_takes_nothing_twice(source: StudySnapshot, tmp_path: Path) -> None:
    with opened(tmp_path, "wide", **WIDER) as study:
        first = carry_over(study, source, is_valid=anything)
    with opened(tmp_path, "wide", **WIDER) as study:
        assert study.recover() == ()
        assert carry_over(study, source, is_valid=anything) == 0
    again = snapshot(tmp_path, "wide")
    with opened(tmp_path, "wider", **WIDER) as study:
        assert carry_over(study, again, is_valid=anything) == first
        assert carry_over(study, source, is_valid=anything) == 0
        marks = {r.carried for r in study.records()}
    assert {mark.study for mark in marks if mark} == {"narrow"}


def test_killed_it_goes_on(
    source: StudySnapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, "wide", **WIDER) as study:
        add, left = study.study.add_trial, [2]

        def dying(trial: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            add(trial)

        monkeypatch.setattr(study.study, "add_trial", dying)
        with pytest.raises(KeyboardInterrupt):
            carry_over(study, source, is_valid=anything)
    assert len(snapshot(tmp_path, "wide").records) == 2
    with opened(tmp_path, "wide", **WIDER) as study:
        assert study.recover() == ()
        whole = carry_over(study, source, is_valid=anything)
    configs = [r.config for r in snapshot(tmp_path, "wide").records]
    assert len(set(configs)) == len(configs) == whole + 2


FITS, RAN_OUT = a_record(TrialConfig(), number=0), OutOfMemory(stage="forward")
LONGER = {"steps": {"measured_min": 100, "measured_max": 200}}
BASELINE = {"lora_rank": 64, "micro_batch_size": 4}


@pytest.mark.parametrize(
    ("keys", "outcome", "changes", "holds"),
    [
        ({}, None, {}, True),
        ({}, RAN_OUT, {}, True),
        ({}, Diverged(step=3), {}, True),
        ({}, {"verdict": "invalid", "rule": "r"}, {}, False),
        ({}, {"verdict": "dominated_oom", "by": 1}, {}, False),
        ({}, {"verdict": "predicted_oom", "predicted_bytes": 1}, {}, False),
        ({}, {"verdict": "crashed", "phase": "attach"}, {}, False),
        ({"lora_rank": 64}, None, {}, False),
        ({"lora_rank": 64}, None, {"baseline": BASELINE | {"micro_batch_size": 8}}, False),
        (BASELINE, None, {"baseline": BASELINE}, True),
        ({}, None, LONGER, False),
        ({}, RAN_OUT, LONGER, True),
    ],
)
def test_what_would_be_said_again_holds(keys: Any, outcome: Any, changes: Any, holds: bool) -> None:
    record = a_record(TrialConfig(**keys), outcome)
    assert list(holding(a_snapshot(record), a_space(**changes))) == [record] * holds


def test_of_a_configuration_that_ran_twice_the_last_trial_holds() -> None:
    later = a_record(TrialConfig(), RAN_OUT, number=3)
    lost = a_record(TrialConfig(), {"verdict": "crashed", "phase": "attach"}, number=4)
    assert list(holding(a_snapshot(FITS, later, lost), a_space())) == [later]


def test_what_did_not_hold_when_measured_again_is_left_behind() -> None:
    fit = a_record(TrialConfig(micro_batch_size=8), number=0)
    soaked = changed(confirmed(fit)[-1], outcome=RAN_OUT)
    other = changed(FITS, number=1)
    source = replace(a_snapshot(fit, other), confirmations=(soaked,))
    assert [r.number for r in holding(source, a_space())] == [1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_fingerprint": "other"}, "model: "),
        ({"target": Target(gpu="l4", device="cuda", budget_bytes=BUDGET)}, "gpu: a10 -> l4"),
        ({"target": Target(gpu="a10", device="cuda", budget_bytes=1)}, "budget: "),
        ({"space": a_space(weights="pretrained")}, "weights: random -> pretrained"),
    ],
)
def test_a_study_of_other_conditions_is_refused(change: Any, said: str) -> None:
    source = replace(a_snapshot(emulated_on=None), definition=a_definition())
    refuse_incomparable(source, a_definition())
    with pytest.raises(InputError, match=said):
        refuse_incomparable(source, a_definition().model_copy(update=change))
