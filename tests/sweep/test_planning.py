"""Behaviour of plans, on a memory predictor that is a formula and the real speed model."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.gpus import GIB, find_gpu
from search_spaces.models import ModelSpec
from search_spaces.prices import Offer
from search_spaces.space import SearchSpace
from storage.definition import StudySnapshot
from storage.records import OutOfMemory
from sweep.planning import survey as surveys
from sweep.planning.cost import AskedWork, bills
from sweep.planning.documents import card_document, comparison_document, forecast_document
from sweep.planning.evidence import NO_EVIDENCE, Evidence, evidence_from
from sweep.planning.forecast import Forecaster
from sweep.planning.plan import compare_cards, plan_configuration, plan_space, recipe_space
from sweep.planning.settling import boundary
from sweep.planning.survey import survey
from sweep.planning.table import shape_table
from sweep.predict.memory import Fit
from sweep.predict.speed import predict_step
from tests.sweep.imagined_memory import ImaginedPredictor
from tests.sweep.imagined_study import (
    INTERFACE_KEYS,
    MISTRAL,
    TRIALS,
    a_record,
    a_snapshot,
    a_space,
)

UNKNOWN = ModelSpec("mine", "directory", {**MISTRAL.config, "model_type": "mine"})


def a_forecaster(
    *,
    gpu: str = "a10",
    model: ModelSpec = MISTRAL,
    budget_gib: float | None = None,
    predictor: ImaginedPredictor | None = None,
    evidence: Evidence = NO_EVIDENCE,
) -> Forecaster:
    card = find_gpu(gpu)
    return Forecaster(
        model=model,
        gpu=card,
        budget_bytes=card.budget_bytes if budget_gib is None else int(budget_gib * GIB),
        memory=predictor or ImaginedPredictor(),
        evidence=evidence,
    )


def an_offer(**terms: Any) -> Offer:
    values = {
        "gpu": "a10",
        "provider": "Someone",
        "usd_per_hour": 3.6,
        "date": "2026-11-21",
        "source": "a test",
    }
    return Offer.model_validate(values | terms)


def every(space: SearchSpace) -> list[TrialConfig]:
    return [space.config(params) for params in space.combinations()]


# One configuration


def test_a_forecast_says_what_fits_and_how_fast() -> None:
    forecast = a_forecaster().forecast(TrialConfig(micro_batch_size=8))
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
    forecast = forecaster.forecast(TrialConfig(micro_batch_size=8))
    assert (forecast.fit, forecast.fits) == (fit, fits)


def test_what_a_rule_forbids_does_not_fit_and_costs_nothing() -> None:
    forecast = a_forecaster(gpu="t4", budget_gib=100).forecast(TrialConfig())
    assert forecast.broken is not None
    assert forecast.broken.rule == "bf16-needs-ampere"
    assert (forecast.fits, forecast.fit, forecast.step_seconds) == (False, Fit.NO, None)
    assert bills(forecast, work=AskedWork(), offers=[an_offer()], model=MISTRAL) == ()


def test_what_a_rule_forbids_may_be_unpredictable() -> None:
    predictor = ImaginedPredictor(fault=InputError("no such modules"))
    forecast = a_forecaster(gpu="t4", predictor=predictor).forecast(TrialConfig())
    assert forecast.memory is None
    assert forecast_document(forecast, bills=())["peak_allocated_bytes"] is None


def test_a_valid_configuration_that_cannot_be_predicted_is_an_error() -> None:
    predictor = ImaginedPredictor(fault=InputError("cannot be traced: mine.attention"))
    with pytest.raises(InputError, match=r"mine\.attention"):
        a_forecaster(predictor=predictor).forecast(TrialConfig())


def test_without_a_speed_there_is_no_cost_and_a_note_says_why() -> None:
    forecast = a_forecaster(model=UNKNOWN).forecast(TrialConfig())
    document = forecast_document(forecast, bills=())
    assert forecast.fits
    assert document["step_seconds"] is document["bottleneck"] is document["cost"] is None
    assert "not known" in document["notes"][0]


# Boundaries


@given(st.integers(0, 200), st.integers(0, 200), st.integers(-3, 210))
def test_a_boundary_is_found_wherever_the_search_begins(count: int, last: int, near: int) -> None:
    asked: list[int] = []

    def holds(number: int) -> bool:
        asked.append(number)
        return number <= last

    assert boundary(count, holds, near=near) == min(count, last)
    assert all(1 <= number <= count for number in asked)
    assert len(asked) <= 2 * math.log2(count + 2) + 3


def test_a_good_guess_costs_two_questions() -> None:
    asked: list[int] = []
    boundary(10_000, lambda n: asked.append(n) is None and n <= 77, near=77)
    assert asked == [77, 78]


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
            forecaster.fit(TrialConfig(micro_batch_size=batch, seq_len=length))
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


def test_a_table_where_nothing_fits_is_one_of_dashes() -> None:
    table = shape_table(a_forecaster(budget_gib=1), TrialConfig())
    assert all(cell.fit is Fit.NO for cell in table.cells.values())
    assert {largest.possible for largest in table.largest.values()} == {0}


# A space


@pytest.mark.parametrize("budget_gib", [1, 5.7, 7.3, 9.1, 12.25, 15, 21.5, 60])
def test_a_survey_counts_what_asking_of_each_configuration_counts(budget_gib: float) -> None:
    forecaster = a_forecaster(budget_gib=budget_gib)
    counts = survey(a_space(), forecaster).counts
    fits = [forecaster.fit(config) for config in every(a_space())]
    assert (counts.fit, counts.uncertain, counts.too_large) == tuple(
        fits.count(fit) for fit in (Fit.YES, Fit.UNCERTAIN, Fit.NO)
    )


def test_a_survey_recommends_the_fastest_that_surely_fits() -> None:
    forecaster = a_forecaster(budget_gib=15)
    found = survey(a_space(), forecaster)
    fitting = [c for c in every(a_space()) if forecaster.fit(c) is Fit.YES]
    fastest = max(fitting, key=lambda c: forecaster.forecast(c).tokens_per_second or 0)
    assert found.recommended is not None
    assert found.recommended.config == fastest


def test_a_survey_predicts_a_part_of_the_space_only() -> None:
    predictor = ImaginedPredictor()
    space = a_space()
    found = survey(space, a_forecaster(predictor=predictor, budget_gib=15))
    assert found.counts.looked_at == space.size() == 64
    assert len(predictor.asked) < 40


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
    counts = survey(a_space(dimensions=dimensions), a_forecaster(gpu="t4", budget_gib=30)).counts
    assert counts.invalid == {"bf16-needs-ampere": 4, "seq-len-beyond-positions": 2}
    assert (counts.fit, counts.looked_at) == (2, 8)


def test_where_nothing_fits_surely_an_uncertain_one_is_recommended() -> None:
    space = a_space(dimensions={"lora_rank": {"choices": [8, 16]}})
    found = survey(space, a_forecaster(budget_gib=7.05))
    assert found.counts.fit == 0
    assert found.recommended is not None
    assert found.recommended.fit is Fit.UNCERTAIN


def test_where_nothing_fits_the_smallest_need_is_told() -> None:
    plan = planned(a_space(), a_forecaster(budget_gib=2))
    assert (plan.shown, plan.table, plan.fits, plan.bills) == (None, None, False, ())
    assert plan.survey is not None
    assert plan.survey.least_bytes == 5 * GIB + (8 + 512) * 2**20


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
def test_a_space_without_end_is_judged_by_a_sample(dimensions: Mapping[str, Any]) -> None:
    space = a_space(dimensions=dimensions)
    found = survey(space, a_forecaster())
    again = survey(space, a_forecaster())
    assert found.is_sampled
    assert found.counts.looked_at == 3 * surveys.ROWS_SAMPLED
    assert found.counts == again.counts
    assert found.recommended is not None


def test_a_fine_grid_of_micro_batches_is_thinned() -> None:
    space = a_space(dimensions={"micro_batch_size": {"low": 1, "high": 10_000}})
    found = survey(space, a_forecaster())
    assert found.is_sampled
    assert found.counts.looked_at == surveys.BATCHES_MAX
    assert surveys.thinned([5, 1, 2, 3, 4, 9, 7], most=3) == [1, 4, 9]


def test_without_a_speed_the_most_tokens_are_recommended() -> None:
    found = survey(a_space(), a_forecaster(model=UNKNOWN, budget_gib=10))
    assert found.recommended is not None
    assert found.recommended.config.tokens_per_micro_batch == 8 * 512
    assert found.study_seconds() is None


def test_a_studys_length_follows_from_its_trials_and_its_time_budget() -> None:
    few = survey(a_space(trials=10), a_forecaster()).study_seconds()
    many = survey(a_space(trials=20), a_forecaster()).study_seconds()
    cut = survey(a_space(trials=20, time_budget_seconds=60), a_forecaster()).study_seconds()
    assert few is not None
    assert many is not None
    assert few[0] < few[1]
    start = surveys.START_SECONDS
    assert many[0] - start == pytest.approx(2 * (few[0] - start))
    assert cut == (60, 60)


def test_a_study_has_no_more_trials_than_configurations_that_may_fit() -> None:
    space = a_space(dimensions={"micro_batch_size": {"choices": [1, 2, 64]}}, trials=40)
    assert survey(space, a_forecaster()).trials == 2


@pytest.mark.parametrize(("gpu", "dtype"), [("t4", "fp16"), ("a10", "bf16")])
def test_a_card_alone_gives_a_space_of_recipe_knobs_that_is_valid_there(
    gpu: str, dtype: str
) -> None:
    space = recipe_space(find_gpu(gpu), MISTRAL)
    counts = survey(space, a_forecaster(gpu=gpu)).counts
    assert space.fixed["compute_dtype"] == dtype
    assert counts.invalid == {}
    assert counts.fit > 0


def test_a_short_model_gets_lengths_it_has_positions_for() -> None:
    short = replace(MISTRAL, config={**MISTRAL.config, "max_position_embeddings": 256})
    assert recipe_space(find_gpu("a10"), short).dimensions["seq_len"].values() == (256,)


def planned(space: SearchSpace, forecaster: Forecaster, **asked: Any) -> Any:
    return plan_space(
        survey(space, forecaster),
        forecaster=forecaster,
        work=AskedWork(**asked),
        offers=[an_offer(gpu=forecaster.gpu.name)],
    )


# Cost


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        ({}, 1000),
        ({"steps": 7}, 7),
        ({"samples": 100}, 13),
        ({"tokens": 5000}, 2),
        ({"dataset_samples": 80}, 10),
        ({"dataset_samples": 80, "epochs": 2.5}, 25),
    ],
)
def test_work_is_the_fewest_whole_steps(asked: Mapping[str, Any], steps: int) -> None:
    config = TrialConfig(micro_batch_size=4, effective_batch_size=8)
    assert AskedWork(**asked).workload(config, model=MISTRAL).steps == steps


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"steps": 0}, "--steps must be greater than 0"),
        ({"samples": -1}, "--samples must be greater than 0"),
        ({"tokens": 10**400}, "--tokens must be greater than 0 and at most"),
        ({"dataset_samples": 0}, "--dataset-samples must be"),
        ({"dataset_samples": 10, "epochs": math.nan}, "--epochs must be"),
        ({"steps": 1, "samples": 1}, "--steps and --samples both"),
        ({"epochs": 1.0}, "--epochs needs --dataset-samples"),
    ],
)
def test_work_that_cannot_be_is_refused(asked: Mapping[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        AskedWork(**asked)


def test_bills_come_cheapest_first_and_count_the_models_download() -> None:
    forecast = a_forecaster().forecast(TrialConfig())
    offers = [an_offer(usd_per_hour=9, download_bytes_per_second=1e9), an_offer(usd_per_hour=1)]
    cheap, dear = bills(forecast, work=AskedWork(), offers=offers, model=MISTRAL)
    assert cheap.usd < dear.usd
    assert dear.item("download").seconds == pytest.approx(2 * 7.248e9 / 1e9, rel=1e-3)


# Several cards

OFFERS = {"a10": (an_offer(),), "h100-80gb": (an_offer(gpu="h100-80gb", usd_per_hour=10.0),)}


def test_cards_are_compared_by_the_same_work() -> None:
    forecasters = [a_forecaster(), a_forecaster(gpu="h100-80gb")]
    plans = [planned(a_space(), one) for one in forecasters]
    comparison = compare_cards(plans, work=AskedWork(), offers=OFFERS)
    assert comparison is not None
    assert {bill.offer.gpu for bill in comparison.bills} == {"a10", "h100-80gb"}
    small, large = (bill.workload for bill in sorted(comparison.bills, key=lambda b: b.offer.gpu))
    assert small.tokens_per_sample == large.tokens_per_sample
    assert small.samples == pytest.approx(large.samples, rel=0.01)


def test_cards_on_which_nothing_fits_are_not_compared() -> None:
    plans = [planned(a_space(), a_forecaster(budget_gib=gib)) for gib in (1, 20)]
    assert compare_cards(plans, work=AskedWork(), offers=OFFERS) is None
    assert compare_cards(plans[:1], work=AskedWork(), offers=OFFERS) is None


def test_one_configuration_is_compared_as_it_is() -> None:
    plans = [
        plan_configuration(
            TrialConfig(), forecaster=a_forecaster(gpu=gpu), work=AskedWork(), offers=OFFERS[gpu]
        )
        for gpu in OFFERS
    ]
    comparison = compare_cards(plans, work=AskedWork(steps=50), offers=OFFERS)
    assert comparison is not None
    assert {bill.workload.samples for bill in comparison.bills} == {200}
    document = comparison_document(plans, comparison)
    assert document["comparison"]["cheapest"]["gpu"] in OFFERS
    json.dumps(document, allow_nan=False)


# Documents

PARTS = {"weights", "adapters", "gradients", "optimizer", "activations", "loss"}


def test_a_forecasts_document_has_the_promised_keys() -> None:
    forecast = a_forecaster().forecast(TrialConfig())
    every_bill = bills(forecast, work=AskedWork(), offers=[an_offer()], model=MISTRAL)
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
    forecast = a_forecaster(evidence=evidence).forecast(TrialConfig(micro_batch_size=2))
    plain = a_forecaster().forecast(TrialConfig(micro_batch_size=2))
    assert (forecast.speed_basis, plain.speed_basis) == ("calibrated", "predicted")
    assert forecast.step_seconds == pytest.approx(1.2 * (plain.step_seconds or 0), rel=0.03)
    assert evidence.memory_error == pytest.approx(0.1)


def test_what_was_measured_is_told_as_measured() -> None:
    evidence = evidence_from(a_snapshot(*TRIALS), model=MISTRAL, gpu=find_gpu("a10"))
    # Written differently, the same run.
    asked = TrialConfig(micro_batch_size=4, lora_alpha=32, effective_batch_size=4)
    forecast = a_forecaster(evidence=evidence).forecast(asked)
    document = forecast_document(forecast, bills=())
    assert document["basis"]["speed"] == "measured"
    assert document["measured"]["trial"] == 2
    assert document["measured"]["peak_allocated_bytes"] == 10 * GIB
    assert document["step_seconds"] == document["measured"]["step_seconds"]


def test_a_study_on_another_card_does_not_calibrate_and_says_so() -> None:
    snapshot = a_snapshot(*TRIALS, emulated_on="NVIDIA H200")
    evidence = evidence_from(snapshot, model=MISTRAL, gpu=find_gpu("a10"))
    forecast = a_forecaster(evidence=evidence).forecast(TRIALS[0].config)
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
    forecast = a_forecaster(budget_gib=budget_gib, evidence=evidence).forecast(config)
    assert forecast.fit is verdict


def test_a_trial_that_fitted_overrules_the_prediction_under_as_large_a_budget() -> None:
    config = TrialConfig(micro_batch_size=64)
    evidence = evidence_from(a_snapshot(a_record(0, config)), model=MISTRAL, gpu=find_gpu("a10"))
    settled = [a_forecaster(budget_gib=gib, evidence=evidence) for gib in (19, 20)]
    assert [one.fit(config) for one in settled] == [Fit.NO, Fit.YES]
    assert [one.is_hopeless(config) for one in settled] == [True, False]


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
