"""A training on a budget of tokens, and the held-out texts that it is then asked about.

Every configuration has as many supervised tokens, of the same texts in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
from torch.utils.data import Dataset

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from sweep.data.batches import WEIGHT, Batch, Texts, loss_left, open_tokens, row_of
from sweep.data.epoch import Integers, epoch, packed
from sweep.data.rows import Collator, split

BLOCKS_MAX = 64
"""Of held-out texts: what says how sure their loss is, and no evaluation is slower for it."""


class Lesson(Dataset[Batch]):
    """The micro-batches of a training on so many supervised tokens, in whole optimizer steps.

    Each has the weight with which its mean loss counts: by its supervised tokens, as Trainer counts
    them over an accumulation.

    Raises:
        InputError: no text carries loss.
    """

    def __init__(self, texts: Texts, config: TrialConfig, *, tokens: int, seed: int) -> None:
        lengths, loss = loss_left(texts.directory, config.seq_len)
        self.config = config
        self.rows = _rows(texts, config, lengths, loss, tokens=tokens, seed=seed)
        """Numbers of the texts in each row."""
        of_rows = np.array([loss[row].sum() for row in self.rows], dtype=np.int64)
        self.tokens = of_rows.reshape(-1, config.micro_batch_size).sum(1)
        """Supervised tokens of each micro-batch."""
        self._tokenized = open_tokens(texts.directory).with_format("numpy")
        self._collate = Collator(config)

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
    texts: Texts, config: TrialConfig, lengths: Integers, loss: Integers, *, tokens: int, seed: int
) -> list[Integers]:
    """Return the rows of so many optimizer steps as have the budget's tokens."""
    size = config.samples_per_step
    # The last step is a whole one: of packed rows, whose texts are not known before, one more.
    extra = size * config.seq_len if config.packing == "packed" else 0
    chosen = _chosen(texts, loss, tokens=tokens + extra, size=size, seed=seed)
    match config.packing:
        case "packed":
            rows = packed(lengths[chosen], config.seq_len)
            order = np.random.default_rng(seed).permutation(len(rows))
            found = [chosen[rows[row]] for row in order]
            # The fewest rows of whole optimizer steps that have the tokens, or all of them.
            sums = np.cumsum([int(loss[row].sum()) for row in found])
            reached = int(np.searchsorted(sums, tokens)) + 1
            return found[: min(-(-reached // size), len(found) // size) * size]
        case "grouped":
            whole = epoch(lengths[chosen], loss[chosen], config, seed=seed, are_cut=True)
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


def held_out_batches(
    texts: Texts, config: TrialConfig, *, tokens: int, tokens_at_once: int
) -> Iterator[tuple[int, Batch]]:
    """Yield held-out texts as micro-batches of like length, each with the number of its block:
    blocks of as many texts, drawn at random and the same for every configuration.

    Args:
        texts: of which some are held out.
        config: to which seq_len they are cut; neither packed nor compiled.
        tokens: supervised ones that are looked at; all there are where those are fewer.
        tokens_at_once: of a micro-batch with its pads at most, unless one text has more.

    Raises:
        InputError: there is none with a token that carries loss.
    """
    lengths, loss = loss_left(texts.directory, config.seq_len)
    _, held = split(len(loss), texts.eval_fraction, texts.seed)
    order = np.random.default_rng(texts.seed).permutation(held)
    order = order[loss[order] > 0]
    if not len(order):
        raise InputError(
            "no text with a token that carries loss is held out; take a larger eval_fraction"
        )
    chosen = order[: np.searchsorted(np.cumsum(loss[order]), tokens) + 1]
    kept = np.minimum(lengths, config.seq_len).astype(np.int64)
    rows, collate = open_tokens(texts.directory).with_format("numpy"), Collator(config)
    for number, block in enumerate(np.array_split(chosen, min(BLOCKS_MAX, len(chosen)))):
        left = iter(block[np.lexsort((block, -kept[block]))].tolist())
        while (first := next(left, None)) is not None:
            numbers = [first, *islice(left, max(0, tokens_at_once // int(kept[first]) - 1))]
            yield number, collate([row_of(rows, np.array([one]), config) for one in numbers])
