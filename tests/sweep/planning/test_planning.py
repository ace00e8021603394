"""Behaviour of plans, on a memory predictor that is a formula and the real speed model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.costs import AskedWork
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.gpus import GIB, find_gpu
from qlora_sweep.search_spaces.linears import CapacityClass
from qlora_sweep.search_spaces.loading import load_space
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.preference import TIE
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage.records import OutOfMemory, PredictionRecord
from qlora_sweep.sweep.planning import survey as surveys
from qlora_sweep.sweep.planning.documents import (
    comparison_document,
    forecast_document,
    gpu_document,
)
from qlora_sweep.sweep.planning.evidence import evidence_from
from qlora_sweep.sweep.planning.plan import (
    GpuPlan,
    PlanComparison,
    bill_offers,
    compare_gpus,
    plan_gpu,
    shape_table,
)
from qlora_sweep.sweep.planning.survey import survey
from qlora_sweep.sweep.predict.forecast import Evidence, Forecast, Forecaster
from qlora_sweep.sweep.predict.memory.predictor import Fit
from qlora_sweep.sweep.predict.memory.profiles import Untraceable
from tests.storage.builders import changed
from tests.sweep.imagined_memory import ImaginedPredictor
from tests.sweep.imagined_study import (
    MISTRAL,
    TRIALS,
    a_record,
    a_snapshot,
    a_space,
)
from tests.sweep.planning.imagined import Picky, a_forecaster, an_offer
from tests.sweep.planning.test_planning_on_texts import shapes

UNKNOWN = ModelSpec("mine", "directory", {**MISTRAL.config, "model_type": "mine"})
A10 = find_gpu("a10")


def choices(**dimensions: Any) -> dict[str, Any]:
    return {"dimensions": dimensions}


def planned(space: SearchSpace, forecaster: Forecaster) -> GpuPlan:
    offers = [an_offer(gpu=forecaster.gpu.name)]
    return plan_gpu(survey(space, forecaster), work=AskedWork(), offers=offers)


# One configuration


@pytest.mark.parametrize(
    ("budget_gib", "fit", "fits"),
    [
        (7.0, Fit.NO, False),
        (8.95, Fit.UNCERTAIN, False),
        (9.1, Fit.UNCERTAIN, True),
        (9.3, Fit.YES, True),
    ],
)
def test_an_uncertain_fit_is_given_a_best_guess(budget_gib: float, fit: Fit, fits: bool) -> None:
    # 5 GiB, 16 MiB of adapters and 4096 tokens at a MiB each.
    forecast = a_forecaster(budget_gib=budget_gib).expect(TrialConfig(micro_batch_size=8))
    assert (forecast.fit, forecast.fits) == (fit, fits)


# The table


def test_the_table_has_every_size_and_the_configurations_own() -> None:
    forecaster = a_forecaster()
    table = shape_table(forecaster, TrialConfig(micro_batch_size=3, seq_len=700))
    assert table.lengths == (512, 700, 1024, 2048, 4096)
    # It ends with the first micro-batch that fits nowhere.
    assert table.batches == (1, 2, 3, 4, 8, 16, 32, 64)
    assert [table.cells[batch, 512].fit is Fit.NO for batch in (32, 64)] == [False, True]
    assert len(table.cells) == len(table.lengths) * len(table.batches)
    for length, largest in table.largest.items():
        sizes = [TrialConfig(micro_batch_size=batch, seq_len=length) for batch in range(1, 64)]
        fits = [forecaster.expect(config).fit for config in sizes]
        assert largest.sure == fits.count(Fit.YES)
        assert largest.possible == fits.count(Fit.YES) + fits.count(Fit.UNCERTAIN)


@pytest.mark.parametrize(
    ("gpus", "effective", "batches", "largest"),
    [(1, 24, (1, 2, 4, 6, 8), 24), (2, 12, (1, 2, 6), 6)],
)
def test_the_tables_micro_batches_go_into_the_effective_batch(
    gpus: int, effective: int, batches: tuple[int, ...], largest: int
) -> None:
    base = TrialConfig(micro_batch_size=6, data_parallel=gpus, effective_batch_size=effective)
    table = shape_table(a_forecaster(gpu="h200"), base)
    assert (table.batches, table.largest[512].sure) == (batches, largest)


def test_lengths_beyond_the_models_positions_are_not_in_the_table() -> None:
    short = replace(MISTRAL, config={**MISTRAL.config, "max_position_embeddings": 1024})
    assert shape_table(a_forecaster(model=short), TrialConfig()).lengths == (512, 1024)


def test_a_length_that_cannot_be_traced_leaves_the_others_in_the_table() -> None:
    table = shape_table(a_forecaster(predictor=Picky(length=2048)), TrialConfig())
    assert (table.cells[1, 512].fits, table.cells[1, 2048].fits) == (True, None)
    assert table.largest[512].sure > 0
    assert table.largest[2048].possible == 0


# A space


SPACE = a_space(
    **choices(
        micro_batch_size=[1, 4, 8, 16],
        seq_len=[512, 2048],
        lora_rank=[16, 64],
        checkpoint_fraction=[0.0, 1.0],
        kernels=["hf", "liger"],
    )
)


ON_DATASET = a_space(
    **choices(
        micro_batch_size=[1, 2, 4, 8, 16, 32],
        seq_len=[128, 512],
        packing=["none", "grouped", "packed"],
        kernels=["hf", "liger"],
        checkpoint_fraction=[0.0, 1.0],
    )
)
"""Where larger batches pad more, and may be slower."""
ROWS = np.random.default_rng(0).lognormal(np.log(200), 0.8, 100).astype(np.int64) + 2


@pytest.mark.parametrize(
    ("space", "known"),
    [
        *((SPACE, {"budget_gib": gib}) for gib in (1, 7.05, 9.1, 13.25, 60)),
        (ON_DATASET, {"shapes": shapes(ROWS)}),
    ],
)
def test_a_survey_finds_what_asking_about_each_configuration_finds(
    space: SearchSpace, known: dict[str, Any]
) -> None:
    """The counts, the fastest that surely fits, and the best of each size."""
    forecaster = a_forecaster(**known)
    asked = [forecaster.expect(space.config(params)) for params in space.combinations()]
    found = survey(space, forecaster)
    fits = [forecast.fit for forecast in asked]
    none = found.found.too_large + sum(found.found.invalid.values())
    counts = (found.found.fit, found.found.uncertain, none)
    assert counts == tuple(fits.count(fit) for fit in (Fit.YES, Fit.UNCERTAIN, Fit.NO))
    assert found.found.looked_at == len(asked)
    fitting = [forecast for forecast in asked if forecast.fit is Fit.YES]
    if fitting:
        assert found.recommended in fitting
        fastest = max(forecast.tokens_per_second for forecast in fitting)
        assert found.recommended.tokens_per_second * (1 + TIE) >= fastest
    if found.table is None:
        assert set(fits) == {Fit.NO}
        return
    order = (Fit.YES, Fit.UNCERTAIN, Fit.NO)
    for size, cell in found.table.cells.items():
        alike = [f for f in asked if (f.config.micro_batch_size, f.config.seq_len) == size]
        assert cell.fit is min((f.fit for f in alike), key=order.index)
        if cell.fit is not Fit.NO:
            best = max(f.tokens_per_second for f in alike if f.fit is cell.fit)
            assert cell.tokens_per_second == pytest.approx(best)


def test_a_search_misses_no_length_that_something_fits_at() -> None:
    ranges = {
        "lora_rank": {"low": 1, "high": 5000, "step": 100},
        "seq_len": {"low": 64, "high": 4096, "step": 1008},
        "checkpoint_fraction": {"low": 0.0, "high": 1.0},
    }
    batches = choices(micro_batch_size=[1, 2, 64])["dimensions"]
    # At 4,096 only hardly any kept activations fit.
    table = survey(a_space(dimensions=batches | ranges), a_forecaster(budget_gib=9.3)).table
    assert table.lengths[-1] == 4096
    assert table.cells[1, 4096].fit is Fit.YES


# What is recommended


class UnsureOfCompiled(ImaginedPredictor):
    """Compiled layers keep half as much, and their peak is known within 10 % only."""

    def predict(self, config: TrialConfig) -> Any:
        memory = super().predict(changed(config, compile=False))
        if not config.compile:
            return memory
        self.asked.append(config)
        kept = memory.breakdown["activations"] // 2
        less = {**memory.breakdown, "activations": kept}
        peak = memory.peak_allocated_bytes - kept
        return replace(memory, peak_allocated_bytes=peak, breakdown=less, uncertainty=0.1)


def test_what_surely_fits_is_recommended_however_unsure_its_peak() -> None:
    space = a_space(**choices(micro_batch_size=[1, 2, 4, 8], compile=[False, True]))
    forecaster = a_forecaster(predictor=UnsureOfCompiled(), budget_gib=21)
    found = survey(space, forecaster)
    compiled = forecaster.expect(TrialConfig(micro_batch_size=8, compile=True))
    assert compiled.fit is Fit.YES
    assert found.recommended.config.compile
    assert found.recommended.tokens_per_second * (1 + TIE) >= compiled.tokens_per_second


def test_what_may_not_fit_is_named_beside_what_surely_does_however_fast_it_is() -> None:
    # Plain, one row of many tokens is all that fits; compiled, some rows perhaps do.
    dimensions = choices(micro_batch_size=[1, 64], compile=[False, True])
    forecaster = a_forecaster(gpu="h200", predictor=UnsureOfCompiled(), budget_gib=6.9)
    found = survey(a_space(**dimensions, fixed={"seq_len": 64}), forecaster)
    sure, riskier = found.recommended, found.alternative
    assert (sure.config.micro_batch_size, sure.fit, riskier.fit) == (1, Fit.YES, Fit.UNCERTAIN)
    assert riskier.speed_estimate.low > sure.speed_estimate.high
    document = gpu_document(planned(a_space(**dimensions, fixed={"seq_len": 64}), forecaster))
    assert document["alternative"]["config"]["micro_batch_size"] == 64


@pytest.mark.parametrize(
    ("dimensions", "fixed", "capacity"),
    [
        ({"lora_rank": [8, 16, 64], "target_modules": ["qv", "attention"]}, {}, (16, "attention")),
        ({"lora_rank": [8, 32, 64]}, {}, (32, "attention")),
        ({"target_modules": ["qv", "all-linear"]}, {"lora_rank": 8}, (8, "all-linear")),
    ],
)
def test_what_is_recommended_is_of_the_class_nearest_to_the_recipes(
    dimensions: Mapping[str, list[Any]], fixed: Mapping[str, Any], capacity: tuple[int, Any]
) -> None:
    found = survey(a_space(**choices(**dimensions), fixed=fixed), a_forecaster())
    config = found.recommended.config
    assert (config.lora_rank, config.target_modules) == capacity
    assert found.capacity == CapacityClass.of(config, found.model)


def test_capacity_classes_are_of_modules_and_of_what_fits() -> None:
    spellings = ["attention", ["q_proj", "k_proj", "v_proj", "o_proj"]]
    both = a_space(**choices(target_modules=spellings))
    assert len(survey(both, a_forecaster()).fastest_by_class) == 1
    space = a_space(**choices(lora_rank=[8, 16]), fixed={"seq_len": 64})
    # The base's 5 GiB, four rows of 64 tokens at a MiB each, and the adapters of rank 8.
    exact, room = ImaginedPredictor(uncertainty=0.0), 5 + (256 + 8) / 1024
    found = survey(space, a_forecaster(predictor=exact, budget_gib=room))
    eight = CapacityClass.of(TrialConfig(lora_rank=8), found.model)
    assert (found.found.fit, found.capacity) == (1, eight)


@pytest.mark.parametrize(
    ("gpu", "classes", "ties"),
    [("a100-40gb", {"16-bit", "int8"}, True), ("h200", {"16-bit", "fp8", "int8"}, False)],
)
def test_the_fastest_of_each_class_of_numerics_is_named(
    gpu: str, classes: set[str], ties: bool
) -> None:
    dtypes = {"compute_dtype": ["bf16", "fp8", "int8"], "quantization": ["nf4", "fp8", "int8"]}
    space = a_space(**choices(micro_batch_size=[4, 16], **dtypes))
    document = gpu_document(planned(space, a_forecaster(gpu=gpu, budget_gib=30)))
    found = document["fastest_by_numerics"]
    assert {one["numerics"] for one in found} == classes
    assert bool(found[0]["tied"]) == ties
    wide = next(one for one in found if one["numerics"] == "16-bit")
    for one in found:
        low, high = one["times_16_bit_range"]
        ratio = one["tokens_per_second"] / wide["tokens_per_second"]
        assert one["times_16_bit"] == pytest.approx(ratio)
        assert ("16-bit" in one["tied"]) == (low <= 1.0 <= high and one is not wide)


def test_a_structure_that_cannot_be_predicted_is_counted_and_silences_no_other() -> None:
    dimensions = choices(micro_batch_size=[1, 2, 4], kernels=["hf", "fused-loss", "liger"])
    untraceable = Untraceable("memory is not predicted: module 'w': Expected mat_a.dtype")
    predictor = Picky(liger=untraceable, hf=InputError("no module 'w'"))
    found = survey(a_space(**dimensions), a_forecaster(predictor=predictor))
    ((reason, count),) = found.found.unpredicted.items()
    assert count == 3
    assert "module 'w'" in reason
    # What torch says of its own is nothing to a person.
    assert "mat_a" not in reason
    assert found.found.invalid == {"cannot-be-built": 3}
    assert (found.found.fit, found.found.looked_at) == (3, 9)
    assert found.recommended.config.kernels == "fused-loss"


def test_where_nothing_can_be_predicted_that_is_an_error() -> None:
    nothing = ImaginedPredictor(fault=Untraceable("data decides"))
    with pytest.raises(Untraceable, match="data decides"):
        survey(a_space(), a_forecaster(predictor=nothing))


def test_what_rules_forbid_is_counted_by_rule() -> None:
    dimensions = choices(
        micro_batch_size=[1, 2], compute_dtype=["bf16", "fp16"], seq_len=[512, 100_000]
    )
    found = survey(a_space(**dimensions), a_forecaster(gpu="t4", budget_gib=30))
    counts, table = found.found, found.table
    assert counts.invalid == {"bf16-needs-ampere": 4, "seq-len-beyond-positions": 2}
    assert (counts.fit, counts.looked_at) == (2, 8)
    # A size that they forbid is in the table.
    assert table.cells[1, 100_000].violation is not None
    assert (table.cells[1, 100_000].fit, table.largest[100_000].possible) == (Fit.NO, 0)


def test_where_nothing_surely_fits_the_next_best_is_told() -> None:
    found = survey(a_space(**choices(lora_rank=[8, 16])), a_forecaster(budget_gib=7.05))
    assert (found.found.fit, found.recommended.fit) == (0, Fit.UNCERTAIN)
    plan = planned(a_space(), a_forecaster(budget_gib=2))
    assert (plan.shown, plan.table, plan.fits, plan.bills) == (None, None, False, ())
    assert plan.survey.found.least_bytes == 5 * GIB + (8 + 512) * 2**20
    # Without a speed the one of the most tokens is.
    unknown = survey(a_space(), a_forecaster(model=UNKNOWN, budget_gib=10))
    assert unknown.recommended.config.tokens_per_micro_batch == 8 * 512
    assert unknown.study_seconds() is None


def test_a_space_without_end_is_looked_over_at_some_of_its_values() -> None:
    batches = choices(micro_batch_size=[1, 2, 64])["dimensions"]
    space = a_space(dimensions=batches | {"lora_dropout": {"low": 0.0, "high": 0.2}})
    found, again = (survey(space, a_forecaster()) for _ in range(2))
    assert not found.found.is_whole
    assert found.found == again.found
    assert found.recommended.config.lora_dropout == 0.0
    fine = a_space(dimensions={"micro_batch_size": {"low": 1, "high": 10_000}})
    forecaster = a_forecaster()
    largest = survey(fine, forecaster).found.largest[512]
    assert forecaster.expect(TrialConfig(micro_batch_size=largest.sure)).fit is Fit.YES
    assert forecaster.expect(TrialConfig(micro_batch_size=largest.sure + 1)).fit is not Fit.YES


def test_a_studys_length_follows_from_its_trials_and_its_time_budget() -> None:
    def seconds(**asked: Any) -> tuple[float, float]:
        return survey(a_space(**asked), a_forecaster()).study_seconds()

    few = seconds(trials=10)
    many = seconds(trials=20)
    assert few[0] < few[1]
    start = surveys.START_SECONDS
    assert many[0] - start == pytest.approx(2 * (few[0] - start))
    assert seconds(time_budget_seconds=60) == (60, 60)
    # No more trials than what may fit, each of two micro-steps however large the batch.
    space = a_space(**choices(micro_batch_size=[1, 2, 64]), trials=40)
    assert survey(space, a_forecaster()).trials == 2
    one = choices(micro_batch_size=[4])
    twice = seconds(**one, fixed={"effective_batch_size": 8})
    assert twice == seconds(**one, fixed={"effective_batch_size": 64})


@pytest.mark.parametrize("gpus", [1, 3])
def test_a_studys_length_is_that_of_steps_on_all_of_a_trials_gpus(gpus: int) -> None:
    fixed = {"data_parallel": gpus, "effective_batch_size": 24 * gpus}
    looked = survey(a_space(**choices(micro_batch_size=[4]), fixed=fixed), a_forecaster())
    timed = TrialConfig(micro_batch_size=4, data_parallel=gpus, effective_batch_size=8 * gpus)
    assert looked.found.step_seconds == pytest.approx(a_forecaster().expect(timed).step_seconds)


class Peaks(ImaginedPredictor):
    """About what the space's configurations take: 3.9 GiB, and by token what is kept of a layer."""

    def predict(self, config: TrialConfig) -> Any:
        memory = super().predict(config)
        by_token = 0.3 + 2.8 * (1.0 - config.checkpoint_fraction) * (2 if config.upcast_fp32 else 1)
        kept = int(config.tokens_per_micro_batch * by_token * 2**20)
        parts = {"weights": int(3.9 * GIB), "adapters": 0, "activations": kept}
        whole = memory.breakdown | parts
        return replace(memory, peak_allocated_bytes=sum(whole.values()), breakdown=whole)


