"""Owns what a soak does between its steps, as a training does now and then: it evaluates and saves.

Both are where a training dies that fitted: in evaluation mode the fused loss holds the logits after
all, and what was freed between the steps comes back cut up. Knows nothing of budgets or outcomes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from storage.records import SoakReport
from sweep.training.device import Device
from sweep.training.step import TrainingLoop

INTERLUDE_BATCHES = 2
"""Micro-batches of the pass: the second comes while the first one's memory is still cached."""


@dataclass
class Interlude:
    """An evaluation pass and a checkpoint, once in a soak.

    Attributes:
        doing: what of it is going on; None outside.
    """

    device: Device
    doing: str | None = None
    _loss: float = 0.0
    _evaluation_seconds: float = 0.0
    _checkpoint_bytes: int = 0
    _checkpoint_seconds: float = 0.0
    is_over: bool = False

    def play(self, loop: TrainingLoop, *, beat: Callable[[], object]) -> None:
        """Evaluate on full-length rows, then save to a directory that is gone afterwards.

        Args:
            loop: goes on as it was.
            beat: called after each of the two, as a sign of life.

        Raises:
            RuntimeError: whatever the device raises; `doing` says in which of the two.
            OSError: there is no room for the checkpoint.
        """
        self.doing, begun = "an evaluation pass", time.perf_counter()
        with self.device.observed():
            # The loss is read back, so the device is done with it.
            self._loss = loop.evaluate(batches=INTERLUDE_BATCHES)
        self._evaluation_seconds = time.perf_counter() - begun
        beat()
        self.doing, begun = "saving a checkpoint", time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="sweep-soak-") as name:
            loop.save(Path(name))
            files = (path for path in Path(name).rglob("*") if path.is_file())
            self._checkpoint_bytes = sum(path.stat().st_size for path in files)
        self._checkpoint_seconds = time.perf_counter() - begun
        beat()
        self.doing, self.is_over = None, True

    def report(self, *, steps: int, seconds: float) -> SoakReport:
        """Return what the soak did, of so many steps and seconds."""
        assert self.is_over, "a soak ends after its interlude"
        return SoakReport(
            steps=steps,
            seconds=seconds,
            evaluation_loss=self._loss,
            evaluation_seconds=self._evaluation_seconds,
            checkpoint_bytes=self._checkpoint_bytes,
            checkpoint_seconds=self._checkpoint_seconds,
        )
