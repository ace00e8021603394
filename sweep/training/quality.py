"""Owns what a configuration learns of texts: a short training from fresh adapters on the resident
base, then the loss of texts that were held out.

Every configuration trains on as many tokens that carry loss, of the same texts in the same order,
and is asked about the same held-out texts, each alone and cut to one length for all. Knows nothing
of speed, processes or studies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils.data import Dataset

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError, words_of
from storage.records import Diverged, OutOfMemory, QualityReport
from sweep.data.batches import Batch, row_of
from sweep.data.collating import IGNORED, collator
from sweep.data.epoch import Integers, cut, epoch, packed
from sweep.data.opening import open_tokens
from sweep.data.split import split
from sweep.training.adapters import Attached, attached
from sweep.training.compiling import eager
from sweep.training.device import Device
from sweep.training.exceptions import requested_bytes
from sweep.training.model import BaseModel
from sweep.training.step import WEIGHT, Schedule, TrainingLoop
from sweep.training.texts import Texts, is_packed

_WARMUP_SHARE = 0.05
"""Of the optimizer steps, in which the learning rate rises; too few steps have none."""
_EVALUATED_AT_ONCE = 4096
"""Tokens of a micro-batch of the evaluation at most, unless one text has more: the logits of all
are held."""
_DETAIL_LENGTH = 600
_BEAT_SECONDS = 2.0


@dataclass(frozen=True)
class Question:
    """How much is trained, and what is asked then."""

    tokens: int
    """That carry loss; the last optimizer step is a whole one."""
    seed: int
    """Of the adapters and of the texts' order."""
    eval_seq_len: int
    eval_tokens: int
    """That carry loss; all there are where those are fewer."""


class NoRoomToEvaluateError(RuntimeError):
    """Memory ran out over a single text of the evaluation."""


