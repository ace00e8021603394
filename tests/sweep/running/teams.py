"""What tests of workers on the CPU share: a runner, and what it measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from qlora_sweep.storage.definition import Target
from qlora_sweep.storage.records import Measurement
from qlora_sweep.sweep.running.supervisor import SupervisedRunner

LEARNED = ("train_loss", "eval_loss")


def a_cpu_runner(
    log: Path, *, model: ModelSpec | None = None, budget_bytes: int = GIB // 2, **options: Any
) -> SupervisedRunner:
    options.setdefault("target", Target(gpu="cpu", device="cpu", budget_bytes=budget_bytes))
    model = model or load_model_spec("demo")
    return SupervisedRunner(model, log_path=log, **options)


def assert_learned_alike(
    together: Measurement, alone: Measurement, *, rel: float, keys: tuple[str, ...] = LEARNED
) -> None:
    """Check that several GPUs learned what one does."""
    assert together.loss_tokens_per_step == pytest.approx(alone.loss_tokens_per_step, rel=0.1)
    assert together.quality is not None
    assert alone.quality is not None
    for key in keys:
        learned = getattr(together.quality, key)
        assert learned == pytest.approx(getattr(alone.quality, key), rel=rel)


def ranks(module: str = "qlora_sweep.sweep.running") -> list[tuple[int, int]]:
    """Return the processes below this one that are not the first of their ranks: rank, number."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            mark = b"QLORA_SWEEP_CHILD" in Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        is_rank = words[3:4] == [module.encode()] and words[6:7] not in ([], [b""])
        if is_rank and mark and _is_below_this(int(name)):
            found.append((int(words[6]), int(name)))
    return sorted(found)


def _is_below_this(number: int) -> bool:
    while number > 1:
        if number == os.getpid():
            return True
        try:
            number = int(Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except OSError:
            return False
    return False