def test_the_committed_studys_time_is_within_what_is_foretold() -> None:
    """On the GPU that ran it, from the speeds that are predicted for it, without tracing."""
    bench = Path(__file__).parents[2] / "bench"
    told = (bench / "results" / "a10_rank16_study.txt").read_text()
    minutes, rest = map(int, re.search(r"40 trials in (\d+) min (\d+) s", told).groups())
    assert told.count("of 40): stopped as too slow") / 40 == surveys.STOPPED_SHARE
    forecaster = a_forecaster(gpu="h200", budget_gib=21.48, predictor=Peaks())
    seconds = survey(load_space(str(bench / "a10_rank16.yaml")), forecaster).study_seconds()
    assert seconds[0] <= 60 * minutes + rest <= seconds[1] < 2.5 * seconds[0]


# Cost


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


def compared(plans: Sequence[GpuPlan], offers: Any = OFFERS, **asked: Any) -> PlanComparison | None:
    return compare_gpus(plans, work=AskedWork(**asked), offers=offers, look=looked)


def on(space: SearchSpace, *gpus: str) -> list[GpuPlan]:
    return [planned(space, a_forecaster(gpu=gpu)) for gpu in gpus or OFFERS]


@pytest.mark.parametrize(
    ("batches", "fixed", "asked"),
    [
        ([1, 2, 4, 8, 12, 16, 32], {}, {}),
        ([10, 24], {}, {"train_steps": 70}),
        ([10, 40], {}, {"tokens": 10**7}),
        ([1, 2, 4, 8, 16], {"effective_batch_size": 64}, {"train_steps": 10}),
    ],
)
def test_gpus_are_compared_alike(
    batches: list[int], fixed: dict[str, int], asked: Mapping[str, int]
) -> None:
    """As many tokens in as many steps of one effective batch, by adapters of one class."""
    sizes = {"micro_batch_size": batches, "checkpoint_fraction": [0.0, 1.0]}
    plans = on(a_space(**choices(**sizes, lora_rank=[8, 16]), fixed=fixed))
    assert fixed or len({plan.shown.config.micro_batch_size for plan in plans}) == 2
    comparison = compared(plans, **asked)
    works = {bill.workload for bill in comparison.bills.bills}
    assert {bill.offer.gpu for bill in comparison.bills.bills} == set(OFFERS)
    assert len({(work.steps, work.samples_per_step, work.tokens_per_sample) for work in works}) == 1
    chosen = comparison.chosen.values()
    effective = {one.config.samples_per_step for one in chosen}
    assert effective == {fixed.get("effective_batch_size", comparison.effective_batch_size)}
    assert {(one.config.lora_rank, one.fit) for one in chosen} == {(16, Fit.YES)}


