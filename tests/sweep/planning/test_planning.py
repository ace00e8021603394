"""Behaviour of plans, on a memory predictor that is a formula and the real speed model."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from search_spaces.config import TrialConfig
from search_spaces.costs import AskedWork
from search_spaces.errors import InputError
from search_spaces.gpus import GIB, find_gpu
from search_spaces.linears import CapacityClass
from search_spaces.loading import load_space
from search_spaces.models import ModelSpec
from search_spaces.space import SearchSpace, StepBudget
from storage.definition import StudySnapshot
from storage.records import OutOfMemory, PredictionRecord
from sweep.planning import candidates
from sweep.planning import survey as surveys
from sweep.planning.candidates import own_space
from sweep.planning.documents import card_document, comparison_document, forecast_document
from sweep.planning.evidence import evidence_from
from sweep.planning.plan import (
    CardComparison,
    CardPlan,
    bill_offers,
    compare_cards,
    plan_card,
    shape_table,
)
from sweep.planning.survey import survey
from sweep.predict.forecast import Forecast, Forecaster
from sweep.predict.memory.predictor import Fit
from sweep.predict.memory.profiles import Untraceable
from sweep.terminal.drawing import rendered
from sweep.terminal.plan_screen import one_gpu
from tests.sweep.imagined_memory import ImaginedMemory, ImaginedPredictor
from tests.sweep.imagined_study import (
    INTERFACE_KEYS,
    MISTRAL,
    TRIALS,
    a_record,
    a_snapshot,
    a_space,
)
from tests.sweep.planning.imagined import a_forecaster, an_offer
from tests.sweep.predict.predicted_steps import predict_step

UNKNOWN = ModelSpec("mine", "directory", {**MISTRAL.config, "model_type": "mine"})


def every(space: SearchSpace) -> list[TrialConfig]:
    return [space.config(params) for params in space.combinations()]


# One configuration


def test_a_forecast_says_what_fits_and_how_fast() -> None:
    forecast = a_forecaster().expect(TrialConfig(micro_batch_size=8))
    expected = predict_step(forecast.config, model=MISTRAL, gpu=find_gpu("a10"))
    assert (forecast.fit, forecast.fits) == (Fit.YES, True)
    assert forecast.tokens_per_second == pytest.approx(expected.tokens_per_second)
    assert forecast.speed_basis == "predicted"


@pytest.mark.parametrize(
    ("budget_gib", "fit", "fits"),
    [
        (7.0, Fit.NO, False),
        (8.95, Fit.UNCERTAIN, False),
        (9.1, Fit.UNCERTAIN, True),
        (9.3, Fit.YES, True),
    ],
)
def test_an_uncertain_fit_is_still_given_a_best_guess(
    budget_gib: float, fit: Fit, fits: bool
) -> None:
    # 5 GiB, 16 MiB of adapters and 4096 tokens at a MiB each.
    forecaster = a_forecaster(budget_gib=budget_gib)
    forecast = forecaster.expect(TrialConfig(micro_batch_size=8))
    assert (forecast.fit, forecast.fits) == (fit, fits)


def test_what_a_rule_forbids_does_not_fit_and_costs_nothing() -> None:
    forecast = a_forecaster(gpu="t4", budget_gib=100).expect(TrialConfig())
    assert forecast.broken.rule == "bf16-needs-ampere"
    assert (forecast.fits, forecast.fit, forecast.step_seconds) == (False, Fit.NO, None)
    assert bill_offers(forecast, work=AskedWork(), offers=[an_offer()]) == ()


def test_what_a_rule_forbids_may_be_unpredictable() -> None:
    predictor = ImaginedPredictor(fault=InputError("no such modules"))
    forecast = a_forecaster(gpu="t4", predictor=predictor).expect(TrialConfig())
    assert forecast.memory is None
    assert forecast_document(forecast, bills=())["peak_allocated_bytes"] is None


@pytest.mark.parametrize("kind", [InputError, Untraceable])
def test_a_plan_of_one_configuration_that_cannot_be_predicted_is_an_error(
    kind: type[InputError],
) -> None:
    predictor = ImaginedPredictor(fault=kind("cannot be traced: mine.attention"))
    with pytest.raises(InputError, match=r"mine\.attention"):
        plan_card(
            a_forecaster(predictor=predictor).expect(TrialConfig()),
            work=AskedWork(),
            offers=[an_offer()],
        )


def test_what_cannot_be_traced_is_not_known_to_fit_and_a_note_says_why() -> None:
    predictor = ImaginedPredictor(fault=Untraceable("cannot be traced: mine.attention"))
    forecast = a_forecaster(predictor=predictor).expect(TrialConfig())
    assert (forecast.memory, forecast.fit, forecast.fits) == (None, Fit.UNCERTAIN, None)
    document = forecast_document(forecast, bills=())
    assert document["fits"] is document["invalid"] is document["peak_allocated_bytes"] is None
    assert "mine.attention" in document["notes"][0]
    assert forecast.tokens_per_second


def test_what_the_model_has_no_modules_for_is_invalid() -> None:
    predictor = ImaginedPredictor(fault=InputError("no linear layer 'w'"))
    document = forecast_document(a_forecaster(predictor=predictor).expect(TrialConfig()), bills=())
    assert document["fits"] is False
    assert document["invalid"]["reason"] == "no linear layer 'w'"


def test_a_plan_is_no_surer_than_the_studys_trials_allow() -> None:
    def fit(share: float) -> Fit:
        config = TrialConfig(micro_batch_size=4)
        measured = a_record(0, config)
        peak = int(measured.measurement.peak_allocated_bytes / share)
        predicted = PredictionRecord(peak_allocated_bytes=peak, peak_reserved_bytes=peak)
        snapshot = a_snapshot(measured.model_copy(update={"prediction": predicted}))
        evidence = evidence_from(snapshot, model=MISTRAL, gpu=find_gpu("a10"))
        return a_forecaster(evidence=evidence).expect(TrialConfig(micro_batch_size=34)).fit

    assert fit(1.0) is Fit.NO
    assert fit(0.95) is Fit.UNCERTAIN


def test_without_a_speed_there_is_no_cost_and_a_note_says_why() -> None:
    forecast = a_forecaster(model=UNKNOWN).expect(TrialConfig())
    document = forecast_document(forecast, bills=())
    assert forecast.fits
    assert document["step_seconds"] is document["bottleneck"] is document["cost"] is None
    assert "not known" in document["notes"][0]


# The table


def test_the_table_has_every_size_and_the_configurations_own() -> None:
    table = shape_table(a_forecaster(), TrialConfig(micro_batch_size=3, seq_len=700))
    assert table.lengths == (512, 700, 1024, 2048, 4096)
    assert table.batches == (1, 2, 3, 4, 8, 16, 32, 64)
    assert {cell.config.seq_len for cell in table.cells.values()} == set(table.lengths)
    assert len(table.cells) == len(table.lengths) * len(table.batches)


def test_the_table_ends_with_the_first_micro_batch_that_fits_nowhere() -> None:
    table = shape_table(a_forecaster(), TrialConfig())
    fits = {batch: table.cells[batch, 512].fit is not Fit.NO for batch in table.batches}
    assert fits == {1: True, 2: True, 4: True, 8: True, 16: True, 32: True, 64: False}


def test_the_largest_micro_batch_is_exact() -> None:
    forecaster = a_forecaster()
    table = shape_table(forecaster, TrialConfig())
    for length, largest in table.largest.items():
        fits = [
            forecaster.expect(TrialConfig(micro_batch_size=batch, seq_len=length)).fit
            for batch in range(1, 64)
        ]
        assert largest.sure == fits.count(Fit.YES)
        assert largest.possible == fits.count(Fit.YES) + fits.count(Fit.UNCERTAIN)


def test_lengths_beyond_the_models_positions_are_left_out() -> None:
    short = replace(MISTRAL, config={**MISTRAL.config, "max_position_embeddings": 1024})
    table = shape_table(a_forecaster(model=short), TrialConfig())
    assert table.lengths == (512, 1024)


def test_micro_batches_divide_the_effective_batch() -> None:
    base = TrialConfig(micro_batch_size=6, effective_batch_size=24)
    table = shape_table(a_forecaster(gpu="h200"), base)
    assert table.batches == (1, 2, 4, 6, 8)
    assert table.largest[512].sure == 24


class UntraceableAtLength(ImaginedPredictor):
    """A mask, from some length on, that cannot be traced."""

    def predict(self, config: TrialConfig) -> ImaginedMemory:
        if config.seq_len >= 2048:
            raise Untraceable("the mask decides")
        return super().predict(config)


def test_a_length_that_cannot_be_traced_leaves_the_others_in_the_table() -> None:
    table = shape_table(a_forecaster(predictor=UntraceableAtLength()), TrialConfig())
    assert table.cells[1, 512].fits is True
    assert table.cells[1, 2048].fits is None
    assert table.largest[512].sure > 0
    assert table.largest[2048].possible == 0


def test_a_table_where_nothing_fits_is_one_of_dashes() -> None:
    table = shape_table(a_forecaster(budget_gib=1), TrialConfig())
    assert all(cell.fit is Fit.NO for cell in table.cells.values())
    assert {largest.possible for largest in table.largest.values()} == {0}


# A space


@pytest.mark.parametrize("budget_gib", [1, 5.7, 7.3, 9.1, 12.25, 15, 21.5, 60])
def test_a_survey_counts_what_asking_of_each_configuration_counts(budget_gib: float) -> None:
    forecaster = a_forecaster(budget_gib=budget_gib)
    counts = survey(a_space(), forecaster).found
    fits = [forecaster.expect(config).fit for config in every(a_space())]
    assert (counts.fit, counts.uncertain, counts.too_large) == tuple(
        fits.count(fit) for fit in (Fit.YES, Fit.UNCERTAIN, Fit.NO)
    )


def test_a_survey_counts_no_batches_that_do_not_go_into_each_other() -> None:
    dimensions = {
        "micro_batch_size": {"choices": [1, 2, 3]},
        "effective_batch_size": {"choices": [4, 6]},
    }
    found = survey(a_space(dimensions=dimensions), a_forecaster())
    assert found.found.looked_at == found.total == 5


def test_a_survey_recommends_the_fastest_that_surely_fits() -> None:
    forecaster = a_forecaster(budget_gib=15)
    found = survey(a_space(), forecaster)
    fitting = [c for c in every(a_space()) if forecaster.expect(c).fit is Fit.YES]
    fastest = max(fitting, key=lambda c: forecaster.expect(c).tokens_per_second or 0)
    assert found.recommended.config == fastest


def brute_force(forecaster: Forecaster, space: SearchSpace, batch: int, length: int) -> Any:
    """Return how well anything of that size fits, and the most tokens/s of what fits so well."""
    fitting: dict[Fit, list[float]] = {Fit.YES: [], Fit.UNCERTAIN: [], Fit.NO: []}
    for config in every(space):
        if (config.micro_batch_size, config.seq_len) == (batch, length):
            forecast = forecaster.expect(config)
            fitting[forecast.fit].append(forecast.tokens_per_second or 0.0)
    best = next(fit for fit in (Fit.YES, Fit.UNCERTAIN, Fit.NO) if fitting[fit])
    return best, max(fitting[best])


@pytest.mark.parametrize("budget_gib", [1, 5.7, 9.1, 12.25, 13.25, 21.5, 60])
def test_a_cell_is_the_best_that_the_space_holds_at_that_size(budget_gib: float) -> None:
    space = a_space(
        dimensions={
            "micro_batch_size": {"choices": [1, 4, 8, 16]},
            "seq_len": {"choices": [512, 2048]},
            "lora_rank": {"choices": [16, 64]},
            "checkpoint_fraction": {"choices": [0.0, 1.0]},
            "kernels": {"choices": ["hf", "liger"]},
        }
    )
    forecaster = a_forecaster(budget_gib=budget_gib)
    table = survey(space, forecaster).table
    if table is None:
        assert all(forecaster.expect(config).fit is Fit.NO for config in every(space))
        return
    assert (table.batches, table.lengths) == ((1, 4, 8, 16), (512, 2048))
    for (batch, length), cell in table.cells.items():
        fit, speed = brute_force(forecaster, space, batch, length)
        assert (cell.config.micro_batch_size, cell.config.seq_len) == (batch, length)
        assert cell.fit is fit
        if fit is not Fit.NO:
            assert cell.tokens_per_second == pytest.approx(speed)
    for length, largest in table.largest.items():
        fits = {batch: table.cells[batch, length].fit for batch in table.batches}
        assert largest.sure == max((b for b in fits if fits[b] is Fit.YES), default=0)
        assert largest.possible == max((b for b in fits if fits[b] is not Fit.NO), default=0)


def test_a_size_that_rules_forbid_is_in_the_table_and_does_not_fit() -> None:
    dimensions = {
        "micro_batch_size": {"choices": [1, 2]},
        "seq_len": {"choices": [512, 100_000]},
    }
    table = survey(a_space(dimensions=dimensions), a_forecaster()).table
    assert table.cells[1, 100_000].broken is not None
    assert (table.cells[1, 100_000].fit, table.largest[100_000].possible) == (Fit.NO, 0)


@pytest.mark.parametrize(
    ("changes", "batches", "lengths"),
    [
        ({"dimensions": {"micro_batch_size": {"choices": [3, 5]}}}, (3, 5), (512,)),
        (
            {
                "dimensions": {"micro_batch_size": {"choices": [2]}},
                "fixed": {"seq_len": 700},
            },
            (2,),
            (700,),
        ),
        (
            {
                "dimensions": {"seq_len": {"choices": [64, 96]}},
                "fixed": {"micro_batch_size": 6},
            },
            (6,),
            (64, 96),
        ),
    ],
)
def test_what_a_space_fixes_is_the_tables_one_row_or_column(
    changes: Mapping[str, Any], batches: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    table = survey(a_space(**changes), a_forecaster()).table
    assert (table.batches, table.lengths) == (batches, lengths)


def test_a_sample_misses_no_length_that_something_fits_at() -> None:
    space = a_space(
        dimensions={
            "micro_batch_size": {"choices": [1, 2, 64]},
            "lora_rank": {"low": 1, "high": 5000},
            "seq_len": {"low": 64, "high": 4096},
            "checkpoint_fraction": {"low": 0.0, "high": 1.0},
        }
    )
    # At 4,096 only little ranks and hardly any kept activations fit.
    forecaster = a_forecaster(budget_gib=9.3)
    table = survey(space, forecaster).table
    assert table.lengths[-1] == 4096
    assert table.cells[1, 4096].fit is Fit.YES


# What is recommended


class UnsureOfCompiled(ImaginedPredictor):
    """Compiled layers keep half as much, and their peak is known within 10 % only."""

    def predict(self, config: TrialConfig) -> Any:
        memory = super().predict(config.model_copy(update={"compile": False}))
        if not config.compile:
            return memory
        self.asked.append(config)
        kept = memory.breakdown["activations"] // 2
        return replace(
            memory,
            peak_allocated_bytes=memory.peak_allocated_bytes - kept,
            breakdown={**memory.breakdown, "activations": kept},
            uncertainty=0.1,
        )


def compiled_or_not(*batches: int) -> SearchSpace:
    return a_space(
        dimensions={
            "micro_batch_size": {"choices": list(batches)},
            "compile": {"choices": [False, True]},
        }
    )


def test_a_gain_inside_the_speeds_error_is_no_reason_to_be_less_sure_of_the_fit() -> None:
    forecaster = a_forecaster(predictor=UnsureOfCompiled(), budget_gib=21)
    found = survey(compiled_or_not(1, 2, 4, 8), forecaster)
    compiled, plain = (
        forecaster.expect(TrialConfig(micro_batch_size=8, compile=on)) for on in (True, False)
    )
    assert compiled.fit is plain.fit is Fit.YES
    assert (compiled.tokens_per_second or 0) > (plain.tokens_per_second or 0)
    assert (found.recommended, found.alternative) == (plain, compiled)
    document = card_document(planned(compiled_or_not(1, 2, 4, 8), forecaster))
    assert document["alternative"]["config"]["compile"] is True


def test_a_less_sure_one_is_recommended_where_it_is_faster_beyond_the_error() -> None:
    # Plain, one row of many tokens is all that fits; compiled, some rows perhaps do.
    space = a_space(
        dimensions={
            "micro_batch_size": {"choices": [1, 64]},
            "compile": {"choices": [False, True]},
        },
        fixed={"seq_len": 64},
    )
    forecaster = a_forecaster(gpu="h200", predictor=UnsureOfCompiled(), budget_gib=6.9)
    found = survey(space, forecaster)
    assert (found.recommended.config.micro_batch_size, found.recommended.fit) == (
        64,
        Fit.UNCERTAIN,
    )
    assert found.alternative.fit is Fit.YES
    slow, fast = found.alternative.tokens_per_second_range, found.recommended.speed_uncertainty
    assert fast is not None
    assert (found.recommended.tokens_per_second or 0) / (1 + fast) > slow[1]


@pytest.mark.parametrize(
    ("dimensions", "fixed", "capacity"),
    [
        ({"lora_rank": [8, 16, 64], "target_modules": ["qv", "attention"]}, {}, (16, "attention")),
        ({"lora_rank": [8, 32, 64]}, {}, (32, "attention")),
        ({"lora_rank": [8, 64]}, {}, (8, "attention")),
        ({"target_modules": ["qv", "all-linear"]}, {}, (16, "qv")),
        ({"target_modules": ["qv", "all-linear"]}, {"lora_rank": 8}, (8, "all-linear")),
        ({"kernels": ["hf"]}, {"lora_rank": 64, "target_modules": "qv"}, (64, "qv")),
        (
            {"target_modules": ["qv", ["o_proj", "q_proj", "k_proj", "v_proj"]]},
            {},
            (16, ("k_proj", "o_proj", "q_proj", "v_proj")),
        ),
    ],
)
def test_what_is_recommended_is_of_the_class_nearest_to_the_recipes(
    dimensions: Mapping[str, list[Any]],
    fixed: Mapping[str, Any],
    capacity: tuple[int, str | tuple[str, ...]],
) -> None:
    space = a_space(
        dimensions={key: {"choices": values} for key, values in dimensions.items()}, fixed=fixed
    )
    found = survey(space, a_forecaster())
    config = found.recommended.config
    assert (config.lora_rank, config.target_modules) == capacity
    assert found.capacity == CapacityClass.of(config, found.model)


def a_plan_of_several_numerics(gpu: str) -> CardPlan:
    dimensions = {
        "micro_batch_size": {"choices": [4, 16]},
        "compute_dtype": {"choices": ["bf16", "fp8", "int8"]},
        "quantization": {"choices": ["nf4", "fp8", "int8"]},
    }
    forecaster = a_forecaster(gpu=gpu, budget_gib=30)
    found = survey(a_space(dimensions=dimensions), forecaster)
    return plan_card(found, work=AskedWork(), offers=[])


@pytest.mark.parametrize(
    ("gpu", "classes"), [("a100-40gb", {"16-bit", "int8"}), ("l40s", {"16-bit", "fp8", "int8"})]
)
def test_the_fastest_of_each_class_of_numerics_is_named_with_what_8_bits_bring(
    gpu: str, classes: set[str]
) -> None:
    plan = a_plan_of_several_numerics(gpu)
    found = card_document(plan)["fastest_by_numerics"]
    assert {one["numerics"] for one in found} == classes
    speeds = [one["tokens_per_second"] for one in found]
    assert speeds == sorted(speeds, reverse=True)
    wide = next(one for one in found if one["numerics"] == "16-bit")
    for one in found:
        ratio, (low, high) = one["times_16_bit"], one["times_16_bit_range"]
        assert ratio == pytest.approx(one["tokens_per_second"] / wide["tokens_per_second"])
        assert low < ratio < high or one is wide
    shown = " ".join(rendered(one_gpu(plan, is_detailed=False), is_terminal=False).split())
    for one in found:
        assert f"{one['numerics']} {one['times_16_bit']:.2f} (" in shown or one is wide
    assert f"times bf16 compute's {wide['tokens_per_second']:,.0f} tokens/s" in shown


def test_a_space_of_one_class_of_numerics_says_nothing_of_others() -> None:
    forecaster, work = a_forecaster(gpu="l4"), AskedWork()
    plan = plan_card(survey(a_space(), forecaster), work=work, offers=[])
    (one,) = card_document(plan)["fastest_by_numerics"]
    assert (one["numerics"], one["times_16_bit"]) == ("16-bit", 1.0)
    assert "numerics" not in rendered(one_gpu(plan, is_detailed=False), is_terminal=False)


def test_two_spellings_of_the_same_modules_are_one_capacity_class() -> None:
    spellings = ["attention", ["q_proj", "k_proj", "v_proj", "o_proj"]]
    space = a_space(dimensions={"target_modules": {"choices": spellings}})
    assert len(survey(space, a_forecaster()).fastest_by_class) == 1


def test_a_class_of_which_nothing_fits_is_not_recommended_from() -> None:
    space = a_space(dimensions={"lora_rank": {"choices": [8, 16]}}, fixed={"seq_len": 64})
    # The base's 5 GiB, four rows of 64 tokens at a MiB each, and the adapters of rank 8.
    forecaster = a_forecaster(
        predictor=ImaginedPredictor(uncertainty=0.0), budget_gib=5 + (256 + 8) / 1024
    )
    found = survey(space, forecaster)
    assert (found.found.fit, found.capacity) == (
        1,
        CapacityClass.of(TrialConfig(lora_rank=8), found.model),
    )


def test_a_survey_looks_at_a_part_of_the_space_one_by_one() -> None:
    predictor = ImaginedPredictor()
    space = a_space()
    found = survey(space, a_forecaster(predictor=predictor, budget_gib=15))
    assert found.found.looked_at == space.size() == 64
    assert 0 < len(predictor.shown) <= 24


class Picky(ImaginedPredictor):
    """Cannot predict what has these kernels."""

    def __init__(self, **refused: InputError) -> None:
        super().__init__()
        self._refused = refused

    def predict(self, config: TrialConfig) -> ImaginedMemory:
        if config.kernels in self._refused:
            raise self._refused[config.kernels]
        return super().predict(config)


def test_a_structure_that_cannot_be_predicted_is_counted_and_silences_no_other() -> None:
    dimensions = {
        "micro_batch_size": {"choices": [1, 2, 4]},
        "kernels": {"choices": ["hf", "fused-loss", "liger"]},
    }
    predictor = Picky(liger=Untraceable("data decides"), hf=InputError("no module 'w'"))
    found = survey(a_space(dimensions=dimensions), a_forecaster(predictor=predictor))
    assert found.found.unpredicted == {"data decides": 3}
    assert found.found.invalid == {"cannot-be-built": 3}
    assert (found.found.fit, found.found.looked_at) == (3, 9)
    assert found.recommended.config.kernels == "fused-loss"


def test_a_space_of_which_nothing_can_be_predicted_is_an_error() -> None:
    predictor = ImaginedPredictor(fault=Untraceable("data decides"))
    with pytest.raises(Untraceable, match="data decides"):
        survey(a_space(), a_forecaster(predictor=predictor))


@pytest.mark.parametrize("gpu", ["t4", "a10", "h200"])
def test_speed_never_falls_with_the_micro_batch(gpu: str) -> None:
    """What a survey relies on where it looks at the largest micro-batch of a row alone."""
    knobs = itertools.product((0.0, 1.0), ("hf", "liger"), ("nf4", "none"), (64, 512, 2048))
    for fraction, kernels, quantization, length in knobs:
        speeds = [
            predict_step(
                TrialConfig(
                    micro_batch_size=batch,
                    seq_len=length,
                    checkpoint_fraction=fraction,
                    kernels=kernels,
                    quantization=quantization,
                    compute_dtype="fp16",
                ),
                model=MISTRAL,
                gpu=find_gpu(gpu),
            ).tokens_per_second
            for batch in (1, 2, 3, 5, 8, 16, 64, 256)
        ]
        assert speeds == sorted(speeds)


def test_what_rules_forbid_is_counted_by_rule() -> None:
    dimensions = {
        "micro_batch_size": {"choices": [1, 2]},
        "compute_dtype": {"choices": ["bf16", "fp16"]},
        "seq_len": {"choices": [512, 100_000]},
    }
    counts = survey(a_space(dimensions=dimensions), a_forecaster(gpu="t4", budget_gib=30)).found
    assert counts.invalid == {"bf16-needs-ampere": 4, "seq-len-beyond-positions": 2}
    assert (counts.fit, counts.looked_at) == (2, 8)


def test_where_nothing_fits_surely_an_uncertain_one_is_recommended() -> None:
    space = a_space(dimensions={"lora_rank": {"choices": [8, 16]}})
    found = survey(space, a_forecaster(budget_gib=7.05))
    assert found.found.fit == 0
    assert found.recommended.fit is Fit.UNCERTAIN


def test_where_nothing_fits_the_smallest_need_is_told() -> None:
    plan = planned(a_space(), a_forecaster(budget_gib=2))
    assert (plan.shown, plan.table, plan.fits, plan.bills) == (None, None, False, ())
    assert plan.survey.found.least_bytes == 5 * GIB + (8 + 512) * 2**20


@pytest.mark.parametrize(
    "dimensions",
    [
        {"lora_dropout": {"low": 0.0, "high": 0.2}, "micro_batch_size": {"choices": [1, 2, 64]}},
        {
            "lora_rank": {"low": 1, "high": 5000},
            "seq_len": {"low": 64, "high": 4096},
            "micro_batch_size": {"choices": [1, 2, 64]},
        },
    ],
)
def test_a_space_without_end_is_judged_by_a_sample(
    dimensions: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "ROWS_SAMPLED", 150)
    space = a_space(dimensions=dimensions)
    found = survey(space, a_forecaster())
    again = survey(space, a_forecaster())
    assert found.is_sampled
    assert found.found.looked_at == 3 * candidates.ROWS_SAMPLED
    assert found.found == again.found
    assert found.recommended is not None


def test_a_fine_grid_of_micro_batches_is_thinned() -> None:
    space = a_space(dimensions={"micro_batch_size": {"low": 1, "high": 10_000}})
    found = survey(space, a_forecaster())
    assert found.is_sampled
    assert found.found.looked_at == candidates.BATCHES_MAX
    assert candidates.evenly_spaced([5, 1, 2, 3, 4, 9, 7], most=3) == [1, 4, 9]


def test_without_a_speed_the_most_tokens_are_recommended() -> None:
    found = survey(a_space(), a_forecaster(model=UNKNOWN, budget_gib=10))
    assert found.recommended.config.tokens_per_micro_batch == 8 * 512
    assert found.study_seconds() is None


def test_a_studys_length_follows_from_its_trials_and_its_time_budget() -> None:
    few = survey(a_space(trials=10), a_forecaster()).study_seconds()
    many = survey(a_space(trials=20), a_forecaster()).study_seconds()
    cut = survey(a_space(trials=20, time_budget_seconds=60), a_forecaster()).study_seconds()
    assert few[0] < few[1]
    start = surveys.START_SECONDS
    assert many[0] - start == pytest.approx(2 * (few[0] - start))
    assert cut == (60, 60)


BENCH = Path(__file__).parents[2] / "bench"
TOLD = re.compile(
    r"trial \d+ \(\d+ of 40\): (?P<verdict>fits|stopped as too slow|ran out of memory)"
    r"(?:.*?, (?P<speed>[\d,]+) tokens/s)?"
)


def test_a_studys_constants_are_those_of_the_committed_study() -> None:
    told = (BENCH / "results" / "a10_rank16_study.txt").read_text()
    verdicts = [match["verdict"] for match in TOLD.finditer(told)]
    assert len(verdicts) == 40
    assert verdicts.count("stopped as too slow") / 40 == surveys.STOPPED_SHARE
    seconds, steps, kinds = _trials_of(told)
    # The first two pay for the worker's start and for kernels that nobody used before.
    fits = [i for i, kind in enumerate(kinds) if kind == "fits" and i > 1]
    stopped = [i for i, kind in enumerate(kinds) if kind == "stopped as too slow"]
    fewest = StepBudget().warmup_min + StepBudget().measured_min
    least = StepBudget().warmup_min + surveys.STEPS_TO_STOP
    for some, count in ((fits, surveys.STEPS_OVER_FEWEST * fewest), (stopped, least)):
        expected = [surveys.TRIAL_SECONDS + count * steps[i] for i in some]
        assert sum(expected) == pytest.approx(sum(seconds[i] for i in some), rel=0.15)
    start = seconds[0] - surveys.TRIAL_SECONDS - surveys.STEPS_OVER_FEWEST * fewest * steps[0]
    assert start == pytest.approx(surveys.START_SECONDS, rel=0.15)


def _trials_of(told: str) -> tuple[list[float], list[float], list[str]]:
    """Return seconds, step seconds and verdict of each trial that was measured."""
    seconds, steps, kinds = [], [], []
    before: datetime | None = None
    for line in told.splitlines():
        match = TOLD.search(line)
        if match is None and "starts the worker" not in line:
            continue
        now = datetime.strptime(line.split()[0], "%H:%M:%S")
        if match is not None and match["speed"] is not None and before is not None:
            batch, length = re.search(r"micro-batch (\d+)", line), re.search(r"length (\d+)", line)
            tokens = (int(batch[1]) if batch else 8) * (int(length[1]) if length else 512)
            seconds.append((now - before).total_seconds())
            steps.append(tokens / float(match["speed"].replace(",", "")))
            kinds.append(match["verdict"])
        before = now
    return seconds, steps, kinds


def test_the_committed_studys_time_is_within_what_is_foretold() -> None:
    """On the GPU that ran it, from the speeds that are predicted for it, without tracing."""
    space = load_space(str(BENCH / "a10_rank16.yaml"))
    found = survey(space, a_forecaster(gpu="h200", budget_gib=21.48, predictor=Peaks()))
    told = (BENCH / "results" / "a10_rank16_study.txt").read_text()
    match = re.search(r"40 trials in (\d+) min (\d+) s", told)
    seconds = found.study_seconds()
    assert seconds[0] <= 60 * int(match[1]) + int(match[2]) <= seconds[1]
    assert seconds[1] < 2.5 * seconds[0]


class Peaks(ImaginedPredictor):
    """About what the space's configurations take: 3.9 GiB, and by token what is kept of a layer."""

    def predict(self, config: TrialConfig) -> Any:
        memory = super().predict(config)
        by_token = 0.3 + 2.8 * (1.0 - config.checkpoint_fraction) * (2 if config.upcast_fp32 else 1)
        kept = int(config.tokens_per_micro_batch * by_token * 2**20)
        weights = int(3.9 * GIB)
        return replace(
            memory,
            peak_allocated_bytes=weights + kept,
            breakdown={**memory.breakdown, "weights": weights, "adapters": 0, "activations": kept},
        )


