"""The document of ``sweep best --json`` says what it ranks by, and how sure its numbers are."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from qlora_sweep.reports.view import view_of
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.prices import Offer, load_prices
from qlora_sweep.storage.definition import StudySnapshot, TargetSpeed
from qlora_sweep.storage.records import OutOfMemory, PredictedOutOfMemory, TrialRecord, Verdict
from tests.storage.builders import a_definition, a_record, changed, confirmed, fits

OOM = OutOfMemory(stage="backward")


def document(
    *records: TrialRecord, offer: Offer | None = None, is_confirmed: bool = False, **space: Any
) -> dict[str, Any]:
    snapshot = StudySnapshot(
        "study",
        a_definition(**space),
        {},
        records,
        confirmations=confirmed(*records) if is_confirmed else (),
        wall_seconds=12.5,
        offer=offer,
    )
    found = view_of(snapshot).document()
    assert json.loads(json.dumps(found)) == found
    return found


def test_the_document_has_its_promised_keys_and_numbers() -> None:
    found = document(
        a_record(0, fits(100.0, spread=0.01), is_baseline=True, device_seconds=2.0),
        a_record(1, fits(210.0, spread=0.01), batch=2, device_seconds=3.0),
        a_record(2, fits(209.0, spread=0.01), batch=1),
        a_record(3, OOM, batch=8, device_seconds=0.5),
        is_confirmed=True,
    )
    promised = "study gpu model objective ended seconds trials best confirmed gain tied"
    promised += " target_tokens_per_second fastest_by_class"
    assert set(promised.split()) <= found.keys()
    assert found["gpu"] == {"name": "a10", "budget_bytes": 20 * GIB, "emulated_on": None}
    assert found["seconds"] == {"wall": 12.5, "device": pytest.approx(5.5 + 3 * 5.0)}
    assert set(found["trials"]) == {"total", *map(str, Verdict)}
    assert {k: v for k, v in found["trials"].items() if v} == {"total": 4, "fits": 3, "oom": 1}
    best = found["best"]
    assert best["number"] == 1
    assert best["config"]["micro_batch_size"] == 2
    assert best["measurement"]["tokens_per_second"] == pytest.approx(210.0)
    assert found["confirmed"] is True
    assert found["tied"] == [2]
    gain = found["gain"]
    assert gain["ratio"] == pytest.approx(2.1)
    assert gain["low"] < gain["ratio"] < gain["high"]
    (fastest,) = found["fastest_by_class"]
    assert (fastest["number"], fastest["lora_rank"], fastest["seq_len"]) == (1, 16, 512)


def test_an_unknown_value_is_null() -> None:
    found = document(a_record(0, PredictedOutOfMemory(predicted_bytes=1)))
    for key in ("best", "baseline", "target_tokens_per_second"):
        assert found[key] is None
    found = document(a_record(0, fits(100.0, step_seconds_ci95=None)))
    assert found["best"]["tokens_per_second_ci95"] is None
    assert found["best"]["noisy"] is True
    unsure = {"value": 100.0, "low": None, "high": None, "basis": "measured"}
    assert found["target_tokens_per_second"] == unsure


CLASSES = {"dimensions": {"lora_rank": [16, 64], "seq_len": [64, 512]}}


def test_a_winner_of_another_class_has_no_gain_and_the_fastest_of_the_baselines_has() -> None:
    def of_rank(number: int, rank: int, speed: float, **changes: Any) -> TrialRecord:
        config = TrialConfig(lora_rank=rank, **changes)
        return TrialRecord(number=number, config=config, outcome=fits(speed))

    found = document(
        changed(of_rank(0, 64, 100.0), is_baseline=True),
        of_rank(1, 16, 400.0, seq_len=64),
        of_rank(2, 64, 150.0, seq_len=64),
        is_confirmed=True,
        **CLASSES,
        baseline={"lora_rank": 64},
    )
    assert (found["gain"], found["no_gain"]) == (None, "not_measured")
    base = found["baseline"]
    assert base["class"] == {"lora_rank": 64, "target_modules": "attention"}
    assert base["class_gain"]["number"] == 2
    assert base["class_gain"]["gain"]["ratio"] == pytest.approx(1.5)


def test_the_speed_on_the_target_is_predicted_where_another_gpu_stood_in() -> None:
    about = a_definition()
    target = changed(about.target, emulated_on="NVIDIA H200")
    about = changed(about, target=target)
    offer = load_prices()["a10"][0]
    bare = StudySnapshot("study", about, {}, (a_record(0, fits(100.0)),), offer=offer)
    found = view_of(bare).document()
    assert found["cost"] is None
    assert found["target_tokens_per_second"] is None
    known = replace(bare, target_speeds={0: TargetSpeed(20.0, 16.0, 25.0, "predicted")})
    found = view_of(known).document()
    speed = {"value": 20.0, "low": 16.0, "high": 25.0, "basis": "predicted"}
    assert found["target_tokens_per_second"] == found["best"]["target_tokens_per_second"] == speed
    assert found["best"]["measurement"]["tokens_per_second"] == 100.0
    expected = offer.usd_per_hour / 3600 / 20.0 * 1e6
    cost = found["cost"]
    assert cost["usd_per_million_tokens"] == pytest.approx(expected)
    terms = {"usd_per_hour": offer.usd_per_hour, "provider": offer.provider}
    assert cost.items() >= (terms | {"date": offer.date.isoformat()}).items()
