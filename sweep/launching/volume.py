"""A rented machine's side of a study: it resumes what a volume keeps, and keeps there what is new.

The database is written on the machine's own disk and copied with SQLite's own backup: a bucket's
mount knows no locks and uploads a file once it is closed, and Modal takes its pictures of a volume
while others write. Each file is replaced whole, so the volume holds a study that can be resumed at
every moment. One machine at a time has the study: it writes down that it is there, and what starts
beside it gives way. Runs as ``python -P -m qlora_sweep.sweep.launching.volume``.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qlora_sweep.sweep.launching.there import SWEEP, Supervisor, say

SAVE_SECONDS = 5.0
"""A trial takes longer, so no more than one is to be done again."""
LEDGER_SECONDS = 30.0
"""How often the machine that has the study says so, and what is paid for by now."""
QUIET_SECONDS = 90.0
"""A machine that has said nothing for so long is gone: two of three times may be lost on the way.
"""
STOP_SECONDS = 30.0
"""Before the limit: the worker's end, the report and the last copy take as long."""
DONE = 0
NOTHING_FITS = 1
FAULT = 3
INTERRUPTED = 130
_PART = ".part"
_NEVER_KEPT = (".lock", "-journal", "-wal", "-shm", _PART)
"""What belongs to a machine: locks, and halves of transactions, which a backup has whole."""


@dataclass
class PaidSeconds:
    """Seconds that are paid for, of this machine and of those before it, and whose the study is."""

    path: Path
    limit_seconds: float
    """Of all machines together."""
    since: float
    """When this machine's billing began, as far as it is known: seconds of the epoch."""
    overhead_seconds: float = 0.0
    """Of each machine: paid for, and not seen from inside."""
    clock: Callable[[], float] = time.time
    owner: str = field(default_factory=lambda: uuid.uuid4().hex)
    """This process."""
    machine: str | None = None
    """What is paid for: one machine, whatever is started on it in turn; None: the owner's own."""
    quiet_seconds: float = QUIET_SECONDS
    _others: dict[str, float] = field(default_factory=dict)
    _written: float = 0.0

    def _read(self) -> dict[str, Any] | None:
        """Return what the volume says; None where nothing was ever said.

        Raises:
            OSError, ValueError: something is there, and cannot be read.
        """
        try:
            said = json.loads(self.path.read_text(encoding="utf-8"))
            paid = {one: float(seconds) for one, seconds in said["seconds"].items()}
            return {**said, "seconds": paid, "written": float(said.get("written", 0.0))}
        except FileNotFoundError:
            return None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.path} holds no ledger") from error

    def _paid(self) -> dict[str, float]:
        own = max(0.0, self.clock() - self.since) + self.overhead_seconds
        return {**self._others, self.machine or self.owner: round(own, 1)}

    @property
    def is_spent(self) -> bool:
        """Whether it is time to stop, so that stopping is within the limit too."""
        return sum(self._paid().values()) + STOP_SECONDS >= self.limit_seconds

    @property
    def is_ours(self) -> bool:
        """Whether no other machine is known to have taken the study over."""
        try:
            said = self._read() or {}
        except (OSError, ValueError):
            return True
        return said.get("owner") in (None, self.owner)

    def claim(self, *, wait: Callable[[float], bool]) -> bool:
        """Take the study over once it has no driver; return whether that was done.

        A machine that ended as it should has said so, and one that is gone says nothing any more:
        whoever comes next waits until that is told from one that is there.

        Args:
            wait: so many seconds; returns False where there is nothing to wait for any more.

        Raises:
            OSError, ValueError: the volume is not to be read, for longer than a moment, or written.
        """
        began = self.clock()
        seen: float | None = None
        until = 0.0
        while True:
            try:
                said = self._read()
            except (OSError, ValueError):
                # What cannot be read may be a study that runs, and was paid for.
                if self.clock() - began >= self.quiet_seconds:
                    raise
            else:
                if said is None or said.get("has_ended") or said.get("owner") in (None, self.owner):
                    break
                if seen is None:
                    # Clocks of two machines differ: what is of the future was written just now.
                    seen = said["written"]
                    until = min(said["written"], began) + self.quiet_seconds
                if said["written"] != seen:
                    return False
                if self.clock() >= until:
                    break
            if not wait(min(1.0, self.quiet_seconds / 5)):
                return False
        if said is not None:
            self._others = said["seconds"]
        self.write(force=True)
        return True

    def write(self, *, force: bool = False, is_last: bool = False) -> None:
        """Write down what has been paid for and whose the study is, unless that was just done.

        Args:
            force: though it was.
            is_last: says goodbye: the next machine need not wait.
        """
        now = self.clock()
        if not (force or is_last) and now - self._written < LEDGER_SECONDS:
            return
        said = {"owner": self.owner, "written": now, "has_ended": is_last}
        _put(self.path, json.dumps({"seconds": self._paid(), **said}).encode())
        self._written = now


