"""What a worker leaves on disk before it answers: the outcome of the attempt that it ran last.

Between the end of a training and the driver's hearing of it both may die. Whoever comes after asks
for the outcome by the attempt's identity and its configuration: what does not agree in both is
none. It names all that a result names, so that one whose trial is gone can still be kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault, words_of
from storage.files import open_reading, replace
from storage.identity import read_identity
from storage.records import Attempt, Outcome

NAME = "outcome.json"
"""Of the first worker's file, in the study's directory."""
NAMES = (NAME, "outcome-[0-9].json", "outcome-[0-9][0-9].json")
"""Of all of them: each worker beside the first has its number in the name."""
BYTES_MAX = 1024 * 1024
"""Far more than an outcome takes; anything larger was not written by a worker."""


def outcome_files(directory: Path) -> tuple[OutcomeFile, ...]:
    """Return the files that a study's workers left."""
    return tuple(OutcomeFile(path) for pattern in NAMES for path in sorted(directory.glob(pattern)))


def beside_log(log: Path) -> OutcomeFile:
    """Return the file of the worker that prints into ``worker.log``, ``worker-1.log``, ..."""
    return OutcomeFile(log.absolute().with_name(log.stem.replace("worker", "outcome") + ".json"))


def keep_outcomes(directory: Path, found: Iterable[bytes]) -> None:
    """Put files that workers of a study left on other machines where `outcome_files` finds them.

    Args:
        directory: of the study.
        found: the files' contents; those of another study are left out.

    Raises:
        EnvironmentFault: one cannot be written.
    """
    ours = read_identity(directory)
    if ours is None:
        return
    read = ((data, _parsed(data)) for data in found)
    kept = (data for data, left in read if left and left.attempt.study == ours.identity)
    for number, data in enumerate(kept):
        OutcomeFile(directory / f"outcome-{number}.json").put(data)


class Left(BaseModel):
    """What a worker left."""

    model_config = ConfigDict(frozen=True)

    attempt: Attempt
    config: TrialConfig
    outcome: Outcome


@dataclass(frozen=True)
class OutcomeFile:
    """The file of one worker, which runs one attempt after another: it holds the last one's.

    The one before was told by the time the next begins, or spooled by the driver that found it, so
    that nothing more is to be kept.
    """

    path: Path

    def write(self, attempt: Attempt, config: TrialConfig, outcome: Outcome) -> None:
        """Put the outcome in the place of the last one, and wait until the disk has it.

        Raises:
            EnvironmentFault: it cannot be written; the last one is then still there.
        """
        left = Left(attempt=attempt, config=config, outcome=outcome)
        self.put(json.dumps(left.model_dump(mode="json")).encode())

    def put(self, data: bytes) -> None:
        """Replace all that it holds. Raises as `write`."""
        try:
            replace(self.path, data)
        except OSError as error:
            reason = error.strerror or words_of(error)
            raise EnvironmentFault(f"cannot write the outcome to {self.path}: {reason}") from error

    def take(self, attempt: str, config: TrialConfig) -> Outcome | None:
        """Return the outcome of this very attempt; None where it, or its configuration, is another.

        It stays where it is until the next one: whoever took it may die before it is told.
        """
        left = self.read()
        is_its = left is not None and (left.attempt.id, left.config) == (attempt, config)
        return left.outcome if left is not None and is_its else None

    def read(self) -> Left | None:
        """Return what was left last, whatever it is of.

        Whatever else may stand under that name is no outcome, and never an error.
        """
        try:
            with open_reading(self.path) as file:
                return _parsed(file.read(BYTES_MAX + 1))
        except OSError:
            return None


def _parsed(data: bytes) -> Left | None:
    with suppress(ValueError):
        return None if len(data) > BYTES_MAX else Left.model_validate_json(data)
    return None
