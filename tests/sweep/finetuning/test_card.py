"""What a training reached beside what was promised, and what its model card says."""

from __future__ import annotations

from typing import Any

import pytest

from search_spaces.config import TrialConfig
from search_spaces.models import load_model_spec
from sweep.export.record import record_of
from sweep.finetuning.card import deviation, incomparable, model_card
from sweep.finetuning.finishing import training_document
from sweep.finetuning.wire import Promise, TrainingJob, TrainingResult
from sweep.verifying.verdict import Reached, judge
from tests.sweep.export.studies import a_measurement, a_study

TOKENS = "tokens_per_second"


def a_job(promise: Promise | None) -> TrainingJob:
    return TrainingJob(
        config=TrialConfig(),
        model=load_model_spec("demo").to_json(),
        texts="/texts",
        fingerprint="abc",
        device="cpu",
        output="/out",
        promise=promise,
    )


def promised(texts: str | None) -> Promise:
    return Promise(
        tokens_per_second=200.0,
        peak_allocated_bytes=2**30,
        source="trial 3 of study 'x | y'",
        device="CPU",
        texts=texts,
    )


RESULT = TrainingResult(
    steps=10,
    tokens=1000,
    tokens_computed=1200,
    tokens_per_second=192.0,
    run_tokens_per_second=150.0,
    step_seconds=0.5,
    steps_measured=5,
    seconds=6.0,
    peak_allocated_bytes=2**30,
    trainable_parameters=64,
    train_loss=2.5,
    final_train_loss=2.25,
    eval_loss=2.125,
    eval_tokens=50,
    rows=40,
    rows_held_out=2,
    rows_left_out=0,
    epochs=1.0,
    checkpoints=1,
    checkpoint_seconds=0.1,
    data_wait_seconds=0.0,
    device_name="CPU",
)


def test_only_what_was_measured_on_the_same_texts_is_a_measure_of_what_is_reached() -> None:
    def why_not(promise: Promise | None, **changes: Any) -> str:
        return str(incomparable(a_job(promise), RESULT.model_copy(update=changes)))

    assert why_not(promised("abc")) == "None"
    assert "another dataset" in why_not(promised("def"))
    assert "random tokens" in why_not(promised(None))
    assert "nothing was measured" in why_not(None)
    assert "another device, CPU" in why_not(promised("abc"), device_name="NVIDIA L4")
    by_catalogue = promised("abc").model_copy(update={"device": "l4"})
    assert why_not(by_catalogue, device_name="NVIDIA L4") == "None"
    assert "another device, l4" in why_not(by_catalogue, device_name="NVIDIA A10")
    assert "after warm-up" in why_not(promised("abc"), steps_measured=0)


def test_the_card_says_what_was_promised_and_reached() -> None:
    card = model_card(
        a_job(promised("abc")),
        RESULT,
        texts=None,
        subject="the winner",
        environment={"versions": {"torch": "2.13.0", "triton": None}},
    )
    assert "| tokens/s | 200 | 192 | 0.960 |" in card
    assert "| peak allocated | 1.00 GiB | 1.00 GiB | 1.000 |" in card
    assert "| held-out loss | 2.1250 |" in card
    assert "| torch | 2.13.0 |" in card
    assert "triton" not in card
    assert "Not as promised" not in card


def test_the_card_has_what_is_used_and_no_knob_that_has_no_say() -> None:
    job = a_job(None)
    config = TrialConfig(lora_rank=8, micro_batch_size=3, quantization="none")
    card = model_card(
        job.model_copy(update={"config": config}),
        RESULT,
        texts=None,
        subject="the recipe",
        environment={},
    )
    assert "| `lora_alpha` | `16.0` |" in card
    assert "| `effective_batch_size` | `3` |" in card
    assert "None" not in card
    assert "double_quant" not in card


@pytest.mark.parametrize(
    ("speed", "peak", "ratios"),
    [
        (190.1, 1.019, (0.9505, 1.019)),
        (189.9, 1.0, (0.9495, 1.0)),
        (200.0, 1.021, (1.0, 1.021)),
        (211.0, 0.979, (1.055, 0.979)),
    ],
)
def test_what_is_not_as_promised_is_said_as_sweep_verify_would(
    speed: float, peak: float, ratios: tuple[float, float]
) -> None:
    result = RESULT.model_copy(
        update={"tokens_per_second": speed, "peak_allocated_bytes": round(peak * 2**30)}
    )
    measured = a_measurement(tokens_per_second=200.0, peak_allocated_bytes=2**30)
    record = record_of(a_study(measurement=measured))
    record = record.model_copy(update={"confirmed": True, "provenance": None})
    verified = judge(record, Reached(10, speed, result.peak_allocated_bytes), environment={})
    document = training_document(
        a_job(promised("abc")), result, texts=None, subject="the winner", environment={}
    )
    assert tuple(document["ratios"].values()) == pytest.approx(ratios, rel=1e-6)
    assert verified.to_json()["tokens_per_second"]["ratio"] == document["ratios"][TOKENS]
    told = [line for line in document["differences"] if " the record: " in line]
    assert told == list(verified.differences)


def test_what_may_be_behind_it_is_named_on_the_card() -> None:
    before = {"gpu": "NVIDIA L4", "driver": "580.1", "versions": {"torch": "2.13.0"}}
    promise = promised("abc").model_copy(
        update={"environment": before, "flags": ("noisy", "emulated"), "is_confirmed": False}
    )
    here = {"gpu": "NVIDIA L4", "driver": "590.2", "versions": {"torch": "2.13.0"}}
    slow = RESULT.model_copy(update={"tokens_per_second": 150.0})
    told = deviation(a_job(promise), slow, environment=here)
    assert told is not None
    assert told.words == (
        "Not as promised: tokens/s 25.0 % below the record: 150 beside 200. Likely causes: "
        "driver 580.1 -> 590.2; the record is flagged noisy: its steps varied, so its speed is "
        "uncertain; the record is not confirmed: `sweep confirm` measures it again; the speed is "
        "of 5 steps alone."
    )
    card = model_card(a_job(promise), slow, texts=None, subject="the winner", environment=here)
    assert told.words in card


def test_nothing_is_off_that_cannot_be_compared() -> None:
    slow = RESULT.model_copy(update={"tokens_per_second": 20.0})
    document = training_document(
        a_job(promised("other")), slow, texts=None, subject="the winner", environment={}
    )
    assert document["ratios"] == {TOKENS: None, "peak_allocated_bytes": None}
    assert document["differences"] == []
    steady = RESULT.model_copy(update={"tokens_per_second": 150.0, "steps_measured": 200})
    told = deviation(a_job(promised("abc")), steady, environment={})
    assert told is not None
    assert told.words.endswith("nothing that is recorded explains it.")
