"""What a study tells of its settings: by one fit, with its interval, or not at all."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from qlora_sweep.reports.document import document_of
from qlora_sweep.reports.effects import Effect, EffectRatio, effects_of
from qlora_sweep.reports.view import view_of
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.sweep.study.recorded import recorded_study
from tests.reports.synthetic import (
    SURFACES,
    definition,
    fits,
    snapshot,
)

FACTORS: Mapping[str, Mapping[Any, float]] = {
    "upcast_fp32": {True: 1.0, False: 1.08},
    "kernels": {"hf": 1.0, "liger": 1.30},
    "compile": {False: 1.0, True: 1.05},
    "checkpoint_fraction": {0.0: 1.0, 1.0: 0.75},
}
STUDIES = 200
NOISE = 0.02


def _space(**dimensions: tuple[Any, ...]) -> Any:
    return definition(
        space={
            "dimensions": dimensions,
            "baseline": {},
        }
    )


def _study(configs: list[TrialConfig], rng: random.Random) -> StudySnapshot:
    """Return a study whose speeds are products of `FACTORS`, with noise."""
    records = []
    for number, config in enumerate(configs):
        true = math.prod(factors[getattr(config, key)] for key, factors in FACTORS.items())
        speed = 10_000 * true * math.exp(rng.gauss(0.0, NOISE))
        peak = int(8 * GIB * (1 if config.kernels == "hf" else 0.7))
        records.append(fits(number, speed, config, peak_allocated_bytes=peak))
    space = {key: tuple(values) for key, values in FACTORS.items()}
    return snapshot(records, definition=_space(micro_batch_size=(1, 2, 4), **space))


def _guided(rng: random.Random) -> list[TrialConfig]:
    """Return configurations as a guided search has them: what seems fast comes in company.

    With Liger the upcast is seldom left out, and without it nearly always; no two of them differ
    in a setting of `FACTORS` alone, as each has a micro-batch of its own.
    """
    configs = []
    for number in range(16):
        is_liger = rng.random() < 0.5
        configs.append(
            TrialConfig(
                micro_batch_size=number + 1,
                kernels="liger" if is_liger else "hf",
                upcast_fp32=rng.random() < (0.85 if is_liger else 0.15),
                compile=rng.random() < 0.5,
                checkpoint_fraction=rng.choice((0.0, 1.0)),
            )
        )
    return configs


def _effects(study: StudySnapshot) -> list[Effect]:
    found = effects_of(document_of(view_of(study)))
    return list(found.effects)


def _by_key(study: StudySnapshot, key: str) -> Effect:
    return next(effect for effect in _effects(study) if effect.key == key)


def test_an_interval_holds_the_effect_in_19_of_20_studies() -> None:
    """The binomial error of such a share of 200 studies is 1.5 %."""
    truth = 1.08
    rng = random.Random(7)
    held: list[bool] = []
    for _ in range(STUDIES):
        change = _by_key(_study(_guided(rng), rng), "upcast_fp32").speed
        if change is not None:
            held.append(change.low <= truth <= change.high)
    assert len(held) > STUDIES / 2
    assert 0.92 <= sum(held) / len(held) <= 0.98


def test_on_trials_that_really_ran_a_fit_of_50_holds_what_all_200_say() -> None:
    """Speeds are no products of factors in truth: what a fit misses has to be in its interval."""
    study = recorded_study(str(SURFACES / "mistral-7b-v0.3_h200.jsonl"))
    whole = {effect.label: effect.speed.value for effect in _effects(study) if effect.speed}
    assert whole["fp32 upcast → no fp32 upcast"] > 1.0
    rng = random.Random(0)
    held: list[bool] = []
    for _ in range(25):
        part = replace(study, records=tuple(rng.sample(study.records, 50)))
        for effect in _effects(part):
            if effect.speed is not None and effect.label in whole:
                held.append(effect.speed.low <= whole[effect.label] <= effect.speed.high)
    assert len(held) > 120
    assert 0.92 <= sum(held) / len(held) <= 0.99


def _varied(sizes: Iterable[int], *kinds: dict[str, Any], **searched: Any) -> StudySnapshot:
    """Return a study of each size with each kind of settings and what was measured of it."""
    records = []
    for size in sizes:
        for kind in kinds:
            own = {key: value for key, value in kind.items() if key in TrialConfig.model_fields}
            measured = {key: value for key, value in kind.items() if key not in own}
            speed = measured.pop("speed", 9_000.0 + size)
            config = TrialConfig(micro_batch_size=size, **own)
            records.append(fits(len(records), speed, config, **measured))
    return snapshot(records, definition=_space(micro_batch_size=tuple(sizes), **searched))


KERNELS = ("hf", "liger")
NO_SPEED = {"steps_measured": 3, "step_seconds_ci95": None}


def test_speed_and_memory_are_told_of_a_change_from_the_baselines() -> None:
    usual = {"kernels": "hf", "speed": 10_000.0, "peak_allocated_bytes": 8 * GIB}
    lean = {"kernels": "liger", "speed": 13_000.0, "peak_allocated_bytes": 4 * GIB}
    effect = _by_key(_varied((2, 4, 8, 16), usual, lean, kernels=KERNELS), "kernels")
    assert effect.label == "standard kernels → Liger kernels"
    assert effect.speed.value == pytest.approx(1.3)
    assert effect.memory.value == pytest.approx(0.5)
    # A speed without an interval does not count, and its peak does.
    effect = _by_key(_varied(range(1, 9), usual, lean | NO_SPEED, kernels=KERNELS), "kernels")
    assert (effect.speed, effect.why[:27]) == (None, "no speed was measured to th")
    assert effect.memory.value == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("study", "key", "why"),
    [
        (_varied((1, 2, 3), {}, kernels=KERNELS), "kernels", "every trial that was measured had"),
        (_varied((4, 8), {}), "micro_batch_size", "too few trials"),
        (
            _varied(
                range(1, 9),
                *({}, {"kernels": "liger", "compile": True}),
                kernels=KERNELS,
                compile=(False, True),
            ),
            "kernels",
            "never varied apart from compile",
        ),
    ],
    ids=["one value", "too few", "together"],
)
def test_a_setting_without_an_effect_says_why(study: StudySnapshot, key: str, why: str) -> None:
    effect = _by_key(study, key)
    assert (effect.speed, effect.memory) == (None, None)
    assert effect.why.startswith(why)


def test_an_interval_across_one_shows_no_difference() -> None:
    assert str(EffectRatio(1.01, 0.98, 1.04)) == "no difference shown (-2.0 to +4.0 %)"
    assert str(EffectRatio(1.6, 1.5, 1.7)) == "+60 % (+50 to +70 %)"
