"""What was reached beside what a record promises, in a verification, a model card and JSON."""

from __future__ import annotations

from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.storage.records import EightBitProducts, ProductErrors
from qlora_sweep.sweep.export.record import Provenance, Record, RecordedDataset, record_of
from qlora_sweep.sweep.finetuning.protocol import TrainingJob, TrainingResult
from qlora_sweep.sweep.finetuning.results import TrainedAdapter, model_card
from qlora_sweep.sweep.finetuning.subject import Subject
from qlora_sweep.sweep.terminal.finishing import verification_text
from qlora_sweep.sweep.verifying.runs import Reached, Verification, judge
from tests.sweep.export.studies import a_measurement, a_study
from tests.sweep.prepared_dataset import a_summary

DEMO = load_model_spec("demo")
TEXTS = a_summary(fingerprint="abc")
HERE = {"gpu": "NVIDIA A10", "driver": "580", "versions": {"torch": "2.13.0", "triton": None}}
ORIGIN = Provenance(study="a", trial=17, environment=HERE)
PEAK = 2**30
MEASURED = a_measurement(tokens_per_second=200.0, peak_allocated_bytes=PEAK, flags=())
RECORD = record_of(a_study(TrialConfig(), measurement=MEASURED, emulated_on=None)).model_copy(
    update={
        "confirmed": True,
        "provenance": ORIGIN,
        "texts": RecordedDataset(summary=TEXTS, source="x", eval_fraction=0.0, seed=0),
    }
)
RESULT = TrainingResult(
    device_name="NVIDIA A10",
    steps=10,
    rows=40,
    rows_held_out=2,
    rows_left_out=0,
    trainable_parameters=64,
    tokens=1000,
    tokens_computed=1200,
    tokens_per_second=200.0,
    run_tokens_per_second=150.0,
    step_seconds=0.5,
    steps_measured=200,
    seconds=6.0,
    peak_allocated_bytes=PEAK,
    train_loss=2.5,
    final_train_loss=2.25,
    eval_loss=2.125,
    epochs=1.0,
    checkpoints=1,
    checkpoint_seconds=0.1,
)


def changed(**changes: Any) -> Record:
    """Return the record with other figures or parts."""
    figures = {key: changes.pop(key) for key in ("flags",) if key in changes}
    measured = RECORD.measurement.model_copy(update=figures)
    return RECORD.model_copy(update={"measurement": measured, **changes})


def trained(
    record: Record | None = RECORD, *, config: TrialConfig | None = None, **changes: Any
) -> TrainedAdapter:
    return TrainedAdapter(
        TrainingJob(
            config=config or TrialConfig(), model=DEMO.to_json(), device="cuda", output="/out"
        ),
        RESULT.model_copy(update=changes),
        Subject(TrialConfig(), DEMO, "the winner", record),
        TEXTS,
        HERE,
    )


def verified(
    record: Record, speed: float, peak: float | None, here: Any = HERE, **changes: Any
) -> Verification:
    bytes_ = None if peak is None else round(peak * PEAK)
    reached = Reached(
        steps=40, tokens_per_second=200 * speed, peak_allocated_bytes=bytes_, **changes
    )
    return judge(record, reached, steps=40, environment=here)


@pytest.mark.parametrize(
    ("speed", "peak", "is_ok"),
    [
        (0.951, 1.019, True),
        (1.049, 0.981, True),
        (0.949, 1.0, False),
        (1.051, 1.0, False),
        (1.0, 1.021, False),
        (1.0, 0.979, False),
    ],
)
def test_five_percent_of_speed_and_two_of_memory_are_as_promised(
    speed: float, peak: float, is_ok: bool
) -> None:
    found = verified(RECORD, speed, peak)
    document = found.to_json()
    assert document["ok"] is is_ok
    assert bool(found.differences) is not is_ok
    # A training says the same of the same figures.
    peaked = {"peak_allocated_bytes": round(peak * PEAK)}
    told = trained(tokens_per_second=200 * speed, **peaked).to_json()
    for key in ("tokens_per_second", "peak_allocated_bytes"):
        assert told["ratios"][key] == document[key]["ratio"]
    assert told["differences"] == document["differences"]


@pytest.mark.parametrize(
    ("kind", "packing", "peak", "is_ok"),
    [
        ("script", "none", 0.7, True),
        ("script", "packed", 0.7, False),
        ("json", "none", 0.7, False),
        ("script", "none", None, True),
    ],
)
def test_a_script_may_miss_the_longest_of_padded_examples_and_nothing_else_may_be_lower(
    kind: str, packing: str, peak: float | None, is_ok: bool
) -> None:
    config = RECORD.config.model_copy(update={"packing": packing})
    found = verified(changed(format=kind, config=config), 1.0, peak)
    assert found.to_json()["ok"] is is_ok
    assert found.differences
    assert (found.comparison.memory.reached is None) is is_ok


