"""Opening the tokens of prepared texts, in children alone: it is what imports datasets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sweep.data.request import TOKENS

if TYPE_CHECKING:
    from datasets import Dataset


def import_readers() -> None:
    """Import what texts are read and collated by, a second's work of 200 MB that no trial is to
    do: it would be taken from its budget.
    """
    import datasets  # noqa: F401
    from trl.trainer import sft_trainer  # noqa: F401


def open_tokens(directory: Path) -> Dataset:
    """Return the rows of prepared texts, mapped from the disk.

    ``input_ids`` (list of int32) and, where completions alone carry loss, ``completion_mask`` (list
    of int8, 1 where a token carries loss).

    Raises:
        OSError: they are not there any more.
    """
    # Imported here: pandas comes with it, and without texts a worker opens none.
    from datasets import Dataset, load_from_disk

    dataset = load_from_disk(str(directory / TOKENS), keep_in_memory=False)
    assert isinstance(dataset, Dataset)
    return dataset
