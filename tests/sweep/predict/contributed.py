"""The files under `tests/data/contributions`, made of recordings that are committed beside them.

`python -m tests.sweep.predict.contributed` writes them again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qlora_sweep.search_spaces.gpus import find_gpu
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.storage.surfaces import read_surface
from tests.sweep.predict.rows import DATA, TABLE, config_of, read_rows

FOLDER = DATA / "contributions"
VERSIONS = {
    "torch": "2.11.0+cu130",
    "transformers": "5.17.0",
    "peft": "0.21.2",
    "bitsandbytes": "0.50.2",
    "liger-kernel": "0.8.5",
}
"""Of the H200, by docs/lab/claims.md."""
EVERY = 8
"""Of a surface's trials one in so many: about as many as a study has."""


def a_text(
    gpu: str,
    model: str,
    rows: list[dict[str, Any]],
    *,
    versions: dict[str, str],
    date: str = "2026-11-21",
) -> str:
    """A contribution of rows with a configuration, seconds and peaks."""
    spec, gpu_spec = load_model_spec(model), find_gpu(gpu)
    header = {
        "surface": 1,
        "model": spec.name,
        "model_config": spec.config,
        "gpu": gpu_spec.name,
        "measured_on": gpu_spec.product,
        "date": date,
        "contribution": 1,
        "versions": versions,
    }
    lines = [header]
    for row in rows:
        config = config_of(row)
        lines.append(
            {
                "config": config.model_dump(mode="json"),
                "verdict": "fits",
                "tokens_per_second": config.tokens_per_step / row["step_seconds"],
                **{
                    key: row.get(key)
                    for key in (
                        *("step_seconds", "peak_allocated_bytes", "peak_reserved_bytes"),
                        *("device_seconds", "step_seconds_ci95"),
                    )
                },
            }
        )
    return "".join(json.dumps(line) + "\n" for line in lines)


def of_surface(model: str, *, every: int = EVERY) -> str:
    surface = read_surface(str(DATA / "surfaces" / f"{model}_h200.jsonl"))
    rows = [row.model_dump(mode="json") for row in surface.rows if row.verdict == "fits"]
    return a_text("h200", model, rows[::every], versions=VERSIONS)


def of_table() -> str:
    rows = [row for row in TABLE if row["model"] == "mistral-7b-v0.3"]
    return a_text("h200", "mistral-7b-v0.3", rows, versions=VERSIONS)


def of_h100() -> str:
    rows, torch = read_rows("studies_h100.jsonl"), {"torch": VERSIONS["torch"]}
    return a_text("h100-80gb", "mistral-7b-v0.3", rows, date="2026-11-24", versions=torch)


FILES: dict[str, Callable[[], str]] = {
    "h200_surface_mistral-7b-v0.3.jsonl": lambda: of_surface("mistral-7b-v0.3"),
    "h200_surface_tinyllama-1.1b.jsonl": lambda: of_surface("tinyllama-1.1b"),
    "h200_table_mistral-7b-v0.3.jsonl": of_table,
    "h100_studies_mistral-7b-v0.3.jsonl": of_h100,
}


def path_of(name: str) -> Path:
    return FOLDER / name


if __name__ == "__main__":
    for name, text in FILES.items():
        path_of(name).write_text(text(), encoding="utf-8")
