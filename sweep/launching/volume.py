"""A rented machine's side of a study: it resumes what a volume keeps, and keeps there what is new.

The database is written on the machine's own disk and copied with SQLite's own backup: a bucket's
mount knows no locks and uploads a file once it is closed, and Modal takes its pictures of a volume
while others write. Each file is replaced whole, so the volume holds a study that can be resumed at
every moment. One machine at a time has the study: it writes down that it is there, and what starts
beside it gives way. Runs as ``python -P -m sweep.launching.volume``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sqlite3
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweep.launching.there import SWEEP, Supervisor

SAVE_SECONDS = 5.0
"""A trial takes longer, so no more than one is to be done again."""
LEDGER_SECONDS = 30.0
"""How often the machine that has the study says so, and what is paid for by now."""
QUIET_SECONDS = 90.0
"""A machine that has said nothing for so long is gone: two of three times may be lost on the way.
"""
STOP_SECONDS = 30.0
"""Before the limit: the worker's end, the report and the last copy take as long."""
DONE, NOTHING_FITS, FAULT, INTERRUPTED = 0, 1, 3, 130
_LEDGER, _FILES, _PART = "paid.json", "runs", ".part"
_NEVER_KEPT = (".lock", "-journal", "-wal", "-shm", _PART)
"""What belongs to a machine: locks, and halves of transactions, which a backup has whole."""


def _nonce() -> str:
    return uuid.uuid4().hex


@dataclass
class Ledger:
    """Seconds that are paid for, of this machine and of those before it, and whose the study is."""

    path: Path
    limit_seconds: float
    """Of all machines together."""
    since: float
    """When this machine's billing began, as far as it is known: seconds of the epoch."""
    overhead_seconds: float = 0.0
    """Of each machine: paid for, and not seen from inside."""
    clock: Callable[[], float] = time.time
    owner: str = field(default_factory=_nonce)
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

    @property
    def _own_seconds(self) -> float:
        return max(0.0, self.clock() - self.since) + self.overhead_seconds

    @property
    def is_spent(self) -> bool:
        """Whether it is time to stop, so that stopping is within the limit too."""
        paid = sum(self._others.values()) + self._own_seconds
        return paid + STOP_SECONDS >= self.limit_seconds

    @property
    def is_ours(self) -> bool:
        """Whether no other machine is known to have taken the study over."""
        try:
            said = self._read() or {}
        except (OSError, ValueError):
            return True
        return said.get("owner") in (None, self.owner)

    def claim(self, *, wait: Callable[[float], bool]) -> bool:
        """Take the study over once nobody has it; return whether that was done.

        A machine that ended as it should has said so, and one that is gone says nothing any more:
        whoever comes next waits until that is told from one that is there.

        Args:
            wait: so many seconds; returns False where there is nothing to wait for any more.

        Raises:
            OSError, ValueError: the volume is not to be read, for longer than a moment, or written.
        """
        seen, began, until = None, self.clock(), 0.0
        while True:
            try:
                said = self._read()
            except (OSError, ValueError):
                # What cannot be read may be a study that runs, and was paid for.
                if self.clock() - began >= self.quiet_seconds:
                    raise
            else:
                if said is None or said.get("owner") in (None, self.owner) or said.get("has_ended"):
                    break
                if seen is None:
                    seen = said["written"]
                    # Clocks of two machines differ: what is of the future was written just now.
                    until = self.clock() + self.quiet_seconds - max(0.0, self.clock() - seen)
                elif said["written"] != seen:
                    return False
                if self.clock() >= until:
                    break
            if not wait(min(1.0, self.quiet_seconds / 5)):
                return False
        paid = {} if said is None else said["seconds"]
        self._others = {one: seconds for one, seconds in paid.items() if one != self._key}
        self.write(force=True)
        return True

    @property
    def _key(self) -> str:
        return self.machine or self.owner

    def write(self, *, force: bool = False, is_last: bool = False) -> None:
        """Write down what has been paid for and whose the study is, unless that was just done.

        Args:
            force: though it was.
            is_last: says goodbye: the next machine need not wait.
        """
        now = self.clock()
        if not (force or is_last) and now - self._written < LEDGER_SECONDS:
            return
        said = {
            "seconds": {**self._others, self._key: round(self._own_seconds, 1)},
            "owner": self.owner,
            "written": now,
            "has_ended": is_last,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(self.path.name + _PART)
        part.write_text(json.dumps(said), encoding="utf-8")
        os.replace(part, self.path)
        self._written = now


@dataclass
class Copies:
    """Copies a study's files between a volume's directory and the machine's own disk.

    Args:
        volume: directory of the study there.
        home: ``SWEEP_HOME`` of the study: new, and nobody else's.
    """

    volume: Path
    home: Path
    _saved: dict[Path, tuple[int, ...]] = field(default_factory=dict)

    def restore(self) -> int:
        """Fetch what the volume keeps; return the number of files. Raises `OSError`."""
        for path in _files(self.volume / _FILES):
            _copy(self.volume / _FILES / path, self.home / _FILES / path)
            self._saved[path] = _stamp(self.home / _FILES / path)
        return len(self._saved)

    def save(self) -> bool:
        """Copy what has changed, databases last; return whether anything had.

        A trial is spooled before it is told to the database, and leaves the spool after: a database
        that is younger than the spool beside it lacks nothing.

        Raises:
            OSError: the volume does not take it. What it held stays, and the next call tries again.
            sqlite3.Error: the database cannot be read.
        """
        stamps = {path: _stamp(self.home / _FILES / path) for path in _files(self.home / _FILES)}
        changed = [path for path, stamp in stamps.items() if self._saved.get(path) != stamp]
        for path in sorted(changed, key=lambda path: path.suffix == ".db"):
            source = self.home / _FILES / path
            if path.suffix == ".db":
                copied = self.home / path.name
                with (
                    closing(sqlite3.connect(source, timeout=30)) as live,
                    closing(sqlite3.connect(copied)) as copy,
                ):
                    live.backup(copy)
                source = copied
            _copy(source, self.volume / _FILES / path)
            self._saved[path] = stamps[path]
        gone = [path for path in self._saved if path not in stamps]
        for path in gone:
            (self.volume / _FILES / path).unlink(missing_ok=True)
            del self._saved[path]
        return bool(changed or gone)


def _files(directory: Path) -> Iterator[Path]:
    """Yield the files below a directory that are to be kept, relative to it. Raises `OSError`."""

    def refuse(error: OSError) -> None:
        # What cannot be listed is not empty.
        if not isinstance(error, FileNotFoundError):
            raise error

    for folder, _, names in os.walk(directory, onerror=refuse):
        for name in sorted(names):
            if not name.endswith(_NEVER_KEPT):
                yield Path(folder, name).relative_to(directory)


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what changes with a file; of a database, with what is yet to be folded into it too."""
    stats = [one.stat() for one in (path, path.with_name(f"{path.name}-wal")) if one.exists()]
    return tuple(number for stat in stats for number in (stat.st_mtime_ns, stat.st_size))


def _copy(source: Path, target: Path) -> None:
    """Copy a file so that ``target`` is the old one or the new one, never a part.

    Its contents alone: what buckets are mounted with takes no permissions and no times.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + _PART)
    shutil.copyfile(source, part)
    os.replace(part, target)


