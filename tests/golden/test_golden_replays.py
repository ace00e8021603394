"""What samplers choose on the recorded surfaces, and when they find the best."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.storage.surfaces import read_surface
from qlora_sweep.sweep.study.recorded import recorded_peaks
from tests.bench.searching import Recorded, SamplerName, trials_of
from tests.golden.frozen import Frozen
from tests.reports.synthetic import SURFACES
from tests.sweep.study.wrong_priors import wrong

BUDGETS = (8.0, 12.0, 21.5, 39.0)
"""GiB. Searches of guided are the same for all seeds: what differs is the budget, and the prior."""
SEEDS = 8
TRIALS = 25
KNOWN = (np.show_config(mode="dicts") or {}).get("SIMD Extensions", {}).get("found", ())
"""Without AVX2 numpy rounds otherwise, and Optuna's own draws go another way."""
TPE = pytest.param("tpe", marks=pytest.mark.skipif("X86_V3" not in KNOWN, reason="needs AVX2"))


# Not gp: its searches take longer than all others together, and each choice is an optimization.
@pytest.mark.parametrize("sampler", ["guided", TPE, "random"])
@pytest.mark.parametrize("surface", ["mistral-7b-v0.3", "tinyllama-1.1b"])
def test_choices_of_samplers(surface: str, sampler: SamplerName, frozen: Frozen) -> None:
    known = read_surface(str(SURFACES / f"{surface}_h200.jsonl"))
    places = {id(row): number for number, row in enumerate(known.rows)}

    def choices(seed: int) -> dict[str, object]:
        repeated, at = divmod(seed, len(BUDGETS))
        recorded = Recorded(known, int(BUDGETS[at] * GIB), recorded_peaks(known))
        if repeated:
            recorded = wrong(recorded, is_reversed=True, memory=1.3)
        rows = [row for row, _ in islice(trials_of(recorded, sampler, seed=seed), TRIALS)]
        found = (number for number, row in enumerate(rows, start=1) if recorded.is_found(row))
        return {"rows": [places[id(row)] for row in rows], "found": next(found, None)}

    frozen(f"replay_{surface}_{sampler}", {f"seed {seed}": choices(seed) for seed in range(SEEDS)})
