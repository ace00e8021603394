from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.samplers import BaseSampler
from optuna.trial import TrialState

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.loading import load_space, parse_space, with_fixed
from qlora_sweep.search_spaces.space import SamplerName, SearchSpace
from qlora_sweep.storage import codec
from qlora_sweep.storage.records import Outcome, OutOfMemory, TrialRecord
from qlora_sweep.sweep.planning.survey import survey
from qlora_sweep.sweep.predict.memory.predictor import one_of_each_kind
from qlora_sweep.sweep.sampling.encoding import (
    Encoding,
    ShortlistedCandidates,
    SpaceCandidates,
    identity,
)
from qlora_sweep.sweep.sampling.samplers import make_sampler, quiet_optuna
from tests.sweep.planning.imagined import a_forecaster
from tests.sweep.simulated_device import (
    BUDGET,
    Knowing,
    OneFactor,
    a_record,
    a_space,
    best_speed,
    forecasts,
    peak_bytes,
    tokens_per_second,
    train,
)

quiet_optuna()

SMALL = {
    "micro_batch_size": [1, 2, 4],
    "effective_batch_size": [None, 4],
    "lora_alpha": [None, 32],
    "kernels": ["hf", "liger"],
}
"""24 combinations, of which 10 train in different ways: alpha 32 is what null stands for."""


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


BATCHES = {
    "micro_batch_size": {"low": 1, "high": 4},
    "effective_batch_size": [4, 6, None],
}
"""Of which some do not go into each other."""


ALPHAS = {"lora_alpha": [None, 8, 32.5]}
LISTS = {"target_modules": ["qv", ["q_proj", "up_proj"]]}
TRUTH_VALUES = {"compile": [True, False]}
STEPPED_INTEGERS = {"micro_batch_size": {"low": 2, "high": 11, "step": 3}}
STEPS = {"checkpoint_fraction": {"low": 0.1, "high": 0.95, "step": 0.1}}
LOG_INTEGERS = {"lora_rank": {"low": 1, "high": 64, "log": True}}


@pytest.mark.parametrize(
    ("name", "dimensions"),
    [
        *itertools.product(["guided", "random", "tpe", "gp", "grid"], [SMALL, BATCHES]),
        # Every value comes back as it was declared.
        *itertools.product(
            ["random", "grid"],
            [ALPHAS | LISTS | TRUTH_VALUES, STEPPED_INTEGERS | STEPS, LOG_INTEGERS],
        ),
    ],
)
def test_each_valid_configuration_is_asked_for_once(
    name: SamplerName, dimensions: dict[str, Any]
) -> None:
    fixed = dict.fromkeys({"lora_rank"} - dimensions.keys(), 16)
    space = a_space(dimensions=dimensions, fixed=fixed)
    every = {identity(space.config(values)) for values in space.combinations()}
    sampler = make_sampler(name, space, seed=1, forecaster=Knowing())
    configs = asked(sampler, space, trials=len(every))
    assert {identity(config) for config in configs} == every


@pytest.mark.parametrize(
    "name",
    ["guided", "random", "tpe", pytest.param("gp", marks=pytest.mark.integration)],
)
def test_a_trial_outside_the_space_has_no_parameters_and_stops_no_sampler(
    name: SamplerName,
) -> None:
    sampler = make_sampler(name, a_space(), seed=2, forecaster=Knowing())
    # Optuna's Gaussian process draws at random until it knows ten trials.
    configs = asked(sampler, a_space(), trials=12, first_without_parameters=True)
    assert len({identity(config) for config in configs}) == 12


def test_when_everything_left_is_hopeless_it_is_asked_for_all_the_same_but_once() -> None:
    space = a_space(dimensions=SMALL)
    sampler = make_sampler("tpe", space, seed=3, forecaster=Knowing(refuses=lambda _: True))
    configs = asked(sampler, space, trials=10)
    assert len({identity(config) for config in configs}) == 10


def test_the_same_seed_asks_the_same_and_nothing_twice() -> None:
    space = a_space(dimensions={"checkpoint_fraction": {"low": 0.2, "high": 0.4}})
    first, second = (
        asked(make_sampler("tpe", space, seed=6), space, trials=15, objectives=2) for _ in range(2)
    )
    assert first == second
    assert all(0.2 <= config.checkpoint_fraction <= 0.4 for config in first)
    assert len({config.checkpoint_fraction for config in first}) == 15


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


