"""What is as recorded and what is not, and what is said to differ."""

from __future__ import annotations

from typing import Any

import pytest

from search_spaces.models import load_model_spec
from sweep.export.record import Provenance, RecordedTexts, record_of
from sweep.terminal.finishing import verification_text
from sweep.verifying.verdict import Reached, judge
from tests.sweep.export.studies import a_measurement, a_study
from tests.sweep.prepared_texts import a_summary

PEAK = a_measurement().peak_allocated_bytes
HERE = {"gpu": "NVIDIA A10", "driver": "580", "versions": {"torch": "2.13.0", "triton": None}}
VERSIONS = {"torch": "2.13.0", "triton": None}
ORIGIN = Provenance(study="a", trial=17, gpu="NVIDIA A10", driver="580", versions=VERSIONS)
RECORD = record_of(a_study(model=load_model_spec("mistral-7b-v0.3"))).model_copy(
    update={"confirmed": True, "provenance": ORIGIN}
)


def reached(speed: float = 1.0, peak: float | None = 1.0, **changes: Any) -> Reached:
    return Reached(
        steps=40,
        tokens_per_second=speed * RECORD.measurement.tokens_per_second,
        peak_allocated_bytes=None if peak is None else round(peak * PEAK),
        **changes,
    )


@pytest.mark.parametrize(
    ("speed", "peak", "is_ok"),
    [
        (1.0, 1.0, True),
        (0.951, 1.019, True),
        (1.049, 0.981, True),
        (0.949, 1.0, False),
        (1.051, 1.0, False),
        (1.0, 1.021, False),
        (1.0, 0.979, False),
        (1.0, None, True),
        (0.5, None, False),
    ],
)
def test_five_percent_of_speed_and_two_of_memory_are_as_recorded(
    speed: float, peak: float | None, is_ok: bool
) -> None:
    found = judge(RECORD, reached(speed, peak), environment=HERE)
    assert found.ok is is_ok
    assert bool(found.differences) is not is_ok


@pytest.mark.parametrize(
    ("kind", "packing", "peak", "is_ok"),
    [
        ("script", "none", 0.7, True),
        ("script", "grouped", 0.7, True),
        ("script", "none", 1.1, False),
        ("script", "packed", 0.7, False),
        ("training", "none", 0.7, False),
    ],
)
def test_a_script_may_miss_the_longest_of_padded_texts_and_nothing_else_may_be_lower(
    kind: Any, packing: str, peak: float, is_ok: bool
) -> None:
    config = RECORD.config.model_copy(update={"packing": packing})
    texts = RecordedTexts(summary=a_summary(), source="x", eval_fraction=0.0, seed=0)
    record = RECORD.model_copy(update={"format": kind, "config": config, "texts": texts})
    found = judge(record, reached(peak=peak), environment=HERE)
    assert found.ok is is_ok
    assert found.differences
    assert (found.memory.reached is None) is is_ok


def test_the_document_has_promised_reached_and_ratio() -> None:
    document = judge(RECORD, reached(0.9, 1.1), environment=HERE).to_json()
    assert document["ok"] is False
    assert document["tokens_per_second"] == {
        "promised": 16_800.0,
        "reached": pytest.approx(15_120.0),
        "ratio": pytest.approx(0.9),
    }
    assert document["peak_allocated_bytes"]["ratio"] == pytest.approx(1.1)
    assert document["differences"] == [
        "tokens/s 10.0 % below the record: 15,120 beside 16,800",
        "peak allocated 10.0 % above the record: 22.00 GiB beside 20.00 GiB",
    ]


def test_a_figure_that_nothing_measured_is_null() -> None:
    document = judge(RECORD, reached(peak=None), environment=HERE).to_json()
    assert document["peak_allocated_bytes"] == {
        "promised": float(PEAK),
        "reached": None,
        "ratio": None,
    }


def test_another_card_and_other_versions_are_named() -> None:
    versions = {"torch": "2.14.0", "triton": None, "peft": "1.0"}
    here = {"gpu": "NVIDIA H200", "driver": "580", "commit": "f00d", "versions": versions}
    found = judge(RECORD, reached(), environment=here)
    # What the record does not know of is no difference.
    assert found.differences == ("gpu NVIDIA A10 -> NVIDIA H200", "torch 2.13.0 -> 2.14.0")
    assert found.ok


def test_a_record_that_was_doubtful_says_so() -> None:
    measured = RECORD.measurement.model_copy(update={"flags": ("emulated", "noisy")})
    noisy = RECORD.model_copy(update={"measurement": measured, "confirmed": False})
    noted = reached(notes=("TRL trained adapters of bfloat16, measured were float32",))
    found = judge(noisy, noted, environment=HERE)
    assert found.differences == (
        "the record is flagged noisy: its steps varied, so its speed is uncertain",
        "the record is not confirmed: `sweep confirm` measures it again",
        "TRL trained adapters of bfloat16, measured were float32",
    )


def test_a_person_reads_both_figures_beside_each_other() -> None:
    found = verification_text(judge(RECORD, reached(0.9), environment=HERE)).splitlines()
    assert found[0].startswith("Not as recorded: trial 17 of study 'a10-mistral', 40 steps of")
    assert found[1].endswith("16,800 recorded, 15,120 reached: -10.0 % (within 5 % is as recorded)")
    assert found[2].endswith("20.00 GiB reached: +0.0 % (within 2 % is as recorded)")