@dataclass
class Quality:
    """One configuration's training for its quality, on the base that is there.

    Attributes:
        beat: called with the optimizer steps done, now and then.
    """

    base: BaseModel
    config: TrialConfig
    texts: Texts
    question: Question
    device: Device
    beat: Callable[[int], object]
    _loop: TrainingLoop | None = None
    _steps: int = 0
    _beaten: float = field(default_factory=time.perf_counter)

    def run(self) -> QualityReport | Diverged | OutOfMemory:
        """Return what was learned, or why that is not known. The base is then as it was.

        Raises:
            InputError: no text carries loss, or none of those held out.
            NoRoomToEvaluateError: for one text there was no memory, where training had enough.
            Exception: what is not of memory.
        """
        outcome: QualityReport | Diverged | OutOfMemory
        try:
            # The adapters are drawn where they are attached.
            torch.manual_seed(self.question.seed)
            with attached(self.base, self.config) as attachment:
                outcome = self._learn(attachment)
        except NoRoomToEvaluateError:
            raise
        except Exception as error:
            if not self.device.ran_out(error):
                raise
            outcome = self._out_of_memory(error)
        finally:
            # A caught exception keeps its frames alive, and they the tensors, until here.
            self._loop = None
            self.device.release()
        return outcome

    def _learn(self, attachment: Attached) -> QualityReport | Diverged:
        begun = time.perf_counter()
        lesson = Lesson.of(self.texts, self.config, self.question)
        steps = len(lesson) // self.config.accumulation_steps
        self._loop = loop = TrainingLoop(
            attachment,
            self.config,
            vocab_size=self.base.model.get_input_embeddings().num_embeddings,
            seed=self.question.seed,
            batches=lesson,
            schedule=Schedule(warmup=int(_WARMUP_SHARE * steps), steps=steps),
        )
        losses: list[float] = []
        for step in range(steps):
            losses.append(float(loop.step(on_micro_step=self._sign)))
            self._steps = step + 1
            self.beat(self._steps)
            if not math.isfinite(losses[-1]):
                return Diverged(step=step, detail=f"training for its quality: loss {losses[-1]}")
        tokens = lesson.loss_tokens_of_steps()
        eval_loss, eval_tokens = self._evaluate(attachment, loop)
        if not math.isfinite(eval_loss):
            return Diverged(step=steps, detail=f"held-out texts: loss {eval_loss}")
        return QualityReport(
            eval_loss=eval_loss,
            eval_tokens=eval_tokens,
            eval_seq_len=self.question.eval_seq_len,
            train_tokens=sum(tokens),
            train_loss=float(np.average(losses, weights=tokens)),
            steps=steps,
            seconds=time.perf_counter() - begun,
            seed=self.question.seed,
        )

    def _evaluate(self, attachment: Attached, loop: TrainingLoop) -> tuple[float, int]:
        """Return the mean loss of the held-out tokens that carry loss, and how many those are."""
        plain = self.config.model_copy(
            update={"packing": "none", "seq_len": self.question.eval_seq_len, "compile": False}
        )
        chosen = _held_out(self.texts, self.question)
        rows, collate = open_tokens(self.texts.directory).with_format("numpy"), collator(plain, 0)
        most = min(_EVALUATED_AT_ONCE, self.config.tokens_per_micro_batch)
        total, count = 0.0, 0
        with eager(attachment.layers), loop.evaluating():
            for part in _batched(chosen, most=most):
                batch = collate([row_of(rows, np.array([number]), plain) for number, _ in part])
                loss, tokens = self._loss(loop, batch), loss_tokens(batch)
                total, count = total + loss * tokens, count + tokens
                self._sign()
        return total / count, count

    def _loss(self, loop: TrainingLoop, batch: Batch) -> float:
        """Return a micro-batch's mean loss, of its halves where there is no room for all of it."""
        try:
            return loop.loss_of(self._on_device(batch))
        except Exception as error:
            if not self.device.ran_out(error):
                raise
            if len(batch["input_ids"]) == 1:
                raise NoRoomToEvaluateError(words_of(error)[:_DETAIL_LENGTH]) from None
        self.device.release()
        middle = len(batch["input_ids"]) // 2
        halves = [{k: v[part] for k, v in batch.items()} for part in _halves(middle)]
        tokens = [loss_tokens(half) for half in halves]
        losses = [self._loss(loop, half) for half in halves]
        return sum(n * loss for n, loss in zip(tokens, losses, strict=True)) / sum(tokens)

    def _on_device(self, batch: Batch) -> Batch:
        moved = {key: value.to(self.base.model.device) for key, value in batch.items()}
        # Liger's loss holds the logits in evaluation mode unless it is told not to.
        return moved if self.config.kernels == "hf" else {**moved, "skip_logits": True}

    def _sign(self) -> None:
        """Give a sign of life, where the last one was some time ago."""
        if time.perf_counter() - self._beaten >= _BEAT_SECONDS:
            self._beaten = time.perf_counter()
            self.beat(self._steps)

    def _out_of_memory(self, error: Exception) -> OutOfMemory:
        loop = self._loop
        is_loaded = loop is None or loop.stage == "load"
        return OutOfMemory(
            stage="forward" if is_loaded or loop is None else loop.stage,
            step=0 if loop is None else loop.micro_step,
            requested_bytes=requested_bytes(error),
            peak_allocated_bytes=self.device.peak_allocated_bytes(),
            detail=f"training for its quality: {words_of(error)}"[:_DETAIL_LENGTH],
        )


def _halves(middle: int) -> tuple[slice, slice]:
    return slice(None, middle), slice(middle, None)


