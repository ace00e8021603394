"""How many loss-carrying tokens a cut leaves of each row, to the token.

How many a row has says it where they are its last, and not of a chat with several answers: there
the masks of the rows that are cut are looked at, mapped from the disk by pyarrow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sweep.data.epoch import Integers, cut

TOKENS = "tokens"
_MASK = "completion_mask"
_STATE = "state.json"


def cut_exactly(
    directory: Path, lengths: ArrayLike, loss_lengths: ArrayLike, seq_len: int
) -> tuple[Integers, Integers]:
    """Return each row's tokens and loss-carrying tokens once it is cut on the right.

    Args:
        directory: of the prepared texts.
        lengths: tokens of each of their rows, all of them.
        loss_lengths: those that carry loss.
        seq_len: tokens that are left of a longer row.

    Raises:
        OSError: the tokens are not there any more.
    """
    kept, loss = cut(lengths, loss_lengths, seq_len)
    is_cut = np.asarray(lengths) > seq_len
    first = 0
    for offsets, mask in _masks(directory) if is_cut.any() else ():
        rows = np.flatnonzero(is_cut[first : first + len(offsets) - 1])
        begins = offsets[rows]
        sums = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
        # What begins a row is predicted from nothing, whatever its mask says.
        loss[first + rows] = sums[begins + seq_len] - sums[begins + 1]
        first += len(offsets) - 1
    return kept, loss


def _masks(directory: Path) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield where each row begins and the masks behind one another, some thousand rows at a time;
    nothing where every token carries loss."""
    import pyarrow

    tokens = directory / TOKENS
    state = json.loads((tokens / _STATE).read_text(encoding="utf-8"))
    for file in state["_data_files"]:
        with pyarrow.memory_map(str(tokens / file["filename"])) as source:
            for batch in pyarrow.ipc.open_stream(source):
                if _MASK not in batch.schema.names:
                    return
                column = batch.column(_MASK)
                offsets = np.asarray(column.offsets, dtype=np.int64)
                yield offsets - offsets[0], np.asarray(column.flatten())