def keep(
    command: list[str], *, copies: Copies, ledger: Ledger, save_seconds: float = SAVE_SECONDS
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

    def tick() -> None:
        nonlocal is_lost
        is_lost = is_lost or not ledger.is_ours
        if is_lost and not supervisor.asked:
            _say("another machine goes on with this study: stopping it here, and keeping no more")
            supervisor.ask()
        elif not is_lost:
            save()
        if ledger.is_spent and not supervisor.asked:
            _say("what the study may cost is spent: stopping it")
            supervisor.ask()

    def save(*, is_last: bool = False) -> bool:
        try:
            ledger.write(force=copies.save(), is_last=is_last)
        except (OSError, sqlite3.Error) as error:
            _say(f"the volume could not be written: {error}")
            return False
        return True

    try:
        is_claimed = ledger.claim(wait=wait)
        if is_claimed and ledger.is_spent:
            ledger.write(is_last=True)
            _say("what the study may cost is spent: start it again with a higher --max-dollars")
            return DONE
        if supervisor.asked:
            return INTERRUPTED
        if not is_claimed:
            _say(
                "another machine runs this study, which is kept there alone; nothing was started. "
                "Stop that one first, or launch this under another --study"
            )
            return FAULT
        files = copies.restore()
    except (OSError, ValueError) as error:
        _say(f"the volume could not be read or written, so nothing was started: {error}")
        return FAULT
    _say(f"resuming from {files} files of the volume" if files else "starting a new study")
    home = {**os.environ, "SWEEP_HOME": str(copies.home)}
    home.pop("SWEEP_STORAGE", None)
    code = supervisor.run(command, tick=tick, seconds=save_seconds, env=home)
    if is_lost or not ledger.is_ours or not save(is_last=True):
        return FAULT
    if code == NOTHING_FITS or (code == INTERRUPTED and ledger.is_spent):
        return DONE
    return code


def _say(text: str) -> None:
    sys.stderr.write(f"volume: {text}\n")
    sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `sweep` on this machine as the options say; return its exit code for the provider."""
    parser = argparse.ArgumentParser(prog="python -P -m sweep.launching.volume")
    parser.add_argument("--volume", type=Path, required=True, help="directory of this study alone")
    parser.add_argument("--limit-seconds", type=float, required=True, help="of all machines")
    parser.add_argument("--overhead-seconds", type=float, default=0.0, help="of each machine")
    parser.add_argument("--since", type=Path, help="file with the second the machine began")
    parser.add_argument("command", nargs="+", help="what follows `sweep`")
    options = parser.parse_args(arguments)
    since, machine = time.time(), None
    if options.since is not None and options.since.exists():
        since = float(options.since.read_text(encoding="ascii"))
        # A second start on this machine is told by that.
        machine = f"{int(since)}-{socket.gethostname()}"
    ledger = Ledger(
        options.volume / _LEDGER,
        limit_seconds=options.limit_seconds,
        overhead_seconds=options.overhead_seconds,
        since=since,
        machine=machine,
    )
    copies = Copies(options.volume, Path(tempfile.mkdtemp(prefix="sweep-rented-")))
    return keep([sys.executable, "-P", "-c", SWEEP, *options.command], copies=copies, ledger=ledger)


if __name__ == "__main__":
    sys.exit(main())
