"""Studies on a dataset, with what their trials learned, and a soak."""

from __future__ import annotations

from typing import Any

from search_spaces.config import TrialConfig
from storage.definition import StudySnapshot
from storage.records import EpochRecord, SoakReport, TrialRecord
from tests.reports.synthetic import definition, fits, snapshot
from tests.sweep.prepared_texts import a_summary

SOAKED = SoakReport(
    steps=53,
    seconds=15.2,
    evaluation_loss=10.4,
    evaluation_seconds=0.4,
    checkpoint_bytes=80_000_000,
    checkpoint_seconds=0.3,
)


SHORT = TrialConfig(micro_batch_size=8, seq_len=512)
LONG = TrialConfig(micro_batch_size=8, seq_len=2048)
TARGET = {"emulated_on": None}


def an_epoch(**changes: Any) -> EpochRecord:
    values = {
        "rows": 9_400,
        "rows_cut": 900,
        "rows_left_out": 100,
        "tokens": 3_000_000,
        "tokens_cut": 0.032,
        "tokens_left_out": 0.011,
        "padded_tokens": 4_000_000,
        "loss_tokens": 2_880_000,
        "steps": 1200,
    }
    return EpochRecord.model_validate(values | changes)


def of_texts(*records: TrialRecord, **space: Any) -> StudySnapshot:
    values = {
        "data": "mine.jsonl",
        "dimensions": {
            "lora_rank": {"choices": [8, 16, 64]},
            "seq_len": {"choices": [512, 2048]},
        },
        "fixed": {"micro_batch_size": 8},
    }
    about = definition(space=values | space, **TARGET)
    known = about.model_copy(update={"texts": a_summary(source="mine.jsonl")})
    return snapshot(records, definition=known)


def trained(number: int, speed: float, config: TrialConfig, **epoch: Any) -> TrialRecord:
    return fits(number, speed, config).model_copy(update={"epoch": an_epoch(**epoch)})


def learned(
    number: int, rank: int, loss: float, half: float | None = None, speed: float = 9_000.0
) -> TrialRecord:
    quality: dict[str, Any] = {
        "eval_loss": loss,
        "eval_tokens": 4_000,
        "eval_seq_len": 512,
        "train_tokens": 600_000,
        "train_loss": loss - 0.1,
        "steps": 100,
        "seconds": 60.0,
        "seed": 0,
    }
    if half is not None:
        quality |= {"seeds": (0, 1, 2), "eval_loss_ci95": (loss - half, loss + half)}
    config = SHORT.model_copy(update={"lora_rank": rank})
    record = fits(number, speed, config, quality=quality)
    return record.model_copy(update={"epoch": an_epoch(), "is_baseline": number == 0})


def about_loss(*records: TrialRecord) -> StudySnapshot:
    return of_texts(*records, objectives=["tokens_per_second", "eval_loss"], weights="pretrained")