def test_optuna_says_nothing_on_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    quiet_optuna()
    study = optuna.create_study()
    study.tell(study.ask(), state=TrialState.FAIL)
    with warnings.catch_warnings():
        quiet_optuna()
        warnings.warn("new", optuna.exceptions.ExperimentalWarning, stacklevel=1)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["guided", "random", "tpe"])
def test_the_last_untried_configuration_of_many_is_found(name: SamplerName) -> None:
    space = a_space(dimensions={"lora_rank": {"low": 1, "high": 600}}, fixed={})
    known = Encoding(space).distributions
    study = optuna.create_study(sampler=make_sampler(name, space, seed=1, forecaster=Knowing()))
    create = optuna.trial.create_trial
    tried = [create(params={"lora_rank": n}, distributions=known, value=1.0) for n in range(1, 600)]
    study.add_trials(tried)
    assert study.ask(known).params == {"lora_rank": 600}


@pytest.mark.parametrize("name", ["guided", "random", "tpe"])
def test_one_acceptable_configuration_in_a_thousand_is_found(name: SamplerName) -> None:
    space = a_space(dimensions={"lora_rank": {"low": 1, "high": 1000}}, fixed={})
    forecaster = Knowing(refuses=lambda config: config.lora_rank != 777)
    sampler = make_sampler(name, space, seed=1, forecaster=forecaster)
    assert asked(sampler, space, trials=1)[0].lora_rank == 777


@pytest.mark.parametrize("name", ["guided", "tpe"])
def test_what_was_closed_before_it_ran_is_still_to_be_tried(name: SamplerName) -> None:
    space = a_space(dimensions={"micro_batch_size": [1, 2]}, fixed={})
    known = Encoding(space).distributions
    study = optuna.create_study(sampler=make_sampler(name, space, seed=0, forecaster=Knowing()))
    closed = study.ask(known)
    study.tell(closed, state=TrialState.FAIL)
    assert closed.params in [study.ask(known).params for _ in range(2)]


@dataclass(frozen=True)
class Foresight:
    """Knows the simulated GPU's speed and memory, each off by a function of the configuration."""

    speed_off: Callable[[TrialConfig], float] = lambda _: 1.0
    memory_off: float = 1.0
    is_reversed: bool = False
    predicts_speed: bool = False

    def expect(self, config: TrialConfig) -> Any:
        return SimpleNamespace(is_refused=False)

    def is_valid(self, config: TrialConfig) -> bool:
        return True

    def forecast(self, configs: Sequence[TrialConfig]) -> Any:
        seconds = np.array([c.tokens_per_step / tokens_per_second(c) for c in configs])
        seconds *= [self.speed_off(config) for config in configs]
        log_seconds = -np.log(seconds) if self.is_reversed else np.log(seconds)
        return forecasts(
            configs,
            physics=OneFactor(log_seconds),
            peak_bytes=np.array([float(peak_bytes(c)) for c in configs]) * self.memory_off,
            uncertainty=np.full(len(configs), 0.015),
            trainable_parameters=np.array([1e6 * c.lora_rank for c in configs]),
        )


def a_study(
    space: SearchSpace, foresight: Any, *, seed: int = 0, name: Any = "guided"
) -> optuna.Study:
    directions = codec.directions(space.objectives)
    sampler = make_sampler(name, space, seed=seed, forecaster=foresight)
    return optuna.create_study(sampler=sampler, directions=directions)


def tell(study: optuna.Study, trial: optuna.Trial, record: TrialRecord, space: SearchSpace) -> None:
    result = codec.to_optuna(record, objectives=space.objectives, budget_bytes=BUDGET)
    for key, value in result.attributes.items():
        trial.set_user_attr(key, value)
    study.tell(trial, values=result.values, state=result.state)


def step(
    study: optuna.Study,
    space: SearchSpace,
    answer: Callable[[TrialConfig], Outcome] = train,
) -> TrialRecord:
    """Ask for one trial, run it on the simulated GPU, and tell how it ended."""
    encoding = Encoding(space)
    trial = study.ask(encoding.distributions)
    config = encoding.config(trial.params)
    record = a_record(config, answer(config), number=trial.number)
    tell(study, trial, record, space)
    return record


