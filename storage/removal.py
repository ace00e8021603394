"""Removing a study: its trials, and the files that belong to it alone."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from search_spaces.errors import EnvironmentFault, words_of
from storage.database import faults
from storage.files import is_temporary
from storage.identity import HOST, REPORT, stranger_words
from storage.identity import NAME as IDENTITY
from storage.keys import IDENTITY as IDENTITY_KEY
from storage.lease import open_leased
from storage.outcome_file import NAMES as OUTCOMES
from storage.spool import NAME as SPOOL
from storage.urls import parse_url

_LOGS = tuple(
    f"worker{number}.log{older}" for number in ("", "-[0-9]", "-[0-9][0-9]") for older in ("", ".1")
)
_OF_JOBS = ("slurm.sh", "slurm.run.json", "slurm-*.log", "slurm-*.idle")
"""Of a study that a queue ran: its job's script, and what each allocation leaves."""
FILES = (SPOOL, *OUTCOMES, REPORT, *_LOGS, *_OF_JOBS, HOST, IDENTITY)
"""Patterns of what a study leaves in its directory; whatever else is there is somebody else's.

The last one is what says whose they are: where that fails half-way it is still known.
"""


@dataclass(frozen=True)
class Removed:
    """What was removed, and what was found beside it and left."""

    files: tuple[Path, ...]
    left: tuple[Path, ...]


def remove_study(name: str, *, url: str, home: Path) -> Removed:
    """Remove a study that is there from its database, then its files.

    Files that are another study's, which another database may still have, are left.

    Args:
        name: of the study.
        url: of the database; see `storage.urls.parse_url`.
        home: the directory of all studies' files (``runs``).

    Raises:
        EnvironmentFault: somebody drives it, and nothing was removed; or the database or a file
            is not to be had.
    """
    database, directory = parse_url(url), home / name
    with ExitStack() as closing:
        storage = open_leased(database, name, closing.callback)
        with faults(database), storage.together():
            number = storage.get_study_id_from_name(name)
            identity = storage.get_study_user_attrs(number).get(IDENTITY_KEY)
            storage.delete_study(number)
        is_its_own = not stranger_words(directory, name, identity, str(database))
        return _remove_files(directory, FILES if is_its_own else ())


def _remove_files(directory: Path, patterns: Sequence[str]) -> Removed:
    there = sorted(os.listdir(directory)) if directory.is_dir() else []
    files = [directory / name for pattern in patterns for name in fnmatch.filter(there, pattern)]
    # What a process that was killed had not yet given its name.
    torn = [directory / name for name in there if patterns and is_temporary(directory / name)]
    try:
        for path in (*torn, *files):
            path.unlink()
        left = tuple(sorted(directory.iterdir())) if directory.is_dir() else ()
        if directory.is_dir() and not left:
            directory.rmdir()
    except OSError as error:
        raise EnvironmentFault(f"cannot remove {directory}: {words_of(error)}") from error
    return Removed(tuple(files), left)
