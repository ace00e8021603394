"""Several GPUs beside each other: nothing is claimed inside the uncertainty of the speeds."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from qlora_sweep.reports.comparison import GpuComparison, compare, of_study
from qlora_sweep.reports.comparison_words import comparison_words
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.costs import AskedWork
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.prices import Offer
from qlora_sweep.storage.definition import StudySnapshot
from tests.reports.synthetic import definition, fits, snapshot
from tests.storage.builders import changed

SMALL = TrialConfig(micro_batch_size=8)
LONG = TrialConfig(micro_batch_size=8, seq_len=1024)
PAIRS = TrialConfig(micro_batch_size=8, method="dpo")


def _offer(usd_per_hour: float, **values: Any) -> Offer:
    day = date(2026, 9, 1)
    defaults = {"gpu": "a10", "provider": "Somebody", "date": day, "source": "a list"}
    return Offer(usd_per_hour=usd_per_hour, **(defaults | values))


def _study(
    name: str,
    speed: float,
    *,
    usd: float | None = 1.0,
    width: float = 0.01,
    config: TrialConfig = SMALL,
    fingerprint: str = "0123456789abcdef",
    **offer: Any,
) -> StudySnapshot:
    """Return a study of one trial at a speed that is sure to a share, on a GPU at a price."""
    step = 4096 / speed
    ends = (step / (1 + width), step / (1 - width))
    trial = fits(0, speed, config, step_seconds=step, step_seconds_ci95=ends)
    fixed = {"lora_rank": 16, "target_modules": "attention", "method": config.method}
    about = definition(emulated_on=None, space={"fixed": fixed})
    return snapshot(
        [trial],
        name=name,
        definition=changed(about, model_fingerprint=fingerprint),
        offer=None if usd is None else _offer(usd, **offer),
    )


def _compared(*studies: StudySnapshot, **work: float) -> GpuComparison:
    return compare([of_study(study) for study in studies], work=AskedWork(**work))  # type: ignore[arg-type]


def _verdicts(comparison: GpuComparison) -> tuple[str, ...]:
    return comparison_words(comparison).groups[0].verdicts


def test_the_cheapest_and_the_fastest_are_told_where_the_speeds_are_surely_apart() -> None:
    comparison = _compared(_study("slow", 4_000.0, usd=0.5), _study("fast", 8_000.0, usd=2.0))
    (group,) = comparison.groups
    assert [entry.candidate.label for entry in group.entries] == ["slow", "fast"]
    tokens = group.entries[0].bill
    assert tokens.usd_per_million_tokens == pytest.approx(0.5 / 3600 / 4_000 * 1e6, rel=1e-3)
    cheapest, fastest = _verdicts(comparison)
    assert cheapest.startswith("Cheapest: slow $0.347 ($0.344 to $0.351); fast takes 2.0x ")
    assert fastest.startswith("Fastest: fast 20 min 50 s")


def test_a_gpu_without_a_price_is_compared_by_time_alone() -> None:
    free = _compared(_study("priced", 4_000.0), _study("free", 8_000.0, usd=None))
    assert free.groups[0].offered is None
    unpriced, fastest = _verdicts(free)
    assert "free" in unpriced
    assert fastest.startswith("Fastest: free")


def test_gpus_within_the_uncertainty_of_their_speeds_are_tied() -> None:
    # What is surely behind is not, though another's name begins like its own.
    speeds = {"a10": 1_000.0, "a10 large": 4_000.0, "other": 4_400.0}
    studies = [_study(name, speed, width=0.2) for name, speed in speeds.items()]
    cheapest, fastest = _verdicts(_compared(*studies))
    assert cheapest.startswith("Cheapest: statistically indistinguishable are ")
    assert fastest.startswith("Fastest: statistically indistinguishable are ")
    assert all(f"{name} $" in cheapest for name in ("a10 large", "other"))
    assert "a10 2 h" not in fastest
    bare = fits(0, 9_000.0, SMALL, steps_measured=3, step_seconds_ci95=None)
    study = snapshot([bare], name="bare", definition=definition(emulated_on=None))
    comparison = _compared(study, _study("known", 4_000.0))
    assert _verdicts(comparison)[-1].startswith("Fastest: statistically")


def test_a_break_even_is_where_the_bills_cross_and_none_is_told_inside_the_uncertainty() -> None:
    """The one that starts for less costs twice as much a token, until that is used up."""
    starts = {"boot_seconds": 360.0, "download_bytes_per_second": None}

    def known(**width: float) -> GpuComparison:
        return _compared(
            _study("quick start", 4_000.0, usd=1.0, boot_seconds=0.0, **width),
            _study("long run", 16_000.0, usd=2.0, **starts, **width),
        )

    assert "quick start is cheaper below about 11,000 sequences" in _verdicts(known())[-1]
    assert not any("cheaper below" in verdict for verdict in _verdicts(known(width=0.4)))


def test_other_models_methods_classes_and_lengths_are_told_apart() -> None:
    another = _study("another length", 8_000.0, config=LONG)
    one = _study("one", 4_000.0)
    pairs = _study("pairs", 3_000.0, config=PAIRS)
    comparison = _compared(one, _study("model", 8_000.0, fingerprint="fedcba"), another, pairs)
    assert (comparison.groups, len(comparison.alone)) == ((), 4)
    assert any("Only another length has" in text for text in comparison_words(comparison).apart)
    absent = _verdicts(_compared(one, _study("two", 5_000.0), another))[-1]
    assert "another length" in absent
    assert "sweep run a10 --model mistral-7b-v0.3 --rank 16 --target-modules attention" in absent


def test_two_of_one_name_are_numbered_and_a_comparison_takes_two() -> None:
    comparison = _compared(_study("a10", 4_000.0), _study("a10", 8_000.0))
    assert [one.label for one in comparison.candidates] == ["a10 1", "a10 2"]
    with pytest.raises(InputError, match="at least two"):
        _compared(_study("a10", 4_000.0))
