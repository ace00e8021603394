"""Behaviour of the GPUs for a job: what each does it with, in time or not, and which is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import SETTINGS, TrialConfig
from qlora_sweep.search_spaces.costs import AskedWork, ratio
from qlora_sweep.search_spaces.loading import with_fixed
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.search_spaces.prices import Offer
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.sweep.planning.backwards import (
    LENGTH_STEP,
    Cheapest,
    GpuForJob,
    Outcome,
    job,
    longest_rows,
    on_gpu,
    ranked,
)
from qlora_sweep.sweep.planning.candidates import PlanOptions, is_faster, own_space
from qlora_sweep.sweep.planning.documents import cheapest_document, longest_document
from qlora_sweep.sweep.planning.evidence import evidence_from
from qlora_sweep.sweep.planning.plan import TASK_KEYS, Use, few, what_ifs
from qlora_sweep.sweep.predict.forecast import Forecaster
from qlora_sweep.sweep.predict.memory.predictor import Fit
from qlora_sweep.sweep.predict.memory.profiles import Untraceable
from tests.sweep.imagined_memory import ImaginedPredictor
from tests.sweep.imagined_study import MISTRAL, TRIALS, a_snapshot, a_space
from tests.sweep.planning.imagined import a_forecaster, an_offer

TERMS: dict[str, Any] = {
    "work": AskedWork(samples=10_000),
    "offers": [an_offer()],
    "deadline_seconds": None,
}


def the_job(gpu: str, **held: Any) -> SearchSpace:
    space = with_fixed(own_space(gpu, None)[0], job(held))
    assert isinstance(space, SearchSpace)
    return space


def a_gpu(gpu: str, *offers: Offer, budget_gib: float | None = None, **terms: Any) -> GpuForJob:
    known = TERMS | {"offers": offers or [an_offer(gpu=gpu)]} | terms
    return on_gpu(the_job(gpu), a_forecaster(gpu=gpu, budget_gib=budget_gib), **known)


def answered(*gpus: GpuForJob) -> Cheapest:
    return Cheapest(MISTRAL, gpus[0].bill.workload, job({}), None, ranked(gpus))


def test_what_is_not_typed_of_a_job_is_the_recipes() -> None:
    assert job({}) == {
        "lora_rank": 16,
        "target_modules": "attention",
        "seq_len": 512,
        "effective_batch_size": 16,
    }
    assert job({"lora_rank": 64, "micro_batch_size": 10})["effective_batch_size"] == 20
    fixed = {"seq_len": 2048, "micro_batch_size": 10, "effective_batch_size": None}
    assert job({}, fixed=fixed).items() >= {"seq_len": 2048, "effective_batch_size": 20}.items()
    assert job({"seq_len": 64}, fixed=fixed)["seq_len"] == 64


@pytest.mark.parametrize("gpus", [2, 3])
def test_nobody_typed_the_effective_batch_so_it_is_one_that_all_gpus_can_make(gpus: int) -> None:
    spaces = [own_space(gpu, None)[0] for gpu in ("t4", "a10", "a100-80gb", "h200")]
    held = job({"data_parallel": gpus}, spaces=spaces)
    assert held["effective_batch_size"] >= 16
    for space in spaces:
        asked = with_fixed(space, held)
        assert isinstance(asked, SearchSpace)
        assert {effective for *_, effective in asked.batches} == {held["effective_batch_size"]}
    typed = job({"data_parallel": gpus, "micro_batch_size": 5})
    assert typed["effective_batch_size"] % (5 * gpus) == 0
    # What a space searches of GPUs goes into it too.
    either = a_space(dimensions={"data_parallel": [1, gpus]})
    assert job({}, spaces=[either])["effective_batch_size"] % gpus == 0


def test_a_deadline_is_met_missed_or_open_inside_the_uncertainty_of_the_speed() -> None:
    bill = a_gpu("a10").bill
    soonest, latest = (3600 * end.wall_hours for end in bill.extremes)
    took = 3600 * bill.wall_hours
    deadlines = [0.99 * soonest, (soonest + took) / 2, (took + latest) / 2, 1.01 * latest]
    outcomes = [a_gpu("a10", deadline_seconds=deadline).outcome for deadline in deadlines]
    assert outcomes == [
        Outcome.TOO_SLOW,
        Outcome.PERHAPS_IN_TIME,
        Outcome.PERHAPS_LATE,
        Outcome.IN_TIME,
    ]


def test_an_offer_with_a_queue_beyond_the_deadline_is_not_taken_however_cheap() -> None:
    queued = an_offer(usd_per_hour=0.1, queue_seconds=1e6)
    prompt = an_offer(usd_per_hour=2.0)
    assert a_gpu("a10", queued, prompt).bill.offer == queued
    gpu = a_gpu("a10", queued, prompt, deadline_seconds=86_400)
    assert [bill.offer for bill in gpu.bills] == [prompt]


def test_the_cheapest_and_the_smallest_are_of_those_in_time() -> None:
    gpus = [
        a_gpu("a10", an_offer(usd_per_hour=9.0)),
        a_gpu("a100-40gb", an_offer(gpu="a100-40gb", usd_per_hour=1.0)),
        a_gpu("h200", an_offer(gpu="h200", usd_per_hour=90.0)),
        a_gpu("l4", deadline_seconds=1.0),
        a_gpu("t4", budget_gib=3),
    ]
    answer = answered(*gpus)
    assert [gpu.gpu.name for gpu in answer.gpus] == ["a100-40gb", "h200", "a10", "l4", "t4"]
    assert answer.cheapest is gpus[1]
    assert answer.smallest is gpus[0]
    assert answer.that(Outcome.TOO_SLOW) == (gpus[3],)
    assert answer.that(Outcome.TOO_SMALL) == (gpus[4],)
    assert gpus[4].least_bytes > 3 * 2**30


def test_gpus_whose_costs_overlap_are_not_told_apart() -> None:
    base = a_gpu("a10", an_offer(usd_per_hour=1.0))
    other = a_gpu("l4", an_offer(gpu="l4", usd_per_hour=1.0))
    even = base.bill.usd / other.bill.usd
    # The price at which the ratio of their costs begins at 1.
    parted = even * ratio(other.bill, base.bill).value / ratio(other.bill, base.bill).low
    for price, tied in ((1.01 * even, 2), (0.99 * parted, 2), (1.01 * parted, 1)):
        rival = a_gpu("l4", an_offer(gpu="l4", usd_per_hour=price))
        answer = answered(base, rival)
        assert answer.cheapest is base
        assert [gpu.gpu.name for gpu in answer.perhaps_cheapest] == ["a10", "l4"][:tied]
        document = cheapest_document(answer)
        assert document["cheapest"] == (None if tied > 1 else "a10")
        assert document["recommended"] == "a10"
        assert document["perhaps_cheapest"] == ["a10", "l4"] * (tied == 2)


def test_a_gpu_without_a_price_or_without_a_rule_that_allows_it_says_so() -> None:
    config = TrialConfig(compute_dtype="bf16", effective_batch_size=16)
    old = on_gpu(config, a_forecaster(gpu="t4"), **TERMS)
    assert (old.outcome, old.forecast) == (Outcome.FORBIDDEN, None)
    assert "bf16" in old.reason
    dear = on_gpu(the_job("a10"), a_forecaster(), **TERMS | {"offers": []})
    assert dear.outcome is Outcome.NO_PRICE
    assert dear.forecast is not None


def test_a_gpu_of_which_nothing_can_be_traced_says_why_and_is_not_too_small() -> None:
    fault = Untraceable("data decides")
    gpu = on_gpu(the_job("a10"), a_forecaster(predictor=ImaginedPredictor(fault=fault)), **TERMS)
    assert (gpu.outcome, gpu.forecast, gpu.reason) == (Outcome.FORBIDDEN, None, "data decides")
    assert gpu.fault is not None


# Behaviour of the longest rows, against asking of every length

SPACE = a_space(
    dimensions={
        "micro_batch_size": [1, 2, 3, 8, 16],
        "seq_len": [512],
        "checkpoint_fraction": [0.0, 0.3, 1.0],
        "lora_rank": [8, 16, 64],
    }
)
SHORT = replace(MISTRAL, config={**MISTRAL.config, "max_position_embeddings": 4096})


def one_by_one(forecaster: Forecaster, batch: int) -> tuple[int, int]:
    """Return the longest row that surely fits, and that perhaps does, asking of every length."""
    longest = {Fit.YES: 0, Fit.UNCERTAIN: 0, Fit.NO: 0}
    for length in range(LENGTH_STEP, 4096 + 1, LENGTH_STEP):
        for fraction in (0.0, 0.3, 1.0):
            config = TrialConfig(
                micro_batch_size=batch, seq_len=length, checkpoint_fraction=fraction
            )
            longest[forecaster.expect(config).fit] = length
    return longest[Fit.YES], max(longest[Fit.YES], longest[Fit.UNCERTAIN])


@pytest.mark.parametrize("budget_gib", [5.2, 7.77, 30])
def test_the_longest_rows_are_those_that_asking_of_every_length_finds(budget_gib: float) -> None:
    asked, fresh = (a_forecaster(model=SHORT, budget_gib=budget_gib) for _ in range(2))
    answer = longest_rows(SPACE, asked)
    for row in answer.rows:
        assert (row.seq_len, row.possible) == one_by_one(fresh, row.micro_batch_size)
        if row.seq_len:
            assert row.forecast.fit is Fit.YES
            assert row.forecast.config.seq_len == row.seq_len
            assert row.forecast.config.lora_rank == 16
    assert answer.limit == 4096


def test_the_longest_rows_with_an_image_have_room_for_it() -> None:
    """A row of 64 tokens has none, which says nothing of longer ones."""
    model = load_model_spec("qwen3-vl-8b")
    config = TrialConfig(image_size=1024, quantization="none")
    for budget_gib, best in ((30, True), (4, False)):
        answer = longest_rows(config, a_forecaster(model=model, budget_gib=budget_gib))
        assert answer.shortest == 1088
        assert (answer.best is not None) is best
        for row in answer.rows:
            assert row.seq_len == 0 or row.seq_len >= answer.shortest


def test_rows_end_with_the_first_micro_batch_at_which_nothing_fits() -> None:
    answer = longest_rows(SPACE, a_forecaster(model=SHORT, budget_gib=5.2))
    assert [row.micro_batch_size for row in answer.rows] == [1, 2, 3, 8]
    assert [bool(row.possible) for row in answer.rows] == [True, True, True, False]
    nothing = longest_rows(SPACE, a_forecaster(model=SHORT, budget_gib=4))
    assert (nothing.best, len(nothing.rows)) == (None, 1)
    assert longest_document(nothing)["longest"] is None


def test_one_configuration_is_asked_about_at_its_micro_batch_or_at_all() -> None:
    config = TrialConfig(micro_batch_size=3, checkpoint_fraction=0.5)
    held = longest_rows(
        config, a_forecaster(), asked=PlanOptions(fixed_settings={"micro_batch_size": 3})
    )
    assert [row.micro_batch_size for row in held.rows] == [3]
    free = longest_rows(config, a_forecaster())
    assert [row.micro_batch_size for row in free.rows][:3] == [1, 2, 4]
    assert free.configurations == 1


@pytest.mark.parametrize(
    ("gpus", "effective", "batches"), [(1, 12, [1, 2, 4]), (3, 24, [1, 2, 4, 8])]
)
def test_only_micro_batches_that_go_into_the_effective_batch_are_asked_about(
    gpus: int, effective: int, batches: list[int]
) -> None:
    config = TrialConfig(data_parallel=gpus, effective_batch_size=effective, micro_batch_size=1)
    answer = longest_rows(config, a_forecaster(gpu="h200", model=SHORT))
    assert [row.micro_batch_size for row in answer.rows] == batches


# Behaviour of single changes: what is turned, what that does, and which are worth a line

RECIPE = TrialConfig(micro_batch_size=8)
UNTURNED = {
    *("lora_alpha", "effective_batch_size", "learning_rate", "packing"),
    *("data_parallel", "sharding", "method", "loss_type", "dpo_beta", "reference", "trainer"),
    *("image_size", "offload_fraction"),
}
"""Some change nothing that is asked about, one is not there to be halved, and what is asked about
is one GPU and one training: preference tuning is another, and so are rows of another kind. It has
no experts."""


def test_each_change_is_of_one_setting_and_every_setting_that_matters_is_changed() -> None:
    changes = what_ifs(a_forecaster().expect(RECIPE))
    for change in changes:
        assert set(change.forecast.config.changes_from(RECIPE)) == {change.key}
        assert change.forecast.violation is None
    assert {change.key for change in changes} == set(SETTINGS) - UNTURNED
    assert len({change.forecast.config for change in changes}) == len(changes)
    # Worth a line are useful ones that leave the task alone.
    shown = few(changes)
    assert 0 < len(shown) < len(changes) / 2
    assert not {change.key for change in shown} & set(TASK_KEYS)
    assert Use.NONE not in {change.use for change in shown}


@pytest.mark.parametrize(
    ("key", "value", "use"),
    [
        ("checkpoint_fraction", 0.0, Use.FASTER_WHERE_IT_FITS),
        ("upcast_fp32", False, Use.FASTER),
        # A step in int8 may be slower, though it is predicted to be faster.
        ("compute_dtype", "int8", Use.NONE),
    ],
)
def test_a_change_is_of_use_by_what_it_surely_does_to_speed_and_memory(
    key: str, value: Any, use: Use
) -> None:
    shown = a_forecaster(budget_gib=10).expect(RECIPE)
    (change,) = (c for c in what_ifs(shown) if (c.key, c.value) == (key, value))
    assert change.use is use
    assert change.speed_change > 0.03
    assert is_faster(change.forecast, shown) is (use is not Use.NONE)


def test_changes_come_by_their_use_and_leaner_ones_save_memory() -> None:
    changes = what_ifs(a_forecaster(budget_gib=10).expect(RECIPE))
    assert [change.use for change in changes] == sorted(change.use for change in changes)
    leaner = [change for change in changes if change.use is Use.LEANER]
    assert leaner
    assert all(change.memory_change_bytes < 0 for change in leaner)


def test_a_measured_configuration_is_compared_by_what_is_predicted_of_both() -> None:
    """Its trials ran at 1.2 times the predicted step: no change may gain or lose by that."""
    evidence = evidence_from(a_snapshot(*TRIALS), model=MISTRAL, gpu=a_forecaster().gpu)
    forecaster = a_forecaster(evidence=evidence)
    shown = forecaster.expect(TRIALS[0].config)
    assert shown.speed_basis == "measured"
    (quant,) = [c for c in what_ifs(shown) if c.value == "fp4"]
    assert quant.speed_change == pytest.approx(0.0, abs=1e-9)
