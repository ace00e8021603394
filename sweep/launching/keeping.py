"""A rented machine's side of a study: it goes on from what a volume keeps, and leaves what
came of it there, whatever becomes of the machine.

The database is written on the machine's own disk and copied with SQLite's own backup: a bucket's
mount knows no locks and uploads a file once it is closed, and Modal takes its pictures of a volume
while others write. Copies take each other's place whole, so the volume holds a study that can be
resumed at every moment. Runs as ``python -P -m sweep.launching.keeping``.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from sweep.launching.ledger import PART, Ledger

SAVE_SECONDS = 5.0
"""A trial takes longer, so no more than one is to be done again."""
INTERRUPTED, FAULT = 130, 3
_PR_SET_PDEATHSIG = 1
_LEDGER, _FILES = "paid.json", "runs"
_NEVER_KEPT = (".lock", "-journal", "-wal", "-shm", PART)
"""What belongs to a machine: locks, and halves of transactions, which a backup has whole."""

Stamp = tuple[int, ...]


@dataclass
class Keeper:
    """Copies a study's files between a volume's directory and the machine's own disk."""

    volume: Path
    home: Path
    """``SWEEP_HOME`` of the study: new, and nobody else's."""
    _saved: dict[Path, Stamp] = field(default_factory=dict)

    def restore(self) -> int:
        """Fetch what the volume keeps; return the number of files."""
        kept = list(_files(self.volume / _FILES))
        for path in kept:
            _copy(self.volume / _FILES / path, self.home / _FILES / path)
            self._saved[path] = _stamp(self.home / _FILES / path)
        return len(kept)

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
            self._put(path)
            self._saved[path] = stamps[path]
        gone = [path for path in self._saved if path not in stamps]
        for path in gone:
            (self.volume / _FILES / path).unlink(missing_ok=True)
            del self._saved[path]
        return bool(changed or gone)

    def _put(self, path: Path) -> None:
        source, target = self.home / _FILES / path, self.volume / _FILES / path
        if path.suffix != ".db":
            _copy(source, target)
            return
        copied = self.home / path.name
        with (
            closing(sqlite3.connect(source, timeout=30)) as live,
            closing(sqlite3.connect(copied)) as copy,
        ):
            live.backup(copy)
        _copy(copied, target)


def _files(directory: Path) -> Iterator[Path]:
    """Yield the files below a directory that are to be kept, relative to it."""
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not path.name.endswith(_NEVER_KEPT):
            yield path.relative_to(directory)


def _stamp(path: Path) -> Stamp:
    """Return what changes with a file; of a database, with what is yet to be folded into it too."""
    beside = [path.with_name(path.name + end) for end in ("-wal",)] if path.suffix == ".db" else []
    stats = [one.stat() for one in (path, *beside) if one.exists()]
    return tuple(number for stat in stats for number in (stat.st_mtime_ns, stat.st_size))


def _copy(source: Path, target: Path) -> None:
    """Copy a file so that ``target`` is the old one or the new one, never a part.

    Its contents alone: what buckets are mounted with takes no permissions and no times.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + PART)
    shutil.copyfile(source, part)
    os.replace(part, target)


class Stopper:
    """Hands on to a child what asks this process to stop: Ctrl-C, and what a preemption sends."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self.is_asked = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._heard)

    def _heard(self, _number: int, _frame: FrameType | None) -> None:
        self.ask()

    def watch(self, child: subprocess.Popen[bytes]) -> None:
        """Hand on to this child, also what came before it."""
        self._child = child
        if self.is_asked:
            child.terminate()

    def ask(self) -> None:
        """Ask the child to stop, once: a second time would cut short how it ends."""
        if not self.is_asked and self._child is not None:
            self._child.terminate()
        self.is_asked = True


