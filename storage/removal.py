"""Owns removing a study: its trials, and the files that belong to it alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from search_spaces.errors import EnvironmentFault, words_of
from storage.database import close, faults, open_for_writing
from storage.lease import lease_for
from storage.urls import parse_url

FILES = ("spool.jsonl", "report.html", "worker.log")
"""What a study leaves in its directory; whatever else is there is somebody else's."""


@dataclass(frozen=True)
class Removed:
    """What was removed, and what was found beside it and left."""

    files: tuple[Path, ...]
    left: tuple[Path, ...]


def remove_study(name: str, *, url: str, home: Path) -> Removed:
    """Remove a study that is there from its database, then its files.

    Args:
        name: of the study.
        url: of the database; see `storage.urls.parse_url`.
        home: the directory of all studies' files (``runs``).

    Raises:
        EnvironmentFault: somebody drives it, and nothing was removed; or the database or a file
            is not to be had.
    """
    database = parse_url(url)
    lease = lease_for(database, name)
    holder = lease.holder()
    if holder is not None:
        raise EnvironmentFault(
            f"study '{name}' is driven by {holder}: stop that first; nothing was removed"
        )
    storage = open_for_writing(database)
    try:
        with faults(database):
            lease.acquire()
            storage.delete_study(storage.get_study_id_from_name(name))
            removed = _remove_files(home / name)
    finally:
        lease.release()
        close(storage)
    return removed


def _remove_files(directory: Path) -> Removed:
    files = [directory / name for name in FILES if (directory / name).exists()]
    try:
        for path in files:
            path.unlink()
        left = tuple(sorted(directory.iterdir())) if directory.is_dir() else ()
        if directory.is_dir() and not left:
            directory.rmdir()
    except OSError as error:
        raise EnvironmentFault(f"cannot remove {directory}: {words_of(error)}") from error
    return Removed(tuple(files), left)