def test_a_trial_times_two_micro_steps_however_large_the_effective_batch() -> None:
    dimensions = {"micro_batch_size": {"choices": [4]}}
    twice, often = (
        survey(a_space(dimensions=dimensions, fixed=fixed), a_forecaster()).study_seconds()
        for fixed in ({"effective_batch_size": 8}, {"effective_batch_size": 64})
    )
    assert twice == often


def test_a_study_has_no_more_trials_than_configurations_that_may_fit() -> None:
    space = a_space(dimensions={"micro_batch_size": {"choices": [1, 2, 64]}}, trials=40)
    assert survey(space, a_forecaster()).trials == 2


@pytest.mark.parametrize(
    ("gpu", "dtypes"),
    [("t4", ("fp16", "int8")), ("l4", ("bf16", "fp16", "fp8", "int8")), ("v100-16gb", ("fp16",))],
)
def test_a_gpus_own_space_is_valid_there(gpu: str, dtypes: tuple[str, ...]) -> None:
    space, kind = own_space(gpu, None)
    counts = survey(space, a_forecaster(gpu=gpu)).found
    assert (kind, space.gpu) == ("standard", gpu)
    assert space.values_of("compute_dtype") == dtypes
    assert set(counts.invalid) <= {"compile-breaks-on-liger", "eight-bit"}
    assert counts.fit > 0