def speeds(records: Sequence[TrialRecord]) -> list[float]:
    return [r.measurement.tokens_per_second for r in records if r.measurement]


@pytest.mark.parametrize(
    ("foresight", "most"),
    [
        pytest.param(Foresight(speed_off=lambda _: 3.0), 1, id="off-by-a-factor"),
        pytest.param(
            Foresight(speed_off=lambda c: 1.34 if c.kernels == "liger" else 1.0), 8, id="structure"
        ),
        pytest.param(Foresight(memory_off=1.3), 8, id="memory-too-high"),
        pytest.param(Foresight(memory_off=0.7), 8, id="memory-too-low"),
        pytest.param(Foresight(is_reversed=True, memory_off=0.7), 30, id="all-wrong-low"),
        pytest.param(Knowing(), 30, id="nothing-forecast"),
    ],
)
def test_a_wrong_forecast_costs_trials_and_never_the_optimum(foresight: Any, most: int) -> None:
    space = a_space()
    study = a_study(space, foresight)
    records = [step(study, space) for _ in range(most)]
    share = 0.98 if isinstance(foresight, Foresight) else 0.95
    assert max(speeds(records)) > share * best_speed(space)


def test_what_ran_out_of_memory_moves_the_edge_of_what_is_tried() -> None:
    space = a_space()
    study = a_study(space, Foresight(memory_off=0.6))
    outcomes = []
    while study.sampler.outlook(study).gain >= 0.01 and len(outcomes) < 40:
        outcomes.append(step(study, space).outcome)
    ran_out = [isinstance(outcome, OutOfMemory) for outcome in outcomes]
    assert ran_out[0]
    assert sum(ran_out) <= 4
    assert len(ran_out) < 15


def test_a_study_that_goes_on_asks_what_it_would_have_asked() -> None:
    space = a_space()
    foresight = Foresight(speed_off=lambda c: 1.3 if c.kernels == "liger" else 1.0)
    study = a_study(space, foresight)
    for _ in range(3):
        step(study, space)
    resumed = a_study(space, foresight)
    resumed.add_trials(study.get_trials())
    assert step(resumed, space).config == step(study, space).config


def test_a_running_trial_is_not_asked_for_again_and_says_as_much_as_its_forecast() -> None:
    space = a_space()
    study = a_study(space, Foresight())
    encoding = Encoding(space)
    running = [encoding.config(study.ask(encoding.distributions).params) for _ in range(4)]
    assert len(set(running)) == 4
    assert step(study, space).config not in running


@pytest.mark.parametrize("objective", ["peak_memory", "trainable_parameters"])
def test_another_objective_than_speed_is_found_where_it_is_predicted(objective: str) -> None:
    space = a_space(
        objectives=[objective],
        dimensions={
            "micro_batch_size": [1, 2, 4, 8, 16, 32],
            "lora_rank": [8, 16, 32],
        },
        fixed={},
    )
    study = a_study(space, Foresight())
    first = step(study, space).config
    if objective == "peak_memory":
        assert (first.micro_batch_size, first.lora_rank) == (1, 8)
    else:
        assert first.lora_rank == 32


def test_of_a_space_that_is_too_large_to_list_the_fastest_are_candidates() -> None:
    space, forecaster = load_space("a10"), a_forecaster()
    assert not SpaceCandidates(space, is_valid=forecaster.is_valid, seed=0).is_listed
    candidates = ShortlistedCandidates(space, forecaster=forecaster, seed=0)
    known = candidates.near([])
    assert len(known) > 100
    assert all(candidates.params_of(candidate.config) is not None for candidate in known[:20])
    found = survey(space, forecaster)
    configs = {identity(candidate.config) for candidate in known}
    assert {identity(best.config) for best in found.fastest_by_numerics.values()} <= configs


def test_a_continuous_range_is_searched_to_its_best() -> None:
    space = a_space(
        dimensions={
            "checkpoint_fraction": {"low": 0.0, "high": 1.0},
            "micro_batch_size": [8, 10, 12],
        },
        fixed={"kernels": "liger", "upcast_fp32": False},
    )
    study = a_study(space, Foresight())
    records = [step(study, space) for _ in range(4)]
    # The largest batch that fits with the least recomputation.
    fine = {"checkpoint_fraction": {"low": 0.0, "high": 1.0, "step": 0.02}}
    dimensions = space.model_dump()["dimensions"] | fine
    best = best_speed(a_space(dimensions=dimensions, fixed=space.fixed))
    assert max(speeds(records)) > 0.98 * best


