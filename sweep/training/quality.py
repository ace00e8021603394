"""What a configuration learns of texts: a short training from fresh adapters on the resident base,
then the loss of texts that were held out.

Every configuration trains on as many supervised tokens, of the same texts in the same order, and is
asked about the same held-out texts, each alone and cut to one length for all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch.utils.data import Dataset

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError, words_of
from storage.records import Diverged, OutOfMemory, QualityReport
from sweep.data.batches import Batch, row_of
from sweep.data.collating import collator
from sweep.data.cutting import cut_exactly
from sweep.data.epoch import Integers, epoch, packed
from sweep.data.opening import open_tokens
from sweep.data.request import LENGTHS, LOSS_LENGTHS
from sweep.data.split import split
from sweep.training.adapters import Attached, attached, eager
from sweep.training.device import Device
from sweep.training.exceptions import DETAIL_LENGTH, out_of_memory
from sweep.training.model import BaseModel
from sweep.training.step import WEIGHT, TrainingLoop
from sweep.training.texts import Texts, is_packed, loss_tokens

_WARMUP_SHARE = 0.05
"""Of the optimizer steps, in which the learning rate rises; too few steps have none."""
_EVALUATED_AT_ONCE = 4096
"""Tokens of a micro-batch of the evaluation at most, unless one text has more: the logits of all
are held."""
_BEAT_SECONDS = 2.0
_DOING = "training for its quality: "


@dataclass(frozen=True)
class Question:
    """How much is trained, and what is asked then."""

    tokens: int
    """Supervised ones; the last optimizer step is a whole one."""
    seed: int
    """Of the adapters and of the texts' order."""
    eval_seq_len: int
    eval_tokens: int
    """Supervised ones; all there are where those are fewer."""


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
            outcome = out_of_memory(
                error, self.config, device=self.device, loop=self._loop, doing=_DOING
            )
        finally:
            # A caught exception keeps its frames alive, and they the tensors, until here.
            self._loop = None
            self.device.release()
        return outcome

    def _learn(self, attachment: Attached) -> QualityReport | Diverged:
        begun, question = time.perf_counter(), self.question
        lesson = Lesson(self.texts, self.config, question)
        steps = len(lesson) // self.config.accumulation_steps
        self._loop = loop = TrainingLoop(
            attachment,
            self.config,
            vocab_size=self.base.model.get_input_embeddings().num_embeddings,
            seed=question.seed,
            batches=lesson,
            schedule=(int(_WARMUP_SHARE * steps), steps),
        )
        losses: list[float] = []
        for step in range(steps):
            losses.append(float(loop.step(on_micro_step=self._sign)))
            self._steps = step + 1
            self.beat(self._steps)
            if not math.isfinite(losses[-1]):
                return Diverged(step=step, detail=f"{_DOING}loss {losses[-1]}")
        eval_loss, eval_tokens = self._evaluate(attachment, loop)
        if not math.isfinite(eval_loss):
            return Diverged(step=steps, detail=f"held-out texts: loss {eval_loss}")
        tokens = lesson.tokens.reshape(steps, -1).sum(1)
        return QualityReport(
            eval_loss=eval_loss,
            eval_tokens=eval_tokens,
            eval_seq_len=question.eval_seq_len,
            train_tokens=int(tokens.sum()),
            train_loss=float(np.average(losses, weights=tokens)),
            steps=steps,
            seconds=time.perf_counter() - begun,
            seed=question.seed,
        )

    def _evaluate(self, attachment: Attached, loop: TrainingLoop) -> tuple[float, int]:
        """Return the mean loss of the held-out supervised tokens, and how many those are."""
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
        device, rows = self.base.model.device, len(batch["input_ids"])
        # Liger's loss holds the logits in evaluation mode unless it is told not to.
        told = {} if self.config.kernels == "hf" else {"skip_logits": True}
        try:
            return loop.loss_of({**{key: v.to(device) for key, v in batch.items()}, **told})
        except Exception as error:
            if not self.device.ran_out(error):
                raise
            if rows == 1:
                raise NoRoomToEvaluateError(words_of(error)[:DETAIL_LENGTH]) from None
        self.device.release()
        cuts = (slice(None, rows // 2), slice(rows // 2, None))
        halves = [{key: v[cut] for key, v in batch.items()} for cut in cuts]
        tokens = [loss_tokens(half) for half in halves]
        return float(np.average([self._loss(loop, half) for half in halves], weights=tokens))

    def _sign(self) -> None:
        """Give a sign of life, where the last one was some time ago."""
        if time.perf_counter() - self._beaten >= _BEAT_SECONDS:
            self._beaten = time.perf_counter()
            self.beat(self._steps)


class Lesson(Dataset[Batch]):
    """The micro-batches of a training on a budget of tokens, in whole optimizer steps.

    Each has the weight with which its mean loss counts: by its supervised tokens, as Trainer counts
    them over an accumulation.

    Raises:
        InputError: no text carries loss.
    """

    def __init__(self, texts: Texts, config: TrialConfig, question: Question) -> None:
        kept, loss = _cut(texts, config.seq_len)
        self.config = config
        self.rows = _rows(texts, config, question, kept, loss)
        """Numbers of the texts in each row."""
        of_rows = np.array([loss[row].sum() for row in self.rows], dtype=np.int64)
        self.tokens = of_rows.reshape(-1, config.micro_batch_size).sum(1)
        """Supervised tokens of each micro-batch."""
        self._tokenized = open_tokens(texts.directory).with_format("numpy")
        self._collate = collator(config, 0)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Batch:
        """Return a micro-batch."""
        size, steps = self.config.micro_batch_size, self.config.accumulation_steps
        rows = self.rows[index * size : (index + 1) * size]
        batch = self._collate([row_of(self._tokenized, row, self.config) for row in rows])
        of_step = self.tokens[index - index % steps :][:steps]
        return {**batch, WEIGHT: int(self.tokens[index]) * steps / int(of_step.sum())}


def _rows(
    texts: Texts, config: TrialConfig, question: Question, kept: Integers, loss: Integers
) -> list[Integers]:
    """Return the rows of so many optimizer steps as have the budget's tokens.

    Raises:
        InputError: no text carries loss.
    """
    size = config.samples_per_step
    # The last step is a whole one: of packed rows, whose texts are not known before, one more.
    extra = size * config.seq_len if is_packed(config) else 0
    chosen = _chosen(texts, loss, tokens=question.tokens + extra, size=size, seed=question.seed)
    match config.packing:
        case "packed":
            rows = packed(kept[chosen], config.seq_len)
            order = np.random.default_rng(question.seed).permutation(len(rows))
            found = [chosen[rows[row]] for row in order]
            # The fewest rows of whole optimizer steps that have the tokens, or all of them.
            sums = np.cumsum([int(loss[row].sum()) for row in found])
            reached = int(np.searchsorted(sums, question.tokens)) + 1
            return found[: min(-(-reached // size), len(found) // size) * size]
        case "grouped":
            whole = epoch(kept[chosen], loss[chosen], config, seed=question.seed, are_cut=True)
            return [chosen[whole.rows.of(row)] for row in range(len(chosen))]
        case _:
            return list(chosen[:, None])


def _chosen(texts: Texts, loss: Integers, *, tokens: int, size: int, seed: int) -> Integers:
    """Return the first texts that have so many tokens to learn from, a multiple of ``size``: in one
    order for all configurations, one epoch after another."""
    train, _ = split(len(loss), texts.eval_fraction, texts.seed)
    random = np.random.default_rng(seed)
    numbers: list[int] = []
    have = 0
    while np.any(loss[train] > 0):
        for number in random.permutation(train):
            if have >= tokens and len(numbers) % size == 0:
                return np.array(numbers, dtype=np.int64)
            if loss[number] > 0:
                numbers.append(int(number))
                have += int(loss[number])
    raise InputError(
        "no text has a token that carries loss at this seq_len; take a longer one, or let "
        "prompts carry loss too"
    )


def _cut(texts: Texts, seq_len: int) -> tuple[Integers, Integers]:
    lengths, loss = (np.load(texts.directory / n, mmap_mode="r") for n in (LENGTHS, LOSS_LENGTHS))
    return cut_exactly(texts.directory, lengths, loss, seq_len)


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
    left = iter(chosen)
    while first := next(left, None):
        yield [first, *islice(left, max(0, most // first[1] - 1))]
