"""Studies with a winner to export."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.dataset_choice import DatasetKind, DatasetSummary
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage.definition import StudyDefinition, StudySnapshot, Target
from qlora_sweep.storage.records import Measured, Measurement
from qlora_sweep.sweep.export.formats import exported, joined_rows
from tests.storage import builders
from tests.sweep.prepared_dataset import a_summary

MODEL = ModelSpec(
    name="mistral-7b-v0.3",
    source="shipped",
    config={"model_type": "mistral", "num_hidden_layers": 32},
)
PAIR = ("prompt", "chosen", "rejected")
"""Columns of a dataset of pairs."""
STARTED_AT = "2026-11-21T10:00:00+00:00"
HOSTILE = "x'''\"\"\"\\\n__import__('os').abort()\r# {{ 7*7 }} {% raw %}\u2028: - &a !!python\udcff"


def some_dataset(kind: DatasetKind = "messages", **changes: Any) -> DatasetSummary:
    """Return what a study keeps of texts of a kind."""
    values: dict[str, Any] = {"kind": kind, "source": "/texts.jsonl", "tokenizer": "mine"}
    values |= {"fingerprint": "f00d", "rows": 60, "tokens": 6000, "loss_tokens": 5000}
    values |= {
        "longest": 200,
        "quantiles": {"p50": 90, "p90": 120, "p95": 150, "p99": 180, "max": 200},
    }
    return a_summary(**values | changes)


def a_measurement(**changes: Any) -> Measurement:
    values: dict[str, Any] = {"step_seconds": 0.305, "step_seconds_ci95": (0.304, 0.306)}
    values |= {"peak_allocated_bytes": 20 * GIB, "peak_reserved_bytes": 21 * GIB}
    values |= {"trainable_parameters": 13_631_488, "flags": ("emulated",)}
    return builders.a_measurement(16_800.0, **values | changes)


def a_study(
    config: TrialConfig | None = None,
    *,
    measurement: Measurement | None = None,
    name: str = "a10-mistral",
    model: ModelSpec = MODEL,
    emulated_on: str | None = "NVIDIA H200",
    dataset: DatasetSummary | None = None,
) -> StudySnapshot:
    """Return a study of one trial, which fits, over a space that holds it."""
    tried = config or TrialConfig()
    outcome = Measured(measurement=measurement or a_measurement())
    fixed = tried.model_dump(mode="json")
    space = {
        "name": "small",
        "dimensions": {"micro_batch_size": {"choices": [fixed.pop("micro_batch_size")]}},
        "fixed": fixed,
        "data": None if dataset is None else {"texts": dataset.source},
    }
    definition = StudyDefinition(
        space=SearchSpace.model_validate(space),
        model=model.to_json(),
        model_fingerprint="f00d",
        target=Target(
            gpu="a10", device="cuda", budget_bytes=int(21.5 * GIB), emulated_on=emulated_on
        ),
        texts=dataset,
    )
    return StudySnapshot(
        name=name,
        definition=definition,
        environment={
            "gpu": "NVIDIA A10",
            "driver": "580.65.06",
            "commit": "0123abcd",
            "versions": {"torch": "2.13.0", "triton": None, "qlora-sweep": "0.1.0"},
        },
        records=(builders.a_record(17, outcome, config=tried, started_at=STARTED_AT),),
    )


@cache
def rows_module() -> ModuleType:
    """Return the file that lies beside scripts as a module."""
    module = ModuleType("rows")
    sys.modules["rows"] = module
    exec(compile(joined_rows(), "rows.py", "exec"), vars(module))
    return module


def imported(script: str, path: Path) -> ModuleType:
    """Write an exported script and return it as a module; importing it does nothing."""
    path.write_text(script, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As the file that lies beside it.
    sys.modules["rows"] = rows_module()
    spec.loader.exec_module(module)
    return module


def export(study: StudySnapshot, *, format: str) -> str:
    """Return the text of a study's winner in a format."""
    return exported(study, format=format).text
