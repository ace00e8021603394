"""Two ranks that train on texts, beside one that accumulates over as many micro-batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.lazy import lazily
from tests.sweep.data.prepared import prepared, prepared_pairs
from tests.sweep.training.two_processes import told_by_two

torch = lazily("torch")
by_two = lazily("tests.sweep.training.texts_by_two")


@pytest.mark.integration
def test_two_ranks_step_as_one_that_accumulates_over_the_micro_batches_of_both(
    tmp_path: Path,
) -> None:
    lengths = np.random.default_rng(2).integers(4, 30, 80)
    prepared(tmp_path / "texts", lengths, completions=lengths // 2)
    prepared_pairs(tmp_path / "pairs", count=40)
    first, second = told_by_two("texts_by_two", directory=tmp_path, device="cpu")
    assert first == second
    cpu = torch.device("cpu")
    alone = [by_two.told_by(kind, tmp_path, cpu, is_lesson=False) for kind in by_two.KINDS]
    alone.append(by_two.told_by("none", tmp_path, cpu, is_lesson=True))
    found = np.array(first, dtype=float).reshape(len(alone), -1)
    assert found == pytest.approx(np.array(alone), rel=1e-5)
    assert all(losses[-2] < losses[0] for losses in alone[:-1]), "it learns"
