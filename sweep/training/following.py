"""Owns a trial as every process but the first sees it: the same steps, when the first one says so.

Knows nothing of pipes, nor of when to stop: that is the first process's (`sweep.training.trial`).
"""

from __future__ import annotations

import contextlib
import math
from typing import Self

import torch

from search_spaces.config import TrialConfig
from storage.records import Outcome
from sweep.training.adapters import Attached, attached, held_share, local
from sweep.training.device import Device
from sweep.training.model import BaseModel
from sweep.training.step import TrainingLoop
from sweep.training.team import Look, Place, fingerprint, group_size
from sweep.training.verdicts import verdict_of


class FollowedTrial:
    """One configuration on this process's base, among others that do the same; a context manager.

    Args:
        base: resident; on exit it is as it was.
        config: what is trained.
        device: of this process.
        place: its own.
        seed: of weights and rows; the rows of each place are its own.
        micro_steps: that are really run of an optimizer step.
    """

    def __init__(
        self,
        base: BaseModel,
        config: TrialConfig,
        *,
        device: Device,
        place: Place,
        seed: int,
        micro_steps: int,
    ) -> None:
        self._base, self._config, self._device, self._place = base, config, device, place
        self._seed, self._micro_steps = seed, micro_steps
        self._undo = contextlib.ExitStack()
        self._watching = contextlib.ExitStack()
        self._attached: Attached | None = None
        self._loop: TrainingLoop | None = None
        self._loss: torch.Tensor | None = None

    def __enter__(self) -> Self:
        self._device.reset_peak()
        with self._undo:
            self._attached = self._undo.enter_context(
                attached(
                    self._base, self._config, device=self._device.torch_device, seed=self._seed
                )
            )
            self._loop = TrainingLoop(
                self._attached,
                self._config,
                vocab_size=int(self._base.model.get_input_embeddings().num_embeddings),
                seed=self._seed,
                micro_steps=self._micro_steps,
                on_stage=self._device.enter,
                place=self._place,
            )
            # What was sent to make all adapters alike is not a step's.
            self._device.mark().wait()
            # The first steps have the peak; whoever is asked to show it has done them.
            self._watching.enter_context(self._device.observed())
            self._undo = self._undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._watching.close()
        self._loop = self._attached = self._loss = None
        self._undo.close()

    def step(self) -> None:
        """Queue one optimizer step."""
        assert self._loop is not None, "steps are within the context"
        self._loss = self._loop.step()

    def evaluate(self, *, batches: int) -> None:
        """Take part in a pass without gradients."""
        assert self._loop is not None, "evaluations are within the context"
        self._loop.evaluate(batches=batches)

    def look(self) -> Look:
        """Return what there is to see, once all steps are done."""
        assert self._loop is not None, "there is something to see within the context"
        assert self._attached is not None
        self._device.mark().wait()
        self._watching.close()
        newest = self._loop.newest
        loss = math.nan if self._loss is None else float(self._loss)
        return Look(
            rank=self._place.rank,
            size=group_size(),
            adapters=fingerprint(map(local, self._attached.trainable_parameters())),
            tokens="" if newest is None else fingerprint([newest]),
            held_share=held_share(self._attached),
            peak_allocated_bytes=self._device.peak_allocated_bytes(),
            peak_stage=self._device.peak_stage(),
            peak_reserved_bytes=self._device.peak_reserved_bytes(),
            allocator_retries=self._device.allocator_retries(),
            spilled_bytes=self._device.spilled_bytes(),
            loss=loss if math.isfinite(loss) else None,
        )

    def verdict(self, error: Exception) -> Outcome | None:
        """Return what an exception means that is being handled; None for the unknown."""
        return verdict_of(error, self._config, device=self._device, loop=self._loop)
