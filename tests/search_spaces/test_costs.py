"""Behaviour of bills and comparisons, on offers made up for the purpose."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qlora_sweep.search_spaces.config import TrialConfig, parse_config
from qlora_sweep.search_spaces.costs import (
    AskedWork,
    Bill,
    Workload,
    compare_offers,
    usd_per_training_second,
)
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.prices import Offer
from tests.search_spaces.small import make_offer

WORK = Workload(steps=1000, samples_per_step=16, tokens_per_sample=512.0)


OFFERS = st.builds(
    make_offer,
    usd_per_hour=st.floats(0.1, 100.0),
    billing_seconds=st.sampled_from([0.1, 1.0, 60.0, 3600.0]),
    minimum_seconds=st.floats(0.0, 7200.0),
    boot_seconds=st.floats(0.0, 600.0),
    download_seconds=st.floats(0.0, 600.0),
    queue_seconds=st.floats(0.0, 7200.0),
    is_queue_billed=st.booleans(),
    preemptions_per_hour=st.floats(0.0, 4.0),
    restart_seconds=st.floats(0.0, 600.0),
)
STEP_SECONDS = st.floats(0.01, 60.0)
unhurried = settings(deadline=None)
"""A shared machine may stall an example for longer than the default deadline."""


def test_every_term_of_an_offer_is_an_item_of_its_own() -> None:
    offer = make_offer(
        boot_seconds=30.0,
        download_bytes_per_second=1e8,
        queue_seconds=100.0,
        preemptions_per_hour=1.8,
        restart_seconds=50.0,
        billing_seconds=60.0,
        minimum_seconds=3600.0,
    )
    result = Bill(replace(WORK, download_bytes=2e9), step_seconds=2.0, offer=offer)
    seconds = {"training": 2000.0, "boot": 30.0, "download": 20.0, "queue": 100.0}
    seconds |= {"preemptions": 50.0, "rounding": 0.0, "minimum": 1500.0}
    assert {item.name: item.seconds for item in result.items} == pytest.approx(seconds)
    assert [item.usd for item in result.items if item.name == "queue"] == [0.0]
    assert result.usd == result.usd_per_1000_steps == pytest.approx(3.6)
    assert result.usd_per_sample == pytest.approx(3.6 / 16_000)
    training = 2.0 / 16 / 512 * 0.001 * (1 + 1.8 * 50 / 3600)
    assert result.usd_per_million_tokens == pytest.approx(1e6 * training)
    assert result.wall_hours == pytest.approx(2200 / 3600)
    assert result.dominant.name == "training"
    assert usd_per_training_second(offer) == pytest.approx(0.001 * (1 + 1.8 * 50 / 3600))


def test_work_is_given_in_samples_tokens_or_epochs() -> None:
    config = TrialConfig(micro_batch_size=1, effective_batch_size=16, seq_len=200)
    by_samples = AskedWork(samples=100).workload(config)
    assert by_samples == AskedWork(tokens=20_000).workload(config)
    assert (by_samples.steps, by_samples.samples, by_samples.tokens) == (7, 112, 22_400)
    three = AskedWork(tokens=1e6, epochs=3).workload(config)
    assert three.steps == AskedWork(tokens=3e6).workload(config).steps
    work = AskedWork(dataset_samples=10_000, epochs=3).workload(config)
    assert work.steps == 1875
    result = Bill(work, step_seconds=1.0, offer=make_offer())
    assert result.usd_per_epoch == pytest.approx(result.usd / 3)
    assert Bill(WORK, step_seconds=1.0, offer=make_offer()).usd_per_epoch is None


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"samples": 10, "epochs": 2}, "--work epochs needs tokens or dataset-samples"),
        ({"dataset_samples": 0}, "--work dataset-samples must be greater than 0"),
        ({"tokens": 10**400}, "--work tokens must be greater than 0 and at most"),
        ({"dataset_samples": 10, "epochs": math.nan}, "--work epochs must be"),
        ({"train_steps": 1, "samples": 1}, "--work train-steps and --work samples both"),
    ],
)
def test_work_that_makes_no_steps_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        AskedWork(**asked)


def test_a_pair_has_the_tokens_of_both_its_sequences() -> None:
    asked, settings = AskedWork(tokens=40_960), {"micro_batch_size": 4, "seq_len": 512}
    work = asked.workload(parse_config({"method": "dpo", **settings}))
    assert (work.noun, work.steps, work.samples, work.tokens) == ("pair", 10, 40, 40_960)
    work = asked.workload(parse_config(settings))
    assert (work.noun, work.steps, work.samples, work.tokens) == ("sample", 20, 80, 40_960)


@unhurried
@given(offer=OFFERS, step_seconds=STEP_SECONDS)
def test_a_bill_covers_what_was_used_in_whole_units_or_the_minimum_and_adds_up(
    offer: Offer, step_seconds: float
) -> None:
    result = Bill(WORK, step_seconds=step_seconds, offer=offer)
    waited = 0.0 if offer.is_queue_billed else offer.queue_seconds
    used = result.wall_hours * 3600 - waited
    billed = result.billed_hours * 3600
    assert billed >= used * (1 - 1e-9)
    units = billed / offer.billing_seconds
    is_minimum = billed == pytest.approx(offer.minimum_seconds)
    assert is_minimum or units == pytest.approx(round(units), abs=1e-6 * max(1.0, units))
    assert billed < max(offer.minimum_seconds, used + offer.billing_seconds) * (1 + 1e-9) + 1e-6
    values = result.to_json()
    assert sum(item["usd"] for item in values["items"]) == pytest.approx(values["usd"])
    assert values["usd"] == pytest.approx(values["billed_hours"] * offer.usd_per_hour)


def _pair(slow_boot: float) -> tuple[Bill, Bill]:
    """A slow GPU that is ready at once, and a fast one at its price that boots for a while."""
    slow = Bill(WORK, step_seconds=2.0, offer=make_offer())
    fast = Bill(WORK, step_seconds=1.0, offer=make_offer(gpu="a100-40gb", boot_seconds=slow_boot))
    return slow, fast


def test_the_break_even_is_where_a_fast_start_is_paid_back_by_fast_steps() -> None:
    slow, fast = _pair(300.0)
    comparison = compare_offers([slow, fast])
    assert comparison.cheapest is fast
    assert comparison.perhaps_soonest == (fast,)
    (point,) = comparison.break_evens
    assert point.steps == pytest.approx(300)
    assert point.samples.value == pytest.approx(4800)
    assert (point.below.offer.gpu, point.above.offer.gpu) == ("a10", "a100-40gb")
    for steps, winner in ((294, "a10"), (306, "a100-40gb")):
        bills = [replace(bill, workload=replace(WORK, steps=steps)) for bill in (slow, fast)]
        assert compare_offers(bills).cheapest.offer.gpu == winner
    assert compare_offers(_pair(0.0)).break_evens == compare_offers([slow]).break_evens == ()


def test_different_effective_batches_are_compared_by_the_sample_and_packed_rows_by_the_token() -> (
    None
):
    small = Bill(WORK, step_seconds=1.0, offer=make_offer())
    work = replace(WORK, steps=500, samples_per_step=32)
    large = Bill(work, step_seconds=1.8, offer=make_offer(gpu="l4", boot_seconds=50.0))
    comparison = compare_offers([small, large])
    assert comparison.cheapest is large
    (point,) = comparison.break_evens
    assert point.steps is None
    assert point.samples.value == pytest.approx(50 / (1 / 16 - 1.8 / 32))
    # Packed rows hold more tokens each: per row they look dear, per token they are cheap.
    padded = Bill(replace(WORK, tokens_per_sample=200.0), make_offer(), 0.8)
    assert compare_offers([padded, small]).cheapest is small


# Inside the uncertainty of the steps


def _uncertain(bill: Bill, error: float) -> Bill:
    return replace(
        bill, step_ends=(bill.step_seconds * (1 - error), bill.step_seconds * (1 + error))
    )


def test_no_break_even_is_claimed_inside_the_uncertainty_of_two_gpus() -> None:
    slow, fast = _pair(300.0)
    assert [end.step_seconds for end in _uncertain(slow, 0.25).extremes] == [1.5, 2.5]
    usd_range = _uncertain(slow, 0.25).to_json()["usd_range"]
    assert usd_range == pytest.approx([0.75 * slow.usd, 1.25 * slow.usd])
    claimed = [
        compare_offers([_uncertain(slow, error), _uncertain(fast, error)]).break_evens
        for error in (0.0, 0.05, 0.5)
    ]
    (exact,), (near,), none = claimed
    assert exact.samples[1:] == pytest.approx([exact.samples.value] * 2)
    assert near.samples.low < near.samples.value < near.samples.high
    assert none == ()


@pytest.mark.parametrize(("apart", "leading"), [(0.99, ["a10", "l4"]), (1.01, ["a10"])])
def test_two_gpus_are_ties_where_the_interval_of_their_ratio_holds_1(
    apart: float, leading: list[str]
) -> None:
    """Of independent log-normal steps: apart by more than 1.645 of both spreads together."""
    parted = apart * math.exp(1.645 * math.hypot(0.1, 0.2))
    bills = []
    for gpu, seconds, log_spread in (("a10", 2.0, 0.1), ("l4", 2.0 * parted, 0.2)):
        factor = math.exp(1.645 * log_spread)
        ends = (seconds / factor, seconds * factor)
        bills.append(Bill(WORK, make_offer(gpu=gpu), seconds, step_ends=ends))
    comparison = compare_offers(bills)
    assert [bill.offer.gpu for bill in comparison.perhaps_cheapest] == leading
    assert [bill.offer.gpu for bill in comparison.perhaps_soonest] == leading


def test_offers_of_one_gpu_share_its_step_however_uncertain_that_is() -> None:
    """The dearer hour is dearer whatever the speed; the break-even is there at any of them."""
    cheap = _uncertain(Bill(WORK, make_offer(provider="A"), 2.0), 0.5)
    dear = _uncertain(Bill(WORK, make_offer(provider="B", usd_per_hour=3.7), 2.0), 0.5)
    assert compare_offers([dear, cheap]).perhaps_cheapest == (cheap,)
    late = _uncertain(
        Bill(WORK, make_offer(provider="C", usd_per_hour=1.8, boot_seconds=600.0), 2.0), 0.5
    )
    (point,) = compare_offers([cheap, late]).break_evens
    # 600 s of boot at half the rate are paid back by as many of training: 300 steps of 2 s.
    assert point.steps == pytest.approx(300)
    assert point.samples[1:] == pytest.approx((16 * 200, 16 * 600))


@pytest.mark.parametrize(("gpus", "paid"), [(1, 8), (2, 8), (8, 8), (9, 16)])
def test_all_gpus_of_a_machine_are_paid_for_however_many_train(gpus: int, paid: int) -> None:
    alone, machine = make_offer(), make_offer(gpus=8)
    bill = Bill(WORK, machine, 2.0, gpus=gpus)
    assert bill.usd == pytest.approx(paid * Bill(WORK, alone, 2.0).usd)
    assert bill.usd_per_hour == pytest.approx(3.6 * paid)
    assert usd_per_training_second(machine, gpus) == pytest.approx(paid * 0.001)
    # A GPU of its own at twice the price of one of eight is the cheaper one for one GPU.
    dearer = Bill(WORK, make_offer(usd_per_hour=7.2), 2.0)
    assert compare_offers([bill, dearer]).cheapest is dearer