def loss_tokens(batch: Batch) -> int:
    """Return how many tokens of a micro-batch carry loss."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


@dataclass(eq=False)
class Lesson(Dataset[Batch]):
    """The micro-batches of a training on a budget of tokens, in whole optimizer steps.

    Each has the weight with which its mean loss counts: by its tokens that carry loss, as Trainer
    counts them over an accumulation.
    """

    texts: Texts
    config: TrialConfig
    rows: list[Integers]
    """Numbers of the texts in each row."""
    _tokens: list[list[int]] = field(default_factory=list)
    """Loss-carrying tokens of each micro-batch of an optimizer step."""

    @classmethod
    def of(cls, texts: Texts, config: TrialConfig, question: Question) -> Lesson:
        """Return what a configuration trains on.

        Raises:
            InputError: no text carries loss.
        """
        rows = _rows(texts, config, question)
        return cls(texts, config, rows)

    def __post_init__(self) -> None:
        self._tokenized = open_tokens(self.texts.directory).with_format("numpy")
        self._collate = collator(self.config, 0)
        self._step: list[Batch] = []

    def __len__(self) -> int:
        return len(self.rows) // self.config.micro_batch_size

    def __getitem__(self, index: int) -> Batch:
        """Return a micro-batch; to be asked for in order."""
        position = index % self.config.accumulation_steps
        if position == 0:
            self._begin_step(index)
        batch, tokens = self._step[position], self._tokens[-1]
        return {**batch, WEIGHT: tokens[position] * len(tokens) / sum(tokens)}

    def loss_tokens_of_steps(self) -> list[int]:
        """Return the tokens that carry loss of each optimizer step so far."""
        return [sum(step) for step in self._tokens]

    def _begin_step(self, first: int) -> None:
        numbers = range(first, first + self.config.accumulation_steps)
        self._step = [self._made(number) for number in numbers]
        self._tokens.append([loss_tokens(batch) for batch in self._step])

    def _made(self, index: int) -> Batch:
        size = self.config.micro_batch_size
        rows = self.rows[index * size : (index + 1) * size]
        return self._collate([row_of(self._tokenized, row, self.config) for row in rows])


def _rows(texts: Texts, config: TrialConfig, question: Question) -> list[Integers]:
    """Return the rows of so many optimizer steps as have the budget's tokens.

    Raises:
        InputError: no text carries loss.
    """
    kept, loss = _cut(texts, config.seq_len)
    size = config.samples_per_step
    # The last step is a whole one: of packed rows, whose texts are not known before, one more.
    extra = size * config.seq_len if is_packed(config) else 0
    chosen = _chosen(texts, loss, tokens=question.tokens + extra, size=size, seed=question.seed)
    match config.packing:
        case "packed":
            rows = packed(kept[chosen], config.seq_len)
            order = np.random.default_rng(question.seed).permutation(len(rows))
            return _whole_steps([chosen[rows[row]] for row in order], loss, question.tokens, size)
        case "grouped":
            whole = epoch(kept[chosen], loss[chosen], config, seed=question.seed, are_cut=True)
            return [chosen[whole.rows.of(row)] for row in range(len(chosen))]
        case _:
            return [chosen[index : index + 1] for index in range(len(chosen))]


def _chosen(texts: Texts, loss: Integers, *, tokens: int, size: int, seed: int) -> Integers:
    """Return the first texts that have so many tokens to learn from, a multiple of ``size``."""
    numbers: list[int] = []
    have = 0
    for number in _in_order(texts, loss, seed=seed):
        if have >= tokens and len(numbers) % size == 0:
            break
        numbers.append(number)
        have += int(loss[number])
    if not numbers:
        raise InputError(
            "no text has a token that carries loss at this seq_len; take a longer one, or let "
            "prompts carry loss too"
        )
    return np.array(numbers, dtype=np.int64)


def _whole_steps(rows: list[Integers], loss: Integers, tokens: int, size: int) -> list[Integers]:
    """Return the fewest rows of whole optimizer steps that have so many tokens, or all of them."""
    reached = np.searchsorted(np.cumsum([int(loss[row].sum()) for row in rows]), tokens) + 1
    steps = min(-(-int(reached) // size), len(rows) // size)
    return rows[: steps * size]


def _cut(texts: Texts, seq_len: int) -> tuple[Integers, Integers]:
    lengths = np.load(texts.directory / "lengths.npy", mmap_mode="r")
    loss_lengths = np.load(texts.directory / "loss_lengths.npy", mmap_mode="r")
    return cut(lengths, loss_lengths, seq_len)


def _in_order(texts: Texts, loss: Integers, *, seed: int) -> Iterator[int]:
    """Yield the numbers of the texts that are trained on, in one order for all configurations; one
    epoch after another."""
    train, _ = split(len(loss), texts.eval_fraction, texts.seed)
    random = np.random.default_rng(seed)
    while np.any(loss[train] > 0):
        yield from (int(number) for number in random.permutation(train) if loss[number] > 0)


def _held_out(texts: Texts, question: Question) -> list[tuple[int, int]]:
    """Return the held-out texts that are looked at, with their lengths, the longest first.

    Raises:
        InputError: there is none with a token that carries loss.
    """
    kept, loss = _cut(texts, question.eval_seq_len)
    _, held = split(len(loss), texts.eval_fraction, texts.seed)
    order = np.random.default_rng(texts.seed).permutation(held)
    order = order[loss[order] > 0]
    enough = np.searchsorted(np.cumsum(loss[order]), question.eval_tokens) + 1
    chosen = [(int(number), int(kept[number])) for number in order[:enough]]
    if not chosen:
        raise InputError(
            "no text with a token that carries loss is held out; take a larger eval_fraction"
        )
    return sorted(chosen, key=lambda pair: (-pair[1], pair[0]))


def _batched(
    chosen: Sequence[tuple[int, int]], *, most: int
) -> Iterator[Sequence[tuple[int, int]]]:
    """Yield texts of like length, so many that their padded tokens stay within ``most``."""
    begin = 0
    while begin < len(chosen):
        count = max(1, most // chosen[begin][1])
        yield chosen[begin : begin + count]
        begin += count