def test_runs_that_measure_a_winner_again_teach_nothing_but_that_it_ran_out() -> None:
    space = a_space()
    before = a_study(space, Foresight())
    winner = [step(before, space) for _ in range(3)][-1].config

    def outlook(*again: Outcome) -> tuple[float, TrialConfig | None]:
        study = a_study(space, Foresight())
        study.add_trials(before.get_trials())
        for outcome in again:
            record = a_record(winner, outcome, number=3, purpose="confirm", series=1)
            tell(study, study.ask(), record, space)
        found = study.sampler.outlook(study)
        return found.gain, found.config

    slower = train(TrialConfig(micro_batch_size=1))
    assert outlook(slower) == outlook()
    assert outlook(OutOfMemory(stage="forward")) != outlook()


def test_the_micro_batch_and_the_gpus_stay_where_an_effective_batch_goes_with_both() -> None:
    batches = {"micro_batch_size": [4, 8], "data_parallel": [1, 4]}
    space = a_space(dimensions=batches | {"effective_batch_size": [16, 32]})
    drawn = {"micro_batch_size": 8, "data_parallel": 4, "effective_batch_size": 16}
    whole = Encoding(space).with_whole_batches(drawn, draw=random.Random(0))
    assert whole == drawn | {"effective_batch_size": 32}


# What a space leaves out is nowhere: not held, not counted, not drawn, not planned, not traced

TEXT = """
dimensions:
  micro_batch_size: [1, 2]
  compute_dtype: [bf16, int8]
  quantization: [nf4, int8]
  kernels: [hf, fused-loss]
baseline: {micro_batch_size: 1}
"""
LEFT_OUT = """
leave_out:
  - {compute_dtype: [int8], kernels: [hf]}
  - {compute_dtype: [bf16], quantization: [int8]}
"""


def from_text(text: str = "") -> SearchSpace:
    return parse_space(TEXT + text, label="mine.yaml")


def everywhere(space: SearchSpace) -> list[set[TrialConfig]]:
    """Return the configurations of a space as each of its readers sees them."""
    encoding = Encoding(space)
    draw = random.Random(0)
    combinations = list(from_text().combinations())
    drawn = [encoding.with_whole_batches(params, draw=draw) for params in 9 * combinations]
    every = [from_text().config(params) for params in combinations]
    return [
        {config for config in every if space.holds(config)},
        {config for config in every if space.params_of(config) is not None},
        {config for _, config in encoding.every()},
        {encoding.config(params) for params in drawn},
    ]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("", 16),
        # Of bf16 both kernels, and of INT8 both bases.
        (LEFT_OUT, 2 * (2 + 2)),
        # A base that is stored in 8 bits computes in 16.
        ("numerics: 16-bit\n", 8),
        (f"numerics: 16-bit\n{LEFT_OUT}", 4),
    ],
)
def test_what_is_left_out_is_nowhere(text: str, size: int) -> None:
    space = from_text(text)
    first, *others = everywhere(space)
    assert space.size() == len(first) == size
    assert all(other == first for other in others)
    traced = {config for config in one_of_each_kind(space) if config.micro_batch_size == 1}
    assert all(space.holds(config) for config in traced)


def test_what_is_typed_is_asked_for_whatever_the_file_leaves_out() -> None:
    held = {"compute_dtype": "int8", "kernels": "hf"}
    space = with_fixed(from_text(LEFT_OUT), held)
    assert isinstance(space, SearchSpace)
    assert space.size() == 4


ONE = "dimensions: {micro_batch_size: [1, 2]}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{ONE}numerics: 16-bit\nfixed: {{compute_dtype: fp8}}", "numerics leaves nothing to"),
        (f"{ONE}numerics: 8-bit", "numerics must be one of 'any' or '16-bit', got '8-bit'"),
        (f"{ONE}leave_out: [{{lora_rank: [16]}}]", "leave_out leaves nothing to search"),
        (f"{ONE}leave_out: [{{micro_batch_size: [1]}}]", "cannot name micro_batch_size"),
        (f"{ONE}leave_out: [{{kernels: [liger, hff]}}]", "kernels must be one of"),
    ],
)
def test_what_leaves_nothing_or_names_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_space(text, label="mine.yaml")
