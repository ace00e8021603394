"""Reading texts row by row: JSON lines, JSON arrays, CSV, Parquet, a directory of them, the hub.

Every row comes with where it stands, also one that cannot be read. datasets is imported where it is
needed alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from search_spaces.documents import home_expanded
from search_spaces.errors import EnvironmentFault, InputError, quote, words_of
from search_spaces.models import SECONDS_MAX
from sweep.data.files import is_on_hub, text_files
from sweep.data.formats import Read, file_rows, values_of
from sweep.data.request import Place

_TRAIN = "train"
_ROWS_AT_ONCE = 1024
"""Of the hub."""


class Files:
    """Texts in files, one after another in the order of their names."""

    unit = "MB read"
    """What `done` and `total` count."""

    def __init__(self, name: str) -> None:
        self.name = name
        files = text_files(name)
        self._files, self.notes = _of_training(files, name)
        self._before = self._within = 0

    @property
    def total(self) -> int:
        """Megabytes of all files, as they lie on the disk."""
        return sum(path.stat().st_size for _, path in self._files) // 10**6

    @property
    def done(self) -> int:
        """Megabytes that have been read."""
        return (self._before + self._within) // 10**6

    def rows(self) -> Iterator[Read]:
        """Yield each row of each file.

        Raises:
            InputError: a file is not what its name says, from its first row on.
            EnvironmentFault: it cannot be read.
        """
        self._before = self._within = 0
        for label, path in self._files:
            for place, values, self._within in file_rows(path, label):
                yield place, values
            self._before, self._within = self._before + path.stat().st_size, 0


def _of_training(
    files: list[tuple[str, Path]], name: str
) -> tuple[list[tuple[str, Path]], tuple[str, ...]]:
    """Return the files of the training split, where a directory's names tell splits apart.

    They are told as datasets does it, so that no row of a test is trained on.
    """
    directory = home_expanded(name)
    if len(files) == 1 or not directory.is_dir():
        return files, ()
    from datasets.data_files import get_data_patterns, resolve_pattern

    patterns = get_data_patterns(str(directory))
    others = sorted(map(str, set(patterns) - {_TRAIN}))
    if _TRAIN not in patterns or not others:
        return files, ()
    chosen: set[Path] = set()
    for pattern in patterns[_TRAIN]:
        # Of the ways to name a split no directory uses all.
        with contextlib.suppress(FileNotFoundError):
            chosen |= {Path(found).resolve() for found in resolve_pattern(pattern, str(directory))}
    kept = [(label, path) for label, path in files if path.resolve() in chosen]
    if not kept or len(kept) == len(files):
        return files, ()
    left = f"{len(files) - len(kept)} of its {len(files)} files are left out"
    return kept, (f"its split {_TRAIN} is read; {left} ({', '.join(others)})",)


class Hub:
    """Texts on the hub, or in its cache here: the split ``train`` of its default configuration."""

    unit = "rows read"

    def __init__(self, name: str) -> None:
        self.name = name
        self._data = _loaded(name)
        self.done = 0
        self.notes: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """What datasets knows the content by."""
        return str(self._data._fingerprint)

    @property
    def total(self) -> int:
        """Rows of all of it."""
        return len(self._data)

    def rows(self) -> Iterator[Read]:
        """Yield each row."""
        self.done = 0
        # As Arrow has them: what pictures and sounds there are beside is not decoded.
        for table in self._data.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
            for values in values_of(table):
                self.done += 1
                yield Place(self.name, self.done), values


def _loaded(name: str) -> Any:
    """Return a data set's training rows, mapped from the disk.

    Raises:
        InputError: the hub has no such data set, or none with such a split.
        EnvironmentFault: the hub cannot be reached and its cache does not hold it.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    _look_once(name)
    try:
        return load_dataset(name, split=_TRAIN)
    except DatasetNotFoundError as error:
        raise InputError(
            f"{quote(name)}: neither a file or directory here nor a data set that the hub shows you"
        ) from error
    except (ValueError, TypeError) as error:
        raise InputError(f"{name}: {words_of(error)}") from error
    except ConnectionError as error:
        raise EnvironmentFault(
            f"{name}: neither a file or directory here nor a data set in the cache, and the hub "
            "cannot be reached: name a file, or fetch it where there is a network"
        ) from error
    except Exception as error:
        # The hub's client, its HTTP library and datasets each raise errors of their own.
        raise EnvironmentFault(f"{name}: cannot be fetched: {words_of(error)}") from error


def _look_once(name: str) -> None:
    """Take this process off the network where the hub does not answer: datasets then looks into
    its cache at once, and asks for half a minute otherwise."""
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=SECONDS_MAX)
    except HfHubHTTPError:
        # It answers; what it says is datasets' to put into words.
        return
    except Exception:  # noqa: BLE001 - the network's errors are each library's own
        datasets.config.HF_HUB_OFFLINE = True
        huggingface_hub.constants.HF_HUB_OFFLINE = True


def source_of(name: str) -> Files | Hub:
    """Return the texts of a name: a file or directory that is here, else a data set of the hub."""
    return Hub(name) if is_on_hub(name) else Files(name)
