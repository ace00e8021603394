from __future__ import annotations

import warnings
from typing import Any

import optuna
import pytest
from optuna.samplers import BaseSampler
from optuna.trial import TrialState

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.space import SamplerName, SearchSpace
from sweep.sampling.encoding import Encoding, Frontier, identity
from sweep.sampling.samplers import make_sampler, quiet_optuna
from tests.sweep.simulated_device import (
    BUDGET,
    Knowing,
    a_space,
    does_not_fit,
    peak_bytes,
    tokens_per_second,
)

quiet_optuna()

MODEL_BASED: list[Any] = ["guided", "random", "tpe", pytest.param("gp", marks=pytest.mark.slow)]
SMALL = {
    "micro_batch_size": {"choices": [1, 2, 4]},
    "effective_batch_size": {"choices": [None, 4]},
    "lora_alpha": {"choices": [None, 32]},
    "kernels": {"choices": ["hf", "liger"]},
}
"""24 combinations, of which 10 train in different ways: alpha 32 is what null stands for."""


def a_small_space(**changes: Any) -> SearchSpace:
    return a_space(dimensions=SMALL, **changes)


def asked(
    sampler: BaseSampler,
    space: SearchSpace,
    *,
    trials: int,
    first_without_parameters: bool = False,
    objectives: int = 1,
) -> list[TrialConfig]:
    """Ask and tell so many trials on the simulated GPU; return what was asked."""
    encoding = Encoding(space)
    study = optuna.create_study(sampler=sampler, directions=["maximize"] * objectives)
    if first_without_parameters:
        study.tell(study.ask({}), [1.0] * objectives)
    configs = []
    for _ in range(trials):
        trial = study.ask(encoding.distributions)
        config = encoding.config(trial.params)
        configs.append(config)
        trial.set_constraint("fit", peak_bytes(config) / BUDGET - 1)
        study.tell(trial, [tokens_per_second(config)] * objectives)
    return configs


@pytest.mark.parametrize("name", MODEL_BASED)
def test_no_configuration_is_asked_for_twice_while_another_is_left(name: SamplerName) -> None:
    space = a_small_space()
    every = {identity(space.config(values)) for values in space.combinations()}
    assert len(every) == 10
    configs = asked(
        make_sampler(name, space, seed=1, forecaster=Knowing()), space, trials=len(every)
    )
    assert {identity(config) for config in configs} == every


@pytest.mark.parametrize("name", [*MODEL_BASED, "grid"])
def test_batches_that_do_not_go_into_each_other_are_never_asked_for(name: SamplerName) -> None:
    batches = {
        "micro_batch_size": {"low": 1, "high": 4},
        "effective_batch_size": {"choices": [4, 6, None]},
    }
    space = a_space(dimensions=batches)
    every = {identity(space.config(values)) for values in space.combinations()}
    assert space.size() == 3 + 3 + 4
    configs = asked(
        make_sampler(name, space, seed=5, forecaster=Knowing()), space, trials=len(every)
    )
    assert {identity(config) for config in configs} == every
    assert Frontier(Encoding(space)).is_exhausted(every)


@pytest.mark.parametrize("name", MODEL_BASED)
def test_what_is_refused_is_not_asked_for_while_something_else_is_left(name: SamplerName) -> None:
    space = a_space()
    sampler = make_sampler(name, space, seed=2, forecaster=Knowing(refuses=does_not_fit))
    configs = asked(sampler, space, trials=15)
    assert not any(does_not_fit(config) for config in configs)


def test_when_everything_left_is_hopeless_it_is_asked_for_all_the_same_but_once() -> None:
    space = a_small_space()
    sampler = make_sampler("tpe", space, seed=3, forecaster=Knowing(refuses=lambda _: True))
    configs = asked(sampler, space, trials=10)
    assert len({identity(config) for config in configs}) == 10


@pytest.mark.parametrize("name", MODEL_BASED)
def test_a_trial_without_parameters_does_not_keep_a_sampler_from_learning(
    name: SamplerName,
) -> None:
    space = a_space()
    sampler = make_sampler(name, space, seed=4, forecaster=Knowing())
    configs = asked(sampler, space, trials=14, first_without_parameters=True)
    assert len(configs) == 14


