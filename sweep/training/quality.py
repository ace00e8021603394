"""What a configuration learns of texts: a short training from fresh adapters on the resident base,
then the loss of texts that were held out, each alone and cut to one length for all configurations.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from qlora_sweep.search_spaces.config import SCHEDULE_WARMUP_STEPS, TrialConfig
from qlora_sweep.storage.confirmations import binomial_ci95
from qlora_sweep.storage.records import OUT_OF_TIME, Diverged, Lost, OutOfMemory, QualityReport
from qlora_sweep.sweep.data.batches import (
    Batch,
    QualityBatches,
    TokenizedDataset,
    held_out_batches,
    in_parts,
    loss_tokens,
)
from qlora_sweep.sweep.training.adapters import Attached, attached
from qlora_sweep.sweep.training.device import Device
from qlora_sweep.sweep.training.messages import Progress, QualityCommand
from qlora_sweep.sweep.training.model import BaseModel
from qlora_sweep.sweep.training.process_group import (
    NO_LIMIT,
    TimeLimit,
    all_gathered,
    rank,
    world_size,
)
from qlora_sweep.sweep.training.step import TrainingLoop, out_of_memory, told_in_evaluation

_EVALUATED_AT_ONCE = 4096
"""Tokens of a micro-batch of the evaluation at most, unless one text has more: the logits of all
are held."""
_BEAT_SECONDS = 2.0
_DOING = "training for its quality: "


class _Judged(NamedTuple):
    """What held-out texts or pairs come to."""

    loss: float = 0.0
    """Sum of the mean losses, each times its weight."""
    weight: int = 0
    """Supervised tokens, or pairs."""
    tokens: int = 0
    """Supervised ones."""
    rows: int = 0
    """Texts, or pairs."""
    wins: int = 0
    """Pairs of which the chosen completion gained more."""

    def plus(self, other: _Judged) -> _Judged:
        """Return what both come to."""
        return _Judged._make(map(sum, zip(self, other, strict=True)))


@dataclass
class Quality:
    """One configuration's training for its quality, on the base that is there.

    Attributes:
        report: called now and then.
        limit: until when it may train; cut short, it says nothing.
        is_apart: whether it ended where other ranks continue, for good.
    """

    base: BaseModel
    config: TrialConfig
    dataset: TokenizedDataset
    question: QualityCommand
    device: Device
    report: Callable[[Progress], object] = lambda _: None
    limit: TimeLimit = NO_LIMIT
    is_apart: bool = False
    _loop: TrainingLoop | None = None
    _steps: int = 0
    _reported_at: float = field(default_factory=time.perf_counter)

    def run(self) -> QualityReport | Diverged | OutOfMemory | Lost | None:
        """Return what was learned, or why that is not known; None where memory ran out over a
        single held-out text and training had enough. The base is then as it was.

        Raises:
            InputError: no text carries loss, or none of those held out.
            Exception: what is not of memory.
        """
        self._tell()
        try:
            # The adapters are drawn where they are attached.
            torch.manual_seed(self.question.seed)
            with attached(self.base, self.config) as attachment:
                return self._learn(attachment)
        except Exception as error:
            if not self.device.ran_out(error):
                raise
            outcome = out_of_memory(error, self.device, self._loop, doing=_DOING)
            self.is_apart = world_size() > 1
        finally:
            # A caught exception keeps its frames alive, and they the tensors, until here.
            self._loop = None
            self.device.release()
        return outcome

    def _learn(self, attachment: Attached) -> QualityReport | Diverged | Lost | None:
        begun = time.perf_counter()
        asked = self.question
        lesson = QualityBatches(
            self.dataset, self.config, tokens=asked.tokens, seed=asked.seed, rank=rank()
        )
        steps = len(lesson) // self.config.accumulation_steps
        loop = TrainingLoop(
            attachment,
            self.config,
            seed=asked.seed,
            batches=[lesson],
            schedule=(SCHEDULE_WARMUP_STEPS, steps),
            on_stage=lambda _: self._beat(),
        )
        self._loop = loop
        losses: list[float] = []
        for step in range(steps):
            if self.limit.is_over():
                return OUT_OF_TIME
            loss = loop.step(on_micro_step=self._beat)
            # It is on its way to the host until then.
            self.device.mark().wait()
            of_ranks = all_gathered(float(loss))
            losses.append(sum(of_ranks) / len(of_ranks))
            self._steps = step + 1
            self._tell()
            if not math.isfinite(losses[-1]):
                return Diverged(step=step, detail=f"{_DOING}loss {losses[-1]}")
        evaluated = self._evaluate(loop)
        if evaluated is None:
            return None
        total, blocks = evaluated
        eval_loss = total.loss / total.weight
        if not math.isfinite(eval_loss):
            return Diverged(step=steps, detail=f"held-out texts: loss {eval_loss}")
        wins = interval = None
        if self.config.is_on_pairs:
            wins = total.wins
            interval = binomial_ci95(total.wins, total.rows)
        tokens = lesson.tokens.reshape(steps, -1).sum(1)
        return QualityReport(
            eval_loss=eval_loss,
            eval_tokens=total.tokens,
            eval_rows=total.rows,
            eval_wins=wins,
            reward_accuracy_ci95=interval,
            eval_blocks=blocks,
            eval_seq_len=asked.eval_seq_len,
            train_tokens=int(tokens.sum()),
            train_loss=float(np.average(losses, weights=tokens)),
            steps=steps,
            seconds=time.perf_counter() - begun,
            seed=asked.seed,
        )

    def _evaluate(self, loop: TrainingLoop) -> tuple[_Judged, tuple[tuple[float, int], ...]] | None:
        """Return what all held-out texts come to, and the mean loss and the weight of each block of
        them."""
        asked = self.question
        plain = self.config.changed(packing="none", compile=False, seq_len=asked.eval_seq_len)
        most = min(_EVALUATED_AT_ONCE, self.config.tokens_per_micro_batch)
        batches = held_out_batches(
            self.dataset, plain, tokens=asked.eval_tokens, tokens_at_once=most
        )
        total = _Judged()
        blocks = defaultdict[int, _Judged](_Judged)
        # A compiled layer would be compiled for each of these shapes.
        with torch.compiler.set_stance("force_eager"), loop.evaluating():
            for block, batch in batches:
                judged = self._judged(loop, batch)
                if judged is None:
                    return None
                total = total.plus(judged)
                blocks[block] = blocks[block].plus(judged)
                self._beat()
        return total, tuple((one.loss / one.weight, one.weight) for one in blocks.values())

    def _judged(self, loop: TrainingLoop, batch: Batch) -> _Judged | None:
        """Return what a micro-batch comes to, of its halves where there is no room for all of it;
        None where there is none for a single text or pair."""
        device = self.base.model.device
        rows_per_sample = self.config.rows_per_sample
        samples = len(batch["input_ids"]) // rows_per_sample
        tokens = loss_tokens(batch)
        options = told_in_evaluation(self.config)
        try:
            # Nothing here keeps what is on the device where that fails.
            loss = loop.loss_of({key: value.to(device) for key, value in batch.items()} | options)
        except Exception as error:
            if not self.device.ran_out(error):
                raise
        else:
            if not self.config.is_on_pairs:
                return _Judged(loss * tokens, tokens, tokens, samples)
            wins = int((loop.trained.newest.margins(self.config) > 0).sum())
            return _Judged(loss * samples, samples, tokens, samples, wins)
        self.device.release()
        if samples == 1:
            return None
        total = _Judged()
        for half in in_parts(batch, 2, rows_per_sample):
            judged = self._judged(loop, half)
            if judged is None:
                return None
            total = total.plus(judged)
        return total

    def _beat(self) -> None:
        """Give a sign of life, where the last one was some time ago."""
        if time.perf_counter() - self._reported_at >= _BEAT_SECONDS:
            self._reported_at = time.perf_counter()
            self._tell()

    def _tell(self) -> None:
        peak = self.device.memory().peak_allocated_bytes
        self.report(Progress(phase="quality", step=self._steps, allocated_bytes=peak))
