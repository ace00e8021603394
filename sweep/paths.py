"""Where things are kept: the directory of studies, the default database, a study's files.

Reads the environment variables ``SWEEP_HOME``, ``SWEEP_STORAGE``
and ``XDG_CACHE_HOME``; creates nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from qlora_sweep.search_spaces.errors import InputError

STORAGE = "SWEEP_STORAGE"
"""Stands in for ``--storage``: of it the list of processes shows nothing."""

RESERVED = frozenset({"contributions", "crashes", "jobs", "prices.yaml", "sweep.db"})
"""What stands in the directory of studies' files and is no study."""


def runs_directory() -> Path:
    """Return the directory of all studies' files: ``runs``, under ``SWEEP_HOME`` where set.

    Raises:
        InputError: ``SWEEP_HOME`` is a file.
    """
    # Imported here: it takes longer than all of the help that this module is loaded for.
    from qlora_sweep.search_spaces.documents import home_expanded

    home = home_expanded(os.environ.get("SWEEP_HOME") or ".")
    if os.path.isfile(home):
        raise InputError(f"SWEEP_HOME: {home} is a file: name a directory")
    return home / "runs"


def storage_url(typed: str | None) -> str:
    """Return the database that was typed, else that of ``SWEEP_STORAGE``, else the default.

    What is typed empty is a name, and a wrong one; a variable that is empty is not set.

    Raises:
        InputError: it is no database's URL, or that of a file in a directory that does not exist.
    """
    # Imported here: it takes longer than all of the help that this module is loaded for.
    from qlora_sweep.storage.urls import require_directory

    if typed is not None:
        require_directory(typed, made=runs_directory())
        return typed
    named = os.environ.get(STORAGE)
    if not named:
        return f"sqlite:///{runs_directory() / 'sweep.db'}"
    try:
        require_directory(named, made=runs_directory())
    except InputError as error:
        raise InputError(f"{STORAGE}: {error}") from error
    return named


def report_path(study: str) -> Path:
    """Return where a study's report is written."""
    return runs_directory() / study / "report.html"


def comparison_path(study: str) -> Path:
    """Return where the report of several studies is written: beside that of the first."""
    return runs_directory() / study / "comparison.html"


def own_price_file() -> Path | None:
    """Return the user's price list, ``runs/prices.yaml``; None where there is none."""
    path = runs_directory() / "prices.yaml"
    if path.exists():
        return path
    return None


def worker_log_path(study: str, *, lane: int = 0) -> Path:
    """Return where the output of a study's workers goes, those of each lane beside the others."""
    return runs_directory() / study / (f"worker-{lane}.log" if lane else "worker.log")


def crash_log_directory() -> Path:
    """Return where tracebacks of our own mistakes go."""
    return runs_directory() / "crashes"


def cache_directory() -> Path:
    """Return where what can be worked out again is kept."""
    from qlora_sweep.search_spaces.documents import home_expanded

    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return home_expanded(base) / "qlora-sweep"