@dataclass
class Copies:
    """Copies a study's files between a volume's directory and the machine's own disk.

    Args:
        volume: directory of the study there.
        home: ``SWEEP_HOME`` of the study alone, and new.
    """

    volume: Path
    home: Path
    _saved: dict[Path, tuple[int, ...]] = field(default_factory=dict)

    def restore(self) -> int:
        """Fetch what the volume keeps; return the number of files. Raises `OSError`."""
        for path in _files(self.volume):
            _put(self.home / path, (self.volume / path).read_bytes())
        self._saved = _files(self.home)
        return len(self._saved)

    def save(self) -> bool:
        """Copy what has changed, databases last; return whether anything had.

        A trial is spooled before it is told to the database, and leaves the spool after: a database
        that is younger than the spool beside it lacks nothing.

        Raises:
            OSError: the volume does not take it. What it held stays, and the next call tries again.
            sqlite3.Error: the database cannot be read.
        """
        stamps = _files(self.home)
        changed = [path for path, stamp in stamps.items() if self._saved.get(path) != stamp]
        for path in sorted(changed, key=lambda path: path.suffix == ".db"):
            source = self.home / path
            if path.suffix == ".db":
                source = self.home / path.name
                with (
                    closing(sqlite3.connect(self.home / path, timeout=30)) as live,
                    closing(sqlite3.connect(source)) as copy,
                ):
                    live.backup(copy)
            _put(self.volume / path, source.read_bytes())
            self._saved[path] = stamps[path]
        gone = self._saved.keys() - stamps.keys()
        for path in gone:
            (self.volume / path).unlink(missing_ok=True)
            del self._saved[path]
        return bool(changed or gone)


def _files(home: Path) -> dict[Path, tuple[int, ...]]:
    """Return the files of studies that are to be kept, with what changes when one does: of a
    database, with what is yet to be folded into it too. Raises `OSError`.
    """

    def refuse(error: OSError) -> None:
        # What cannot be listed is not empty.
        if not isinstance(error, FileNotFoundError):
            raise error

    stamps = {}
    for folder, _, names in os.walk(home / "runs", onerror=refuse):
        for name in names:
            if name.endswith(_NEVER_KEPT):
                continue
            path = Path(folder, name)
            stamp: tuple[int, ...] = ()
            for file in (path, Path(f"{path}-wal")):
                if file.exists():
                    stat = file.stat()
                    stamp += (stat.st_mtime_ns, stat.st_size)
            stamps[path.relative_to(home)] = stamp
    return stamps


def _put(path: Path, data: bytes) -> None:
    """Write a file so that it is the old one or the new one, never a part. Raises `OSError`.

    Its contents alone: what buckets are mounted with takes no permissions and no times.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + _PART)
    part.write_bytes(data)
    os.replace(part, path)


def keep(
    command: list[str], *, copies: Copies, ledger: PaidSeconds, save_seconds: float = SAVE_SECONDS
) -> int:
    """Run a command, keeping what it writes; return the exit code for the provider.

    That is 0 where a further attempt would do no more: the study has ended, whether anything fits
    or not, or what it may cost is spent. Where another machine has the study, nothing of it is
    touched.
    """
    # Asked twice, a study cuts short how it ends.
    supervisor = Supervisor(is_asked_once=True)
    is_lost = False

    def wait(most: float) -> bool:
        time.sleep(min(most, save_seconds))
        return not supervisor.asked

    def save(*, is_last: bool = False) -> bool:
        try:
            ledger.write(force=copies.save(), is_last=is_last)
        except (OSError, sqlite3.Error) as error:
            say(f"the volume could not be written: {error}")
            return False
        return True

    def tick() -> None:
        nonlocal is_lost
        is_lost = is_lost or not ledger.is_ours
        why = ""
        if is_lost:
            why = "another machine goes on with this study, and no more is kept here"
        else:
            if ledger.is_spent:
                why = "what the study may cost is spent"
            save()
        if why and not supervisor.asked:
            say(f"{why}: stopping it")
            supervisor.ask()

    try:
        is_claimed = ledger.claim(wait=wait)
        if is_claimed and ledger.is_spent:
            ledger.write(is_last=True)
            say("what the study may cost is spent: start it again with a higher --max-dollars")
            return DONE
        if supervisor.asked:
            return INTERRUPTED
        if not is_claimed:
            say("another machine runs this study, so nothing was started: stop that one first")
            return FAULT
        files = copies.restore()
    except (OSError, ValueError) as error:
        say(f"the volume could not be read or written, so nothing was started: {error}")
        return FAULT
    if files:
        say(f"resuming from {files} files of the volume")
    else:
        say("starting a new study")
    variables = {key: value for key, value in os.environ.items() if key != "SWEEP_STORAGE"}
    variables["SWEEP_HOME"] = str(copies.home)
    code = supervisor.run(command, tick=tick, seconds=save_seconds, env=variables)
    if is_lost or not ledger.is_ours or not save(is_last=True):
        return FAULT
    if code == NOTHING_FITS or (code == INTERRUPTED and ledger.is_spent):
        return DONE
    return code


def main(arguments: Sequence[str]) -> int:
    """Run `sweep` on this machine; return its exit code for the provider.

    Args:
        arguments: the study's own directory on the volume, the seconds that all machines may take,
            those of each that are not seen from inside, a file with the second that this machine
            began or '', and what follows `sweep`.
    """
    volume, limit, overhead, begun, *words = arguments
    since = time.time()
    machine = None
    if begun:
        since = float(Path(begun).read_text(encoding="ascii"))
        # A second start on this machine is told by that.
        machine = f"{since:.0f}-{socket.gethostname()}"
    paid = Path(volume, "paid.json")
    ledger = PaidSeconds(paid, float(limit), since, float(overhead), machine=machine)
    copies = Copies(Path(volume), Path(tempfile.mkdtemp(prefix="sweep-rented-")))
    command = [sys.executable, "-P", "-c", SWEEP]
    return keep(command + words, copies=copies, ledger=ledger)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
