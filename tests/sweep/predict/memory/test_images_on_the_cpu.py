"""What is predicted of rows with images, against what real trainings of tiny models take.

Every allocation on the CPU is followed, with the casts of a GPU's autocast. What a sample adds is
compared, as in `test_families_on_the_cpu`; there the next micro-batch waits in the same memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.models import ModelSpec, checked_config
from qlora_sweep.sweep.predict.memory.predictor import TracingPredictor
from qlora_sweep.sweep.predict.memory.profile_store import TracingChildren
from tests.seeing import CONFIGS, QWEN, seeing, seeing_config
from tests.sweep.frozen import frozen_libraries  # noqa: F401
from tests.sweep.predict.memory.test_families_on_the_cpu import (  # noqa: F401
    linear_attention_on_a_cpu,
)

pytestmark = pytest.mark.integration
FEW, MANY = 1, 3
CASES: dict[str, dict[str, Any]] = {
    "recomputed": {"checkpoint_fraction": 1.0},
    "kept": {"checkpoint_fraction": 0.0},
    "half": {"checkpoint_fraction": 0.5},
    "more text": {"checkpoint_fraction": 0.0, "seq_len": 640},
    "larger": {"checkpoint_fraction": 1.0, "image_size": 640, "seq_len": 640},
    "all linear": {"checkpoint_fraction": 0.0, "target_modules": "all-linear"},
    "upcast": {"checkpoint_fraction": 1.0, "upcast_fp32": True},
}


@pytest.mark.usefixtures("linear_attention_on_a_cpu")
@pytest.mark.parametrize("case", ["recomputed", "kept"])
def test_a_sample_more_of_a_hybrid(
    tracing_child: TracingChildren, tmp_path: Path, case: str
) -> None:
    test_a_sample_more(tracing_child, tmp_path, "qwen3_5", case)


@pytest.mark.parametrize("case", ["recomputed", "kept"])
def test_a_sample_more_of_a_mixture(
    tracing_child: TracingChildren, tmp_path: Path, case: str
) -> None:
    test_a_sample_more(tracing_child, tmp_path, "qwen3_vl_moe", case)


def test_what_is_kept_of_one_tower_is_not_taken_for_another(
    tracing_child: TracingChildren, tmp_path: Path
) -> None:
    """Although the decoders are the same."""
    peaks = []
    for depth in (4, 8):
        vision = {**QWEN["vision_config"], "depth": depth}
        config = checked_config({**QWEN, "vision_config": vision}, label="tiny")
        model = ModelSpec("tiny", "directory", config)
        predictor = TracingPredictor(model, cache_dir=tmp_path, tracer=tracing_child)
        peaks.append(predictor.predict(seeing_config()).peak_allocated_bytes)
    assert peaks[1] > peaks[0]


def test_a_tower_that_cannot_be_built_ends_no_tracing_process(
    tracing_child: TracingChildren, tmp_path: Path
) -> None:
    whole = CONFIGS["gemma4"]
    vision = {**whole["vision_config"], "pooling_kernel_size": 0}
    config = checked_config({**whole, "vision_config": vision}, label="tiny")
    model = ModelSpec("tiny", "directory", config)
    predictor = TracingPredictor(model, cache_dir=tmp_path, tracer=tracing_child)
    with pytest.raises(InputError, match="pooling_kernel_size must be a whole number"):
        predictor.predict(seeing_config())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_a_sample_more(
    tracing_child: TracingChildren, tmp_path: Path, kind: str, case: str
) -> None:
    import torch

    from qlora_sweep.sweep.training.images import SeeingRows
    from qlora_sweep.sweep.training.model import build_base
    from tests.bench.family_trials import CastingAsCuda, cast_where_recomputed
    from tests.sweep.training.tiny import BRIEF, trial_on

    spec = seeing(kind)
    usual = {"image_size": 512, "seq_len": 320}
    configs = [
        seeing_config(micro_batch_size=rows, **{**usual, **CASES[case]}) for rows in (FEW, MANY)
    ]
    predictor = TracingPredictor(spec, cache_dir=tmp_path, tracer=tracing_child)
    predicted = [predictor.predict(config).peak_allocated_bytes for config in configs]
    base = build_base(configs[0], spec=spec, weights="random", device=torch.device("cpu"), seed=0)
    try:
        cast_where_recomputed(base)
        of_image = SeeingRows(configs[0].image_size or 0, base.model.config).inputs(
            torch.zeros(1, configs[0].seq_len, dtype=torch.bool)
        )
        waiting = sum(tensor.nbytes for tensor in of_image.values())
        with CastingAsCuda():
            outcomes = [trial_on(base, config, steps=BRIEF).run() for config in configs]
    finally:
        base.close()
    few, many = (one.measurement.peak_allocated_bytes for one in outcomes)  # type: ignore[union-attr]
    growth = many - few - (MANY - FEW) * waiting
    error = {"half": 0.02, "upcast": 0.01}.get(case, 0.003)
    assert growth == pytest.approx(predicted[1] - predicted[0], rel=error)