def test_gpus_without_a_price_are_compared_by_their_speed() -> None:
    plans = on(a_space())
    comparison = compared(plans, {})
    assert (comparison.bills, comparison.perhaps_best) == (None, ("h100-80gb",))
    document = comparison_document(plans, comparison)
    assert document["comparison"] is None
    assert document["speeds"]["fastest"] == "h100-80gb"
    plans = on(a_space(), "a10", "a10g")
    document = comparison_document(plans, compared(plans, {}))
    assert document["speeds"]["fastest"] is None
    assert set(document["speeds"]["perhaps_fastest"]) == {"a10", "a10g"}
    first, *others = document["speeds"]["perhaps_fastest"]
    known = {"gpu": first, "chosen_by": "tokens_per_second", "tied": others}
    assert document["recommended"] == known


# Documents


# What a study has shown


def shown_by(*records: Any, **target: Any) -> Evidence:
    return evidence_from(a_snapshot(*records, **target), model=MISTRAL, gpu=A10)


def test_a_study_on_the_gpu_calibrates_speed_and_judges_memory() -> None:
    evidence, config = shown_by(*TRIALS), TrialConfig(micro_batch_size=2)
    forecast, plain = a_forecaster(evidence=evidence).expect(config), a_forecaster().expect(config)
    assert (forecast.speed_basis, plain.speed_basis) == ("calibrated", "predicted")
    assert forecast.step_seconds == pytest.approx(1.2 * plain.step_seconds, rel=0.03)
    assert evidence.memory_error == pytest.approx(0.1)
    # What was measured is told as measured. Written differently, the same run.
    asked = TrialConfig(micro_batch_size=4, lora_alpha=32, effective_batch_size=4)
    document = forecast_document(a_forecaster(evidence=evidence).expect(asked), bills=())
    assert document["basis"]["speed"] == "measured"
    assert document["measured"]["trial"] == 2
    assert document["measured"]["peak_allocated_bytes"] == 10 * GIB
    assert document["step_seconds"] == document["measured"]["step_seconds"]


