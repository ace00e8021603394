"""Where a study's job for a rented machine lies here, and what of it goes with the study."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from search_spaces.errors import EnvironmentFault, words_of
from sweep.launching.package import NAME as PACKAGE
from sweep.launching.providers import PROVIDERS
from sweep.request import REQUEST

DIRECTORY = "launch"
_WHEELS = f"{PACKAGE.replace('-', '_')}-*.whl"


def job_directory(study: Path) -> Path:
    """Return where jobs of a study are written, below its own directory."""
    return study / DIRECTORY


def remove_jobs(study: Path) -> tuple[Path, ...]:
    """Remove the jobs of a study that is gone, with their wheels, and return those files.

    Whatever else is there is somebody else's, and stays; so does a link in the directory's place.

    Raises:
        EnvironmentFault: a file cannot be removed.
    """
    directory = job_directory(study)
    if directory.is_symlink() or not directory.is_dir():
        return ()
    patterns = (*(one.file_name for one in PROVIDERS.values()), _WHEELS, REQUEST)
    files = tuple(sorted(path for pattern in patterns for path in directory.glob(pattern)))
    try:
        for path in files:
            path.unlink()
    except OSError as error:
        raise EnvironmentFault(f"cannot remove {directory}: {words_of(error)}") from error
    # Not where something else is in them.
    with suppress(OSError):
        directory.rmdir()
        study.rmdir()
    return files