def test_the_same_seed_asks_the_same_and_nothing_twice() -> None:
    space = a_space(dimensions={"checkpoint_fraction": {"low": 0.2, "high": 0.4}})
    first, second = (
        asked(make_sampler("tpe", space, seed=6), space, trials=15, objectives=2) for _ in range(2)
    )
    assert first == second
    assert all(0.2 <= config.checkpoint_fraction <= 0.4 for config in first)
    assert len({config.checkpoint_fraction for config in first}) == 15


def test_the_grid_asks_for_every_combination_once() -> None:
    space = a_space(
        dimensions={"micro_batch_size": {"choices": [1, 2]}, "lora_rank": {"low": 1, "high": 3}},
        fixed={},
    )
    configs = asked(make_sampler("grid", space, seed=8), space, trials=6)
    assert {(c.micro_batch_size, c.lora_rank) for c in configs} == {
        (batch, rank) for batch in (1, 2) for rank in (1, 2, 3)
    }


@pytest.mark.parametrize(
    ("dimensions", "message"),
    [
        ({"checkpoint_fraction": {"low": 0.0, "high": 1.0}}, "a grid needs a step"),
        (
            {"lora_rank": {"low": 1, "high": 2000}, "seq_len": {"low": 1, "high": 2000}},
            "4,000,000 combinations is too large",
        ),
    ],
)
def test_a_grid_that_never_ends_is_bad_input(dimensions: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_sampler("grid", a_space(dimensions=dimensions, fixed={}), seed=0)


def test_a_space_is_exhausted_once_every_way_to_train_was_tried() -> None:
    space = a_small_space()
    tried: set[str] = set()
    frontier = Frontier(Encoding(space))
    for values in space.combinations():
        assert not frontier.is_exhausted(tried) or len(tried) == 10
        tried.add(identity(space.config(values)))
    assert frontier.is_exhausted(tried)
    endless = a_space(dimensions={"checkpoint_fraction": {"low": 0.0, "high": 1.0}})
    assert not Frontier(Encoding(endless)).is_exhausted(tried)


def test_optuna_says_nothing_on_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    quiet_optuna()
    study = optuna.create_study()
    study.tell(study.ask(), state=TrialState.FAIL)
    with warnings.catch_warnings():
        quiet_optuna()
        warnings.warn("new", optuna.exceptions.ExperimentalWarning, stacklevel=1)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["guided", "random", "tpe"])
def test_the_last_one_of_a_large_space_that_was_not_tried_is_found(name: SamplerName) -> None:
    space = a_space(dimensions={"lora_rank": {"low": 1, "high": 3000}}, fixed={})
    encoding = Encoding(space)
    study = optuna.create_study(
        sampler=make_sampler(name, space, seed=1, forecaster=Knowing()), direction="maximize"
    )
    for rank in range(1, 3000):
        study.add_trial(
            optuna.trial.create_trial(
                params={"lora_rank": rank}, distributions=encoding.distributions, value=1.0
            )
        )
    assert study.ask(encoding.distributions).params == {"lora_rank": 3000}


@pytest.mark.parametrize("name", ["guided", "random", "tpe"])
def test_one_acceptable_configuration_in_a_thousand_is_found(name: SamplerName) -> None:
    space = a_space(dimensions={"lora_rank": {"low": 1, "high": 1000}}, fixed={})
    forecaster = Knowing(refuses=lambda config: config.lora_rank != 777)
    sampler = make_sampler(name, space, seed=1, forecaster=forecaster)
    assert asked(sampler, space, trials=1)[0].lora_rank == 777


def test_what_was_closed_before_it_ran_is_still_to_be_tried() -> None:
    for name in ("guided", "tpe"):
        space = a_space(dimensions={"micro_batch_size": {"choices": [1, 2]}}, fixed={})
        encoding = Encoding(space)
        sampler = make_sampler(name, space, seed=0, forecaster=Knowing())  # type: ignore[arg-type]
        study = optuna.create_study(sampler=sampler, direction="maximize")
        closed = study.ask(encoding.distributions)
        study.tell(closed, state=TrialState.FAIL)
        asked_then = [study.ask(encoding.distributions).params for _ in range(2)]
        assert closed.params in asked_then