def planned(space: SearchSpace, forecaster: Forecaster, **asked: Any) -> Any:
    return plan_card(
        survey(space, forecaster),
        work=AskedWork(**asked),
        offers=[an_offer(gpu=forecaster.gpu.name)],
    )


# Cost


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        ({}, 1000),
        ({"train_steps": 7}, 7),
        ({"samples": 100}, 13),
        ({"tokens": 5000}, 2),
        ({"dataset_samples": 80}, 10),
        ({"dataset_samples": 80, "epochs": 2.5}, 25),
    ],
)
def test_work_is_the_fewest_whole_steps(asked: Mapping[str, Any], steps: int) -> None:
    config = TrialConfig(micro_batch_size=4, effective_batch_size=8)
    assert AskedWork(**asked).workload(config).steps == steps


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"train_steps": 0}, "--work train-steps must be greater than 0"),
        ({"samples": -1}, "--work samples must be greater than 0"),
        ({"tokens": 10**400}, "--work tokens must be greater than 0 and at most"),
        ({"dataset_samples": 0}, "--work dataset-samples must be"),
        ({"dataset_samples": 10, "epochs": math.nan}, "--work epochs must be"),
        ({"train_steps": 1, "samples": 1}, "--work train-steps and --work samples both"),
        ({"epochs": 1.0}, "--work epochs needs tokens or dataset-samples"),
    ],
)
def test_work_that_cannot_be_is_refused(asked: Mapping[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        AskedWork(**asked)


def test_bills_come_cheapest_first_and_count_the_models_download() -> None:
    forecast = a_forecaster().expect(TrialConfig())
    offers = [an_offer(usd_per_hour=9, download_bytes_per_second=1e9), an_offer(usd_per_hour=1)]
    cheap, dear = bill_offers(forecast, work=AskedWork(), offers=offers)
    assert cheap.usd < dear.usd
    (download,) = (item for item in dear.items if item.name == "download")
    assert download.seconds == pytest.approx(2 * 7.248e9 / 1e9, rel=1e-3)


# Several GPUs

OFFERS = {"a10": (an_offer(),), "h100-80gb": (an_offer(gpu="h100-80gb", usd_per_hour=10.0),)}


def looked(forecaster: Forecaster, about: SearchSpace | TrialConfig) -> Forecast | None:
    if isinstance(about, TrialConfig):
        return forecaster.expect(about)
    return survey(about, forecaster).recommended


def compared(plans: Sequence[CardPlan], **asked: Any) -> CardComparison | None:
    return compare_cards(plans, work=AskedWork(**asked), offers=OFFERS, look=looked)


@pytest.mark.parametrize("asked", [{}, {"train_steps": 70}, {"samples": 10_000}, {"tokens": 10**7}])
@pytest.mark.parametrize("batches", [[1, 2, 4, 8, 12, 16, 32], [10, 24], [7, 36], [10, 40]])
def test_cards_are_compared_by_the_same_training(
    batches: list[int], asked: Mapping[str, int]
) -> None:
    """As many tokens in as many steps of one effective batch, by adapters of one class."""
    space = a_space(
        dimensions={
            "micro_batch_size": {"choices": batches},
            "lora_rank": {"choices": [8, 16]},
            "checkpoint_fraction": {"choices": [0.0, 1.0]},
        }
    )
    forecasters = [a_forecaster(), a_forecaster(gpu="h100-80gb")]
    plans = [planned(space, one) for one in forecasters]
    own = {plan.shown.config.micro_batch_size for plan in plans if plan.shown is not None}
    assert len(own) == 2
    comparison = compared(plans, **asked)
    works = {bill.workload for bill in comparison.bills.bills}
    assert {bill.offer.gpu for bill in comparison.bills.bills} == set(OFFERS)
    assert len({(work.steps, work.samples_per_step, work.tokens_per_sample) for work in works}) == 1
    assert {one.config.samples_per_step for one in comparison.chosen.values()} == {
        comparison.effective_batch_size
    }
    assert {one.config.lora_rank for one in comparison.chosen.values()} == {16}
    assert all(one.fit is Fit.YES for one in comparison.chosen.values())


def test_an_effective_batch_that_the_space_fixes_is_the_one_compared() -> None:
    space = a_space(
        dimensions={"micro_batch_size": {"choices": [1, 2, 4, 8, 16]}},
        fixed={"effective_batch_size": 64},
    )
    plans = [planned(space, a_forecaster(gpu=gpu)) for gpu in OFFERS]
    comparison = compared(plans, train_steps=10)
    assert (comparison.effective_batch_size, comparison.workload.steps) == (64, 10)
    document = comparison_document(plans, comparison)["comparison"]
    assert (document["effective_batch_size"], document["steps"]) == (64, 10)
    assert document["tokens"] == 10 * 64 * 512
    json.dumps(document, allow_nan=False)


def test_cards_on_which_nothing_fits_are_not_compared() -> None:
    plans = [planned(a_space(), a_forecaster(budget_gib=gib)) for gib in (1, 20)]
    assert compared(plans) is None
    assert compared(plans[:1]) is None


def test_cards_without_a_price_are_compared_by_their_speed() -> None:
    plans = [planned(a_space(), a_forecaster(gpu=gpu)) for gpu in OFFERS]
    comparison = compare_cards(plans, work=AskedWork(), offers={}, look=looked)
    assert (comparison.bills, comparison.fastest) == (None, "h100-80gb")
    document = comparison_document(plans, comparison)
    assert document["comparison"] is None
    assert document["speeds"]["fastest"] == "h100-80gb"


def test_cards_are_told_apart_by_speed_where_their_intervals_are() -> None:
    for gpus, tied in ((("a10", "h200"), ()), (("a10", "a10g"), None)):
        plans = [planned(a_space(), a_forecaster(gpu=gpu)) for gpu in gpus]
        comparison = compare_cards(plans, work=AskedWork(), offers=OFFERS, look=looked)
        others = tuple(gpu for gpu in gpus if gpu != comparison.fastest)
        assert comparison.perhaps_fastest == (others if tied is None else tied)


def test_one_configuration_is_compared_as_it_is() -> None:
    plans = [
        plan_card(a_forecaster(gpu=gpu).expect(TrialConfig()), work=AskedWork(), offers=OFFERS[gpu])
        for gpu in OFFERS
    ]
    comparison = compared(plans, train_steps=50)
    assert {bill.workload.samples for bill in comparison.bills.bills} == {200}
    document = comparison_document(plans, comparison)
    assert document["comparison"]["cheapest"]["gpu"] in OFFERS
    json.dumps(document, allow_nan=False)


# Documents

PARTS = {"weights", "adapters", "gradients", "optimizer", "activations", "loss"}


def test_a_forecasts_document_has_the_promised_keys() -> None:
    forecast = a_forecaster().expect(TrialConfig())
    every_bill = bill_offers(forecast, work=AskedWork(), offers=[an_offer()])
    document = forecast_document(forecast, bills=every_bill)
    assert document.keys() >= INTERFACE_KEYS
    assert set(document["breakdown"]) == PARTS
    assert sum(document["breakdown"].values()) == document["peak_allocated_bytes"]
    assert TrialConfig(**document["config"]) == forecast.config
    assert document["config"].keys() == TrialConfig.model_fields.keys()
    assert document["bottleneck"] in ("compute", "bandwidth", "launch")
    assert document["cost"]["usd_per_1000_steps"] > 0


@pytest.mark.parametrize("budget_gib", [1, 7.05, 20])
def test_a_plans_document_is_json(budget_gib: float) -> None:
    document = card_document(planned(a_space(), a_forecaster(budget_gib=budget_gib)))
    read = json.loads(json.dumps(document, allow_nan=False))
    counts = read["configurations"]
    assert counts["total"] == counts["looked_at"] == 64
    kinds = ("fit", "uncertain", "cannot_fit", "invalid")
    assert sum(counts[kind] for kind in kinds) == 64
    assert (read["recommended"] is None) == (budget_gib == 1)


# What a study has shown


def test_a_study_on_the_card_calibrates_speed_and_judges_memory() -> None:
    evidence = evidence_from(a_snapshot(*TRIALS), model=MISTRAL, gpu=find_gpu("a10"))
    forecast = a_forecaster(evidence=evidence).expect(TrialConfig(micro_batch_size=2))
    plain = a_forecaster().expect(TrialConfig(micro_batch_size=2))
    assert (forecast.speed_basis, plain.speed_basis) == ("calibrated", "predicted")
    assert forecast.step_seconds == pytest.approx(1.2 * (plain.step_seconds or 0), rel=0.03)
    assert evidence.memory_error == pytest.approx(0.1)


def test_what_was_measured_is_told_as_measured() -> None:
    evidence = evidence_from(a_snapshot(*TRIALS), model=MISTRAL, gpu=find_gpu("a10"))
    # Written differently, the same run.
    asked = TrialConfig(micro_batch_size=4, lora_alpha=32, effective_batch_size=4)
    forecast = a_forecaster(evidence=evidence).expect(asked)
    document = forecast_document(forecast, bills=())
    assert document["basis"]["speed"] == "measured"
    assert document["measured"]["trial"] == 2
    assert document["measured"]["peak_allocated_bytes"] == 10 * GIB
    assert document["step_seconds"] == document["measured"]["step_seconds"]


def test_a_study_on_another_card_does_not_calibrate_and_says_so() -> None:
    snapshot = a_snapshot(*TRIALS, emulated_on="NVIDIA H200")
    evidence = evidence_from(snapshot, model=MISTRAL, gpu=find_gpu("a10"))
    forecast = a_forecaster(evidence=evidence).expect(TRIALS[0].config)
    assert forecast.speed_basis == "predicted"
    assert "NVIDIA H200" in evidence.notes[0]
    on_host = evidence_from(snapshot, model=MISTRAL, gpu=find_gpu("h200"))
    assert on_host.calibration is not None


@pytest.mark.parametrize(("budget_gib", "verdict"), [(20, Fit.NO), (15, Fit.NO), (21, Fit.YES)])
def test_a_trial_that_ran_out_of_memory_overrules_the_prediction(
    budget_gib: float, verdict: Fit
) -> None:
    config = TrialConfig(micro_batch_size=8)
    record = a_record(0, config, outcome=OutOfMemory(stage="backward"))
    evidence = evidence_from(a_snapshot(record), model=MISTRAL, gpu=find_gpu("a10"))
    forecast = a_forecaster(budget_gib=budget_gib, evidence=evidence).expect(config)
    assert forecast.fit is verdict


def test_a_trial_that_fitted_overrules_the_prediction_under_as_large_a_budget() -> None:
    config = TrialConfig(micro_batch_size=64)
    evidence = evidence_from(a_snapshot(a_record(0, config)), model=MISTRAL, gpu=find_gpu("a10"))
    settled = [a_forecaster(budget_gib=gib, evidence=evidence) for gib in (19, 20)]
    assert [one.expect(config).fit for one in settled] == [Fit.NO, Fit.YES]


@pytest.mark.parametrize(
    ("snapshot", "model", "message"),
    [
        (a_snapshot(), UNKNOWN, "is about model 'mistral-7b-v0.3'"),
        (a_snapshot(gpu="cpu", device="cpu"), MISTRAL, "ran on a CPU"),
    ],
)
def test_a_study_of_something_else_is_refused(
    snapshot: StudySnapshot, model: ModelSpec, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        evidence_from(snapshot, model=model, gpu=find_gpu("a10"))