def test_a_verification_says_both_figures_and_what_may_be_behind_a_difference() -> None:
    versions = {"torch": "2.14.0", "triton": None, "peft": "1.0"}
    here = {"gpu": "NVIDIA H200", "driver": "580", "commit": "f00d", "versions": versions}
    doubtful = changed(flags=("emulated", "noisy"), confirmed=False)
    found = verified(doubtful, 0.9, 1.1, here, adapter_dtypes=["bfloat16"])
    document = found.to_json()
    assert document["tokens_per_second"] == {
        "promised": 200.0,
        "reached": pytest.approx(180.0),
        "ratio": pytest.approx(0.9),
    }
    # What the record does not know of is no difference.
    told = ("180 beside 200", "1.10 GiB beside 1.00 GiB", "NVIDIA A10 -> NVIDIA H200")
    told += ("torch 2.13.0 -> 2.14.0", "noisy", "not confirmed", "bfloat16")
    for words, difference in zip(told, document["differences"], strict=True):
        assert words in difference
    _, speed, *_ = verification_text(found).splitlines()
    assert "200 recorded, 180 reached: -10.0 %" in speed
    of_pairs = TrialConfig(method="dpo")
    found = verified(changed(format="trl", config=of_pairs), 1.0, 1.0)
    assert "SFTTrainer" not in verification_text(found)


@pytest.mark.parametrize(
    ("record", "changes", "words"),
    [
        (RECORD, {}, None),
        (None, {}, "nothing was measured"),
        (changed(texts=None), {}, "random tokens"),
        (RECORD, {"device_name": "NVIDIA L4"}, "another device, NVIDIA A10"),
        (RECORD, {"steps_measured": 0}, "after warm-up"),
        (
            changed(texts=RECORD.texts.model_copy(update={"summary": a_summary()})),  # type: ignore[union-attr]
            {},
            "another dataset",
        ),
    ],
)
def test_only_what_was_measured_on_the_same_examples_is_a_measure_of_what_is_reached(
    record: Record | None, changes: dict[str, Any], words: str | None
) -> None:
    slow = trained(record, tokens_per_second=20.0, **changes)
    document = slow.to_json()
    assert (document["incomparable"] is None) is (words is None)
    assert words is None or words in document["incomparable"]
    is_comparable = words is None
    assert (document["ratios"]["tokens_per_second"] is not None) is is_comparable
    assert bool(document["differences"]) is is_comparable
    assert ("Not comparable" in model_card(slow)) is not is_comparable


def test_the_model_card_says_what_was_promised_and_reached_and_what_is_used() -> None:
    config = TrialConfig(lora_rank=8, micro_batch_size=3, quantization="none")
    model_card_text = model_card(trained(tokens_per_second=192.0, config=config))
    for words in (
        "| tokens/s | 200 | 192 | 0.960 |",
        "| peak allocated | 1.00 GiB | 1.00 GiB | 1.000 |",
        "| held-out loss | 2.1250 |",
        "| torch | 2.13.0 |",
        "| `lora_alpha` | `16.0` |",
        "| `effective_batch_size` | `3` |",
    ):
        assert words in model_card_text
    for words in ("triton", "None", "double_quant", "Not as promised", "see each other"):
        assert words not in model_card_text
    slow = trained(tokens_per_second=150.0, documents_apart=False)
    for words in ("25.0 % below", "see each other"):
        assert words in model_card(slow)


def test_model_card_and_json_say_what_8_bits_are_off_and_what_stays_in_16() -> None:
    kept = "model.layers.28.mlp.down_proj"
    found = EightBitProducts(
        errors=(
            ProductErrors(
                projection="down_proj",
                layers=30,
                forward=0.021,
                forward_worst=0.068,
                forward_16_bit=0.0017,
                gradient=0.02,
                gradient_worst=0.29,
                gradient_16_bit=0.0017,
            ),
        ),
        most_error=0.05,
        most_gradient_error=0.25,
        kept_in_16_bits=(kept,),
        share_in_16_bits=0.008,
        loss_8_bit=1.6503,
        loss_16_bit=1.6456,
    )
    adapter = trained(eight_bit=found)
    model_card_text = model_card(adapter)
    for figure in (kept, "6.8 %", "29 %", "0.8 %", "1.6503", "1.6456"):
        assert figure in model_card_text
    assert adapter.to_json()["eight_bit"] == found.model_dump(mode="json")
    assert "8-bit" not in model_card(trained())