@pytest.mark.parametrize(("share", "fit"), [(1.0, Fit.NO), (0.95, Fit.UNCERTAIN)])
def test_a_plan_is_no_surer_than_the_studys_trials_allow(share: float, fit: Fit) -> None:
    measured = a_record(0, TrialConfig(micro_batch_size=4))
    peak = int(measured.measurement.peak_allocated_bytes / share)
    predicted = PredictionRecord(peak_allocated_bytes=peak, peak_reserved_bytes=peak)
    evidence = shown_by(changed(measured, prediction=predicted))
    assert a_forecaster(evidence=evidence).expect(TrialConfig(micro_batch_size=34)).fit is fit


def test_a_study_on_another_gpu_does_not_calibrate_and_says_so() -> None:
    evidence = shown_by(*TRIALS, emulated_on="NVIDIA H200")
    assert a_forecaster(evidence=evidence).expect(TRIALS[0].config).speed_basis == "predicted"
    assert "NVIDIA H200" in evidence.notes[0]
    snapshot = a_snapshot(*TRIALS, emulated_on="NVIDIA H200")
    on_host = evidence_from(snapshot, model=MISTRAL, gpu=find_gpu("h200"))
    assert on_host.calibration is not None


@pytest.mark.parametrize(
    ("outcome", "batch", "budget_gib", "fit"),
    [
        (OutOfMemory(stage="backward"), 8, 20, Fit.NO),
        (OutOfMemory(stage="backward"), 8, 21, Fit.YES),
        (None, 64, 19, Fit.NO),
        (None, 64, 20, Fit.YES),
    ],
)
def test_a_trial_overrules(outcome: Any, batch: int, budget_gib: float, fit: Fit) -> None:
    config = TrialConfig(micro_batch_size=batch)
    evidence = shown_by(a_record(0, config, **({} if outcome is None else {"outcome": outcome})))
    assert a_forecaster(budget_gib=budget_gib, evidence=evidence).expect(config).fit is fit


def test_a_study_of_something_else_is_refused() -> None:
    with pytest.raises(InputError, match="is about model 'mistral"):
        evidence_from(a_snapshot(), model=UNKNOWN, gpu=A10)
    with pytest.raises(InputError, match="ran on a CPU"):
        shown_by(gpu="cpu", device="cpu")