def keep(
    command: Sequence[str],
    *,
    keeper: Keeper,
    ledger: Ledger,
    environment: Mapping[str, str],
    stopper: Stopper,
    save_seconds: float = SAVE_SECONDS,
) -> int:
    """Run a command, keeping what it writes; return the exit code for the provider.

    That is 0 where a further attempt would do no more: the study has ended, whether anything fits
    or not, or what it may cost is spent. Where another machine has the study, nothing of it is
    touched.
    """
    refused = _refused(ledger, stopper, seconds=save_seconds)
    if refused is not None:
        return refused
    files = keeper.restore()
    _say(f"resuming from {files} files of the volume" if files else "starting a new study")
    # Its own session, so that a terminal's Ctrl-C reaches it once, and through here.
    child = subprocess.Popen(
        command, env=dict(environment), start_new_session=True, preexec_fn=_end_with_parent
    )
    stopper.watch(child)
    while (code := _ended(child, seconds=save_seconds)) is None:
        if not ledger.is_ours:
            return _given_up(child, stopper)
        _try_to_keep(keeper, ledger)
        if ledger.is_spent and not stopper.is_asked:
            _say("what the study may cost is spent: stopping it")
            stopper.ask()
    if not ledger.is_ours:
        return _given_up(child, stopper)
    if not _try_to_keep(keeper, ledger, is_last=True):
        return FAULT
    if code == INTERRUPTED and ledger.is_spent:
        return 0
    return {1: 0}.get(code, code if code >= 0 else 128 - code)


def _refused(ledger: Ledger, stopper: Stopper, *, seconds: float) -> int | None:
    """Take the study over; return the exit code where that is not to be."""

    def wait(most: float) -> bool:
        time.sleep(min(most, seconds))
        return not stopper.is_asked

    if not ledger.is_ours:
        _say("another machine had the study: looking whether it still has")
    try:
        is_claimed = ledger.claim(wait=wait)
        if is_claimed and ledger.is_spent:
            ledger.write(force=True, is_last=True)
    except OSError as error:
        _say(f"the volume could not be written: {error}")
        return FAULT
    if stopper.is_asked:
        return INTERRUPTED
    if not is_claimed:
        _say(
            "another machine runs this study, which is kept there alone; nothing was started. "
            "Stop that one first, or launch this under another --study"
        )
        return FAULT
    if ledger.is_spent:
        _say("what the study may cost is spent: start it again with a higher --max-dollars")
        return 0
    return None


def _given_up(child: subprocess.Popen[bytes], stopper: Stopper) -> int:
    """Leave the study to the machine that has taken it over."""
    _say("another machine goes on with this study: stopping it here, and keeping no more of it")
    stopper.ask()
    child.wait()
    return FAULT


def _end_with_parent() -> None:
    """Ask for a clean stop where whoever keeps what this writes is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _ended(child: subprocess.Popen[bytes], *, seconds: float) -> int | None:
    try:
        return child.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None


def _try_to_keep(keeper: Keeper, ledger: Ledger, *, is_last: bool = False) -> bool:
    """Save, and say where that cannot be done: the study goes on, and the next time may do."""
    try:
        has_changed = keeper.save()
        ledger.write(force=is_last or has_changed, is_last=is_last)
    except (OSError, sqlite3.Error) as error:
        _say(f"the volume could not be written: {error}")
        return False
    return True


def _say(text: str) -> None:
    sys.stderr.write(f"volume: {text}\n")
    sys.stderr.flush()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -P -m sweep.launching.keeping")
    parser.add_argument("--volume", type=Path, required=True, help="directory of this study alone")
    parser.add_argument("--limit-seconds", type=float, required=True, help="of all machines")
    parser.add_argument("--overhead-seconds", type=float, default=0.0, help="of each machine")
    parser.add_argument("--since", type=Path, help="file with the second the machine began")
    parser.add_argument("command", nargs="+", help="what follows `sweep`")
    return parser.parse_args(arguments)


def _machine(path: Path | None) -> str | None:
    """Return what this machine is called, where a second start on it can be told."""
    return (
        None if path is None or not path.exists() else f"{int(_begun(path))}-{socket.gethostname()}"
    )


def _begun(path: Path | None) -> float:
    """Return when this machine began: what a file says, or now."""
    try:
        return float(path.read_text(encoding="ascii")) if path is not None else time.time()
    except (OSError, ValueError):
        return time.time()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `sweep` on this machine as the options say; return its exit code for the provider."""
    options = _options(arguments)
    stopper = Stopper()
    home = Path(tempfile.mkdtemp(prefix="sweep-rented-"))
    environment = {name: value for name, value in os.environ.items() if name != "SWEEP_STORAGE"}
    ledger = Ledger(
        options.volume / _LEDGER,
        limit_seconds=options.limit_seconds,
        overhead_seconds=options.overhead_seconds,
        since=_begun(options.since),
        machine=_machine(options.since),
    )
    return keep(
        [sys.executable, "-P", "-m", "sweep", *options.command],
        keeper=Keeper(options.volume, home),
        ledger=ledger,
        environment={**environment, "SWEEP_HOME": str(home)},
        stopper=stopper,
    )


if __name__ == "__main__":
    sys.exit(main())
