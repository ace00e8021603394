"""What is predicted of every configuration that was measured, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from tests.golden.conftest import as_pinned, frozen  # noqa: F401
from tests.golden.frozen import Frozen
from tests.sweep.predict.rows import DATA, Predict, Row, describe, read_rows

FILES = [path.stem for path in sorted(DATA.glob("*_h200.jsonl"))]


@pytest.mark.parametrize("name", FILES)
def test_predicted_peaks(name: str, predict_row: Predict, frozen: Frozen) -> None:  # noqa: F811
    def predicted(row: Row) -> dict[str, Any]:
        memory = predict_row(row)
        return {
            "peak": memory.peak_allocated_bytes,
            "reserved": memory.peak_reserved_bytes,
            "moment": memory.moment,
            "uncertainty": [memory.uncertainty, memory.reserved_uncertainty],
            "parts": memory.breakdown,
        }

    frozen(f"peaks_{name}", {describe(row): predicted(row) for row in read_rows(f"{name}.jsonl")})
