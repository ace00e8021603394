"""What the guided sampler asks for first: of the class that is recommended from, by the speed that
decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import optuna
import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import find_gpu
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage import codec
from qlora_sweep.storage.records import TrialRecord
from qlora_sweep.sweep.predict.forecast import Forecaster, SpeedForecast
from qlora_sweep.sweep.sampling.encoding import Encoding
from qlora_sweep.sweep.sampling.guided import GuidedSampler
from qlora_sweep.sweep.sampling.samplers import make_sampler
from tests.sweep.simulated_device import BUDGET, MODEL, Exact, a_space, at_speed

SPACE: dict[str, Any] = {
    "dimensions": {
        "lora_rank": {"choices": [8, 16, 64]},
        "target_modules": {"choices": ["qv", "attention"]},
        "micro_batch_size": {"choices": [1, 2, 4, 8]},
        "checkpoint_fraction": {"choices": [0.0, 0.5, 1.0]},
        "compute_dtype": {"choices": ["bf16", "int8"]},
    },
    "fixed": {"kernels": "fused-loss", "seq_len": 512},
}


def forecast(gpu: str) -> SpeedForecast:
    return SpeedForecast(model=MODEL, gpu=find_gpu(gpu))


class Asked:
    """A guided search on an H200, for itself or for an A10; every trial is as predicted."""

    def __init__(self, *, is_for_a10: bool, **space: Any) -> None:
        self.space: SearchSpace = a_space(**(SPACE | space))
        self.host, self.a10 = forecast("h200"), forecast("a10")
        forecaster = Forecaster(
            model=MODEL,
            budget_bytes=BUDGET,
            violation=lambda _: None,
            predictor=Exact(),
            speed=self.host,
            target_speed=self.a10 if is_for_a10 else None,
            is_cut_up=False,
        )
        sampler = make_sampler("guided", self.space, seed=0, forecaster=forecaster, model=MODEL)
        assert isinstance(sampler, GuidedSampler)
        self.sampler = sampler
        self.study = optuna.create_study(sampler=sampler, direction="maximize")

    def trials(self, count: int) -> Iterator[TrialConfig]:
        encoding = Encoding(self.space)
        for _ in range(count):
            trial = self.study.ask(encoding.distributions)
            config = self.space.config(encoding.decode(trial.params))
            outcome = at_speed(config, self.host.predict(config) or 0.0)
            record = TrialRecord(number=trial.number, config=config, outcome=outcome)
            told = codec.to_optuna(record, objectives=("tokens_per_second",), budget_bytes=BUDGET)
            for key, value in told.attributes.items():
                trial.set_user_attr(key, value)
            trial.set_constraint(codec.CONSTRAINT, told.violation)
            self.study.tell(trial, values=told.values, state=told.state)
            yield config


def is_standard(config: TrialConfig) -> bool:
    return (config.lora_rank, config.target_modules) == (16, "attention")


@pytest.mark.parametrize("is_for_a10", [True, False])
def test_trials_are_of_the_standard_recipes_class(is_for_a10: bool) -> None:
    asked = Asked(is_for_a10=is_for_a10)
    assert all(map(is_standard, asked.trials(3)))
    assert asked.sampler.outlook(asked.study).gain < 0.02
    classes = asked.sampler.unmeasured_classes(asked.study)
    assert len(classes) == 5
    assert not any(is_standard(one.config) for one in classes)
    # A smaller adapter is faster, and stands beside it as predicted.
    speed = asked.a10 if is_for_a10 else asked.host
    (small,) = (o for o in classes if (o.config.lora_rank, o.config.target_modules) == (8, "qv"))
    assert small.tokens_per_second == pytest.approx(speed.predict(small.config), rel=0.05)


def test_of_a_space_without_it_trials_are_of_the_nearest_class() -> None:
    few = SPACE["dimensions"] | {"lora_rank": {"choices": [8, 64]}}
    asked = Asked(is_for_a10=False, dimensions=few)
    assert all(c.lora_rank == 8 and c.target_modules == "attention" for c in asked.trials(2))


def test_on_a_stand_in_the_predicted_fastest_of_the_target_comes_first() -> None:
    asked = Asked(is_for_a10=True)
    (first,) = asked.trials(1)
    choices = [c for c in map(asked.space.config, asked.space.combinations()) if is_standard(c)]
    fits = [c for c in choices if asked.sampler._forecaster.expect(c).refusal is None]
    plain = [c for c in fits if c.numerics == "16-bit"]
    # INT8 may be faster there, and is not sure to be.
    assert first == max(plain, key=asked.a10.predict)
    # However slow it is here, nothing else is to be gained.
    assert asked.sampler.outlook(asked.study).gain < 0.02
    owed = asked.sampler.fastest_of(asked.study, lambda c: c.numerics == "int8", [first])
    assert owed is not None
    assert owed.numerics == "int8"
