"""A study that another machine drives: started there, followed from here, asked to stop, and
fetched.

It goes on there whatever becomes of the connection.
"""

from __future__ import annotations

import json
import queue
import shutil
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from search_spaces.errors import EnvironmentFault, words_of
from sweep.launching.box import Box
from sweep.launching.ssh import ConnectionLostError

HOME = "~/qlora-sweep"
"""There: a directory for each study, which is its ``SWEEP_HOME``."""
RECONNECT_SECONDS = (1.0, 2.0, 5.0, 10.0, 20.0)
"""Pauses before each attempt; an attempt takes as long as `ssh.CONNECT_SECONDS` besides."""
_LOOK_SECONDS = 0.2
FILE_BYTES_MAX = 512 * 1024 * 1024


@dataclass(frozen=True)
class Ended:
    """How a study's command ended there."""

    code: int | None
    """Its exit code; None where nobody noted it: the machine went down, say."""
    stdout: str


@dataclass(frozen=True)
class Fetched:
    """What was fetched of a study."""

    database: Path
    """A copy of its database; not there where it had none yet."""
    files: Mapping[str, Path]
    """Of its directory, by name; copies."""
    left_out: tuple[str, ...] = ()
    """Names of those that are too large to be kept here, too."""


class RemoteStudy:
    """A study in its directory there.

    Args:
        box: the machine.
        name: of the study.
        bytes_max: of a file that is fetched; the database is, whatever its size.
    """

    def __init__(self, box: Box, name: str, *, bytes_max: int = FILE_BYTES_MAX) -> None:
        self._box = box
        self._name = name
        self._asked = 0
        self._bytes_max = bytes_max
        self.directory = f"{HOME}/{name}"

    def ship(self, files: Mapping[str, Path]) -> None:
        """Put files into its directory.

        Args:
            files: a file or a directory here, by its path there.

        Raises:
            EnvironmentFault: one cannot be read, or not be written there.
        """
        if not files:
            return
        # On the disk: texts may be larger than the memory.
        with tempfile.TemporaryFile() as packed:
            try:
                # What a link stands for; a link would stand for nothing there.
                with tarfile.open(fileobj=packed, mode="w", dereference=True) as archive:
                    for name, path in files.items():
                        archive.add(path, name)
            except OSError as error:
                raise EnvironmentFault(f"it cannot be sent: {words_of(error)}") from error
            packed.seek(0)
            self._box.do("put", self.directory, file=packed)

    def runs(self) -> bool:
        """Return whether it runs; asks whatever Python is there."""
        return bool(self._box.do("runs", self.directory)["runs"])

    def start(self, words: Sequence[str]) -> bool:
        """Start ``sweep`` with those words, unless it runs; return whether it did."""
        asked = json.dumps({"words": list(words)}).encode()
        return bool(self._box.do("start", self.directory, stdin=asked)["was_running"])

    def follow(
        self,
        *,
        hear: Callable[[str], None],
        requests: Callable[[], int],
        say: Callable[[str], None],
        pauses: Sequence[float] = RECONNECT_SECONDS,
    ) -> Ended:
        """Follow what it says until it has ended; return how it did.

        Args:
            hear: told each line of its stderr.
            requests: how often it is to be asked to stop, so far.
            say: told that the connection is gone.
            pauses: seconds before each attempt to connect again.

        Raises:
            ConnectionLostError: it does not come back; the study goes on.
        """
        lines, in_vain = _Lines(hear), 0
        while True:
            before = lines.bytes
            try:
                self._listen(lines, requests)
                lines.end()
                ended = self._box.do("end", self.directory)
                return Ended(ended["exit"], ended["stdout"])
            except ConnectionLostError as error:
                in_vain = 0 if lines.bytes > before else in_vain + 1
                if in_vain > len(pauses):
                    raise
                say(f"{error}; the study goes on there. Connecting again ...")
                self._reconnect(error, pauses)

    def _reconnect(self, lost: ConnectionLostError, pauses: Sequence[float]) -> None:
        """Connect again; where that cannot be done it is the same connection that is lost."""
        why: EnvironmentFault = lost
        for pause in pauses:
            time.sleep(pause)
            try:
                self._box.connection.open()
                return
            except EnvironmentFault as error:
                why = error
        raise ConnectionLostError(f"{lost}; {why}") from why

    def _listen(self, lines: _Lines, requests: Callable[[], int]) -> None:
        """Pass on what is said there, and there what is asked here."""
        with tempfile.TemporaryFile() as said:
            process = self._box.follow(self.directory, str(lines.bytes), stderr=said)
            assert process.stdout is not None
            chunks = queue.SimpleQueue[bytes]()
            reader = threading.Thread(target=_read, args=(process.stdout, chunks), daemon=True)
            reader.start()
            try:
                for chunk in _until_end(chunks):
                    lines.take(chunk)
                    while requests() > self._asked:
                        self._box.do("ask", self.directory)
                        self._asked += 1
                code = process.wait()
            finally:
                process.kill()
                process.wait()
                reader.join()
                process.stdout.close()
            said.seek(0)
            try:
                self._box.connection.check(code, said.read().decode(errors="replace"))
            except EnvironmentFault as error:
                # Whatever became of who follows it, the study is another process.
                raise ConnectionLostError(str(error)) from error

    def fetch(self, into: Path) -> Fetched:
        """Fetch its files, and a copy of its database as of one moment.

        Args:
            into: an empty directory for them.

        Raises:
            EnvironmentFault: they cannot be had, or there is no room for them.
        """
        database, files, left_out = into / "host.db", dict[str, Path](), list[str]()
        (into / "files").mkdir()
        # On the disk: a study of months may be larger than the memory.
        with tempfile.TemporaryFile(dir=into) as packed:
            self._box.fetch(self.directory, self._name, into=packed)
            with tarfile.open(fileobj=packed, mode="r|") as archive:
                for entry in archive:
                    content = archive.extractfile(entry)
                    where, _, name = entry.name.rpartition("/")
                    if content is None:
                        continue
                    if entry.name == "host.db":
                        _write(database, content)
                    elif where == "files" and name not in ("", ".", ".."):
                        if entry.size > self._bytes_max:
                            left_out.append(name)
                            continue
                        files[name] = into / "files" / name
                        _write(files[name], content)
        return Fetched(database, files, tuple(left_out))


def _write(path: Path, content: IO[bytes]) -> None:
    with path.open("wb") as file:
        shutil.copyfileobj(content, file)


class _Lines:
    """Cuts what comes into lines, and counts its bytes, so that it can be gone on with."""

    def __init__(self, hear: Callable[[str], None]) -> None:
        self._hear = hear
        self._rest = b""
        self.bytes = 0

    def take(self, chunk: bytes) -> None:
        self.bytes += len(chunk)
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        for line in whole:
            self._hear(line.decode(errors="replace"))

    def end(self) -> None:
        if self._rest:
            self._hear(self._rest.decode(errors="replace"))
            self._rest = b""


def _read(stdout: IO[bytes], chunks: queue.SimpleQueue[bytes]) -> None:
    """Hand on what comes, and nothing at all once it has ended."""
    while chunk := stdout.read1(65536):  # type: ignore[attr-defined]
        chunks.put(chunk)
    chunks.put(b"")


def _until_end(chunks: queue.SimpleQueue[bytes]) -> Iterator[bytes]:
    """Yield what comes, and nothing now and then while nothing does."""
    while True:
        try:
            chunk = chunks.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            yield b""
            continue
        if not chunk:
            return
        yield chunk
