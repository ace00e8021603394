"""A study that another machine drives, reached by ssh: prepared and started there, followed from
here, asked to stop, and fetched. It goes on there whatever becomes of the connection.

The way there is the system's own ssh with the user's own configuration, and one connection for
everything. It never prompts, and never accepts a host key that is not known here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import IO, Self, TypeVar, cast

from pydantic import BaseModel

from qlora_sweep.reports import format as units
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, quote, words_of
from qlora_sweep.search_spaces.redaction import shown
from qlora_sweep.sweep.installation import DISTRIBUTION
from qlora_sweep.sweep.launching import parcel, there
from qlora_sweep.sweep.scratch import scratch

SSH = "SWEEP_SSH"
"""Variable with another ssh command and its options."""
_OPTIONS = {
    # Of what is said twice ssh takes the first, so no configuration takes the place of these.
    "BatchMode": "yes",
    "StrictHostKeyChecking": "yes",
    "ConnectTimeout": "15",
    # A connection that is gone is noticed within half a minute.
    "ServerAliveInterval": "10",
    "ServerAliveCountMax": "3",
    "LogLevel": "ERROR",
    "ClearAllForwardings": "yes",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    # The first command opens it, and the others share it; if this process is gone, it ends soon.
    "ControlMaster": "auto",
    "ControlPersist": "30",
}
_LOST = 255
_ADDRESS = re.compile(
    r"(?:[^\s@:/'\"-][^\s@:/'\"]*@)?(?:\[[0-9A-Fa-f:.]+\]|[\w.][\w.-]*)(?::(?P<port>\d{1,5}))?"
)
_BY_HAND = "BY-HAND"
"""Stands for the command that connects by hand."""
LAST_WORDS_MAX = 500
"""Letters of what a command said last."""
_REFUSALS = {
    "HOST IDENTIFICATION HAS CHANGED": "its host key is another than the one that is known here: "
    "somebody else may answer in its name. Find out why before you remove it with ssh-keygen -R",
    "Host key verification failed|No .* host key is known": "its host key is unknown here: run "
    "`BY-HAND` once, compare the fingerprint, and accept it",
    "Permission denied": "no key of yours is accepted there: run ssh-copy-id, or ssh-add where the "
    "key has a passphrase, until `BY-HAND true` asks nothing",
    "Could not resolve": "no such host is known: mind the spelling, or name it in ~/.ssh/config",
    "Connection refused": "nothing listens there: is sshd running, and is that its port?",
    "timed out|No route|unreachable": "no answer: is it on, and does `BY-HAND` get there?",
}
"""Why there is no connection, by what ssh says, and what to do about it."""
_CURES = {
    r"No space left|disk is full|[Qq]uota": "free some space there",
    r"Read-only file system": "its home cannot be written to: mount it writable, or log in as "
    "somebody whose home is",
    r"Permission denied": "give your user there the right to it",
    r"Too many open files": "raise the limit of open files there (`ulimit -n`)",
    r"File too large": "raise the limit of a file's size there (`ulimit -f`)",
    r"Cannot allocate memory|MemoryError": "end what takes its memory, or raise `ulimit -v` there",
    r"[Rr]esource temporarily unavailable|annot fork|start new thread": "raise the limit of "
    "processes there (`ulimit -u`), or end some",
    r"CERTIFICATE|certificate": "is its clock right (`date`)? Else its certificates are too old",
    r"No matching distribution|not find a version|no version of|ResolutionImpossible|"
    r"unsatisfiable": "what runs here cannot be installed there: install qlora-sweep there, and "
    "name its Python with --with python=PATH",
    r"malformed|not a database": "the study's database there is broken: put a copy in its place",
}
"""What to do where a command fails there, by what it says."""
HOME = "~/qlora-sweep"
"""There: a directory for each study, which is its ``SWEEP_HOME``."""
PYTHON = "~/.cache/qlora-sweep/venv/bin/python"
"""There: of the environment that is sweep's own."""
RECONNECT_SECONDS = (1.0, 2.0, 5.0, 10.0, 20.0)
"""Pauses before each attempt, which takes as long as ssh waits besides."""
FILE_BYTES_MAX = 512 * 1024**2
NAME_BYTES_MAX = 255
"""Of a file, as file systems have it."""
DATABASE_BYTES_MAX = 2 * 1024**3
"""Of a study's database, which is fetched whole: a study of 10,000 trials has a hundredth of it."""
ANSWER_BYTES_MAX = 64 * 1024**2
"""Of an answer; one has what a study printed in it."""
LOGIN_BYTES_MAX = 1024**2
"""Of what a login prints before an answer."""
FILES_MAX = 4096
"""Of a study's directory that are fetched."""
_CHUNK = 2**16
"""Bytes that are read at a time, that a line has at most, and that are kept of an stderr."""
_SILENT_SECONDS = 120.0
"""From the start of a command until its answer begins: a login may load much from a slow disk."""
_HEADER_BYTES = 2**20
"""More than the archive of a study has between two of its files."""
_MARK = f"{there.MARK}\n".encode()
_FIND = (
    "echo {mark}; for python in {pythons}; do "
    'command -v "$python" >/dev/null 2>&1 && '
    '"$python" -I -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null && '
    'command -v "$python" && exit; done; true'
)
"""Prints a Python that is new enough."""


_DATABASE = "host.db"
"""In the archive that `there.fetch` sends, beside ``files/NAME`` and ``left/NAME``."""


class ConnectionLostError(EnvironmentFault):
    """There is no connection any more, or none yet; what was started there goes on."""


def checked_address(typed: str) -> str:
    """Return an address like ``user@box:port``; user and port may be missing, ssh knows them.

    Raises:
        InputError: it is none.
    """
    found = _ADDRESS.fullmatch(typed)
    if found is None or not 0 < int(found["port"] or 22) < 65536:
        raise InputError(f"--on ssh: an address is like user@box:22, got {quote(typed)}")
    return typed


class SshConnection:
    """A connection that commands share; use it in a ``with``. Ctrl-C does not reach it.

    Args:
        address: as `checked_address` returns it.

    Raises:
        EnvironmentFault: there is no ssh here.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        ssh = shlex.split(os.environ.get(SSH, "")) or ["ssh"]
        if shutil.which(ssh[0]) is None:
            raise EnvironmentFault(f"{ssh[0]} is not here: install OpenSSH's client, or set {SSH}")
        # A socket's whole name is no longer than a hundred letters.
        short = Path("/tmp") if len(tempfile.gettempdir()) > 50 else None
        self._closing = ExitStack()
        directory = self._closing.enter_context(scratch("ssh", parent=short))
        options = {**_OPTIONS, "ControlPath": str(directory / "socket")}
        self._command = ssh + [f"-o{key}={value}" for key, value in options.items()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        close = self._command + ["-O", "exit", "--", f"ssh://{self.address}"]
        subprocess.run(close, capture_output=True, check=False)
        self._closing.close()

    def start(self, command: str, *, stdin: IO[bytes]) -> RemoteCommand:
        """Return a command that runs there, in the user's shell; it reads a file from its start."""
        stdin.seek(0)
        line = self._command + ["--", f"ssh://{self.address}", command]
        process = subprocess.Popen(
            line,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        return RemoteCommand(process, self.address)

    @contextmanager
    def called(self, command: str, stdin: IO[bytes]) -> Iterator[RemoteCommand]:
        """Yield a command that runs there, at the beginning of its answer, which is to be read
        inside the ``with``.

        Raises:
            ConnectionLostError: there is no connection, or it ended before the command.
            EnvironmentFault: the command failed, or what it answers is not what is expected.
        """
        running = self.start(command, stdin=stdin)
        try:
            running.skip_login()
            yield running
            running.finish()
        except (tarfile.TarError, ValueError) as error:
            # Where it failed, that says more.
            running.finish()
            raise not_understood(self.address, words_of(error)) from error
        finally:
            running.kill()


def not_understood(address: str, what: str) -> EnvironmentFault:
    """Return the fault of a machine whose answer is none."""
    expected = f"{address} does not answer as sweep does there ({what})"
    cure = f"`ssh ssh://{address} true` is to print nothing and to end at once"
    return EnvironmentFault(
        f"{expected}. Does a login script there print or start something, or did somebody change "
        f"files of sweep's? {cure}"
    )


class RemoteCommand:
    """A command that runs on another machine: its stdout is read here, up to what is allowed, and
    the last that it says on stderr is kept.

    Args:
        process: ssh's, with pipes.
        address: of the machine.
    """

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        assert process.stdout is not None
        self._process = process
        self._address = address
        self._output = process.stdout.fileno()
        self._pending = b""
        self._left = LOGIN_BYTES_MAX
        self._said = b""
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with suppress(OSError, ValueError):
            while chunk := os.read(self._process.stderr.fileno(), _CHUNK):
                self._said = (self._said + chunk)[-_CHUNK:]

    def allow(self, size: int) -> None:
        """Let so many bytes be read from here on; what comes beyond is the machine's fault."""
        self._left = size

    def heard(self, seconds: float) -> bytes | None:
        """Return what it prints next, nothing at its end, and None where nothing comes for so long.

        Raises:
            EnvironmentFault: that is more than is allowed.
        """
        if self._pending:
            chunk = self._pending
            self._pending = b""
            return chunk
        if not select.select([self._output], [], [], seconds)[0]:
            return None
        chunk = os.read(self._output, _CHUNK)
        self._left -= len(chunk)
        if self._left < 0:
            raise not_understood(self._address, "it sends more than it was asked for")
        return chunk

    def _heard_in_time(self, seconds: float = _SILENT_SECONDS) -> bytes:
        """Return what `heard` returns, where anything comes within so many seconds.

        Raises:
            EnvironmentFault: nothing does.
        """
        chunk = self.heard(seconds)
        if chunk is None:
            raise not_understood(self._address, f"nothing within {_SILENT_SECONDS:g} s")
        return chunk

    def read(self, size: int = -1) -> bytes:
        """Return up to so many bytes, none at its end; by default all until there.

        Raises what `heard` raises.
        """
        if size < 0:
            return b"".join(iter(partial(self.read, _CHUNK), b""))
        chunk = None
        while chunk is None:
            chunk = self.heard(_SILENT_SECONDS)
        self._pending = chunk[size:]
        return chunk[:size]

    def skip_login(self) -> None:
        """Pass over what the login prints, until the answer begins.

        Raises:
            ConnectionLostError: there is no connection, or it ended before the command.
            EnvironmentFault: the command failed, or there is no answer.
        """
        until = time.monotonic() + _SILENT_SECONDS
        printed = b""
        while _MARK not in printed:
            chunk = self._heard_in_time(max(0.0, until - time.monotonic()))
            if not chunk:
                self.check()
                lines = printed.decode(errors="replace").strip().splitlines() or ["nothing"]
                raise not_understood(self._address, f"it printed {quote(lines[-1])}")
            printed += chunk
        self._pending = printed.partition(_MARK)[2]
        self.allow(ANSWER_BYTES_MAX)

    def finish(self) -> None:
        """Read what is left, and raise what it ended by. Raises what `check` and `heard` raise."""
        while self._heard_in_time():
            pass
        self.check()

    def check(self) -> None:
        """Wait for its end, and raise what that means, with what to do about it.

        Raises:
            ConnectionLostError: there is no connection, or it ended before the command.
            EnvironmentFault: the command failed; with the last that it said.
        """
        code = self._process.wait()
        self._listener.join(1.0)
        said = shown(self._said.decode(errors="replace"))
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        last = f"exit status {code}"
        if lines:
            last = lines[-1][:LAST_WORDS_MAX]
        if code == _LOST:
            by_hand = f"ssh ssh://{self._address}"
            why = f"the connection was lost: {last}"
            for pattern, words in _REFUSALS.items():
                if re.search(pattern, said):
                    why = words.replace(_BY_HAND, by_hand)
                    break
            raise ConnectionLostError(f"{self._address}: {why}")
        if code != 0:
            for pattern, cure in _CURES.items():
                if re.search(pattern, last):
                    last = f"{last}: {cure}"
                    break
            raise EnvironmentFault(f"on {self._address}: {last}")

    def kill(self) -> None:
        """End it, where it has not ended. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._listener.join(1.0)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


class Installed(BaseModel):
    """A Python there, and what is installed for it."""

    executable: str
    is_environment: bool
    versions: dict[str, str]
    sweep: str | None
    stamp: str | None


class Seen(BaseModel):
    """What is there before anything is done."""

    runs: bool
    """Whether the study does."""
    target: Installed | None
    """The Python that is to run it; None where there is none."""


class StudyStarted(BaseModel):
    """What came of starting a study."""

    was_running: bool


class RemoteEnd(BaseModel):
    """How a study ended there."""

    exit: int | None
    """Its exit code; None where it was not noted."""
    stdout: str


class Done(BaseModel):
    """What was done, and needs no answer."""


A = TypeVar("A", bound=BaseModel)


class RemoteStudy:
    """A study in its directory on another machine, and the Python that is to run it.

    Args:
        connection: the way there.
        name: of the study.
        python: of an environment there that is to be used; None for one of sweep's own.

    Raises:
        EnvironmentFault: there is no way there, or no Python that is new enough.
    """

    def __init__(self, connection: SshConnection, name: str, *, python: str | None = None) -> None:
        self._connection = connection
        self._name = name
        self.directory = f"{HOME}/{name}"
        self._program = Path(there.__file__).read_bytes()
        self._heard = 0
        self._asked = 0
        if python is None:
            pythons = "python3 python3.13 python3.12 python3.11 python"
        elif python.startswith("~/"):
            pythons = f'"$HOME"/{shlex.quote(python[2:])}'
        else:
            pythons = shlex.quote(python)
        find = _FIND.format(mark=shlex.quote(there.MARK), pythons=pythons)
        with (
            tempfile.TemporaryFile() as nothing,
            connection.called(f"sh -c {shlex.quote(find)}", nothing) as answer,
        ):
            # A path need not be of any encoding.
            found = os.fsdecode(answer.read()).splitlines()
        if not found:
            words = f"--with python: {python} on {connection.address} is no Python 3.11 or newer"
            if python is None:
                words = f"{connection.address}: no Python 3.11 or newer is found there: install "
                words += "one, or name one with --with python=PATH"
            raise EnvironmentFault(words)
        self._base = found[0]
        self._python = PYTHON
        if python is not None:
            self._python = self._base

    def _line(self, verb: str, arguments: Sequence[str]) -> str:
        size = str(len(self._program))
        words = [self._base, "-I", "-c", there.BOOT, size, verb]
        return f"exec {shlex.join(words + list(arguments))}"

    @contextmanager
    def _called(
        self, verb: str, *arguments: str, stdin: IO[bytes] | None = None
    ) -> Iterator[RemoteCommand]:
        """Yield a verb of `there` that runs, at the beginning of its answer."""
        with tempfile.TemporaryFile() as whole:
            whole.write(self._program)
            if stdin is not None:
                stdin.seek(0)
                shutil.copyfileobj(stdin, whole)
            with self._connection.called(self._line(verb, arguments), whole) as running:
                yield running

    def _do(self, answer: type[A], verb: str, *arguments: str, stdin: IO[bytes] | None = None) -> A:
        with self._called(verb, *arguments, stdin=stdin) as running:
            return answer.model_validate_json(running.read())

    def look(self) -> Seen:
        """Return whether it runs, and what is installed there; changes nothing."""
        return self._do(Seen, "look", self.directory, self._python)

    def prepare(self, target: Installed | None, *, say: Callable[[str], None]) -> None:
        """Install this version of sweep there, where it is not.

        Args:
            target: what `look` found installed for the Python of the environment.
            say: told what takes long, and which versions differ.

        Raises:
            EnvironmentFault: it cannot be installed, or not now.
        """
        where = self._connection.address
        here = version(DISTRIBUTION)
        digest = hashlib.sha256(parcel.make_wheel()[1]).hexdigest()
        if target is not None and target.sweep and target.stamp is None:
            # Somebody else installed it.
            if target.sweep != here:
                there_is = f"{where} has sweep {target.sweep} in {target.executable}"
                raise EnvironmentFault(f"{there_is}, and here is {here}: install the same there")
        elif target is None or not target.sweep or target.stamp != digest:
            if target is not None and not target.is_environment:
                bare = f"{self._python} on {where} is of no environment and has no sweep"
                raise EnvironmentFault(f"--with python: {bare}: name an environment's, or leave it")
            say(f"Installing sweep {here} on {where} ...")
            with scratch("parcel") as parcels, tempfile.TemporaryFile() as packed:
                parcel.write(parcels)
                with tarfile.open(fileobj=packed, mode="w") as archive:
                    archive.add(parcels, ".")
                self._do(Done, "install", self._python, "-", "", "", HOME, stdin=packed)
            target = self.look().target
            if target is None:
                raise EnvironmentFault(f"{self._python} on {where} does not run once it is there")
        differing = [f"{n} {t} (here {h})" for n, t, h in parcel.differences(target.versions)]
        if differing:
            say(f"On {where} other versions run than here: {', '.join(differing)}.")

    def start(
        self, words: Sequence[str], files: Mapping[str, Path], variables: Mapping[str, str]
    ) -> bool:
        """Start ``sweep`` there, unless it runs; return whether it did.

        Args:
            words: behind ``sweep``.
            files: files here, by their path in the study's directory.
            variables: that the login there may not have. They are in no file and no command line.

        Raises:
            OSError: a file cannot be read.
            EnvironmentFault: one cannot be written there, or nothing can be started.
        """
        # On the disk: a dataset may be larger than the memory.
        with tempfile.TemporaryFile() as packed:
            asked = {"words": list(words), "variables": dict(variables)}
            packed.write(json.dumps(asked).encode() + b"\n")
            # What a link stands for; a link would stand for nothing there.
            with tarfile.open(fileobj=packed, mode="w|", dereference=True) as archive:
                for name, path in files.items():
                    archive.add(path, name)
            answer = self._do(StudyStarted, "start", self.directory, self._python, stdin=packed)
            return answer.was_running

    def follow(
        self,
        *,
        hear: Callable[[str], None],
        requests: Callable[[], int],
        say: Callable[[str], None],
        pauses: Sequence[float] = RECONNECT_SECONDS,
    ) -> RemoteEnd:
        """Follow what it says until it has ended; return how.

        Args:
            hear: told each line of its stderr.
            requests: how often it is to be asked to stop, so far.
            say: told that the connection is gone.
            pauses: seconds before each attempt to connect again.

        Raises:
            ConnectionLostError: it does not come back; the study goes on.
        """
        left = list(pauses)
        while True:
            before = self._heard
            try:
                self._listen(hear, requests)
                return self._do(RemoteEnd, "end", self.directory)
            except ConnectionLostError as error:
                if self._heard > before:
                    left = list(pauses)
                if not left:
                    raise
                if len(left) == len(pauses):
                    say(f"{error}; the study goes on there. Connecting again ...")
                time.sleep(left.pop(0))

    def _listen(self, hear: Callable[[str], None], requests: Callable[[], int]) -> None:
        """Pass on what is said there, and there what is asked here."""
        with tempfile.TemporaryFile() as program:
            program.write(self._program)
            line = self._line("follow", (self.directory, str(self._heard)))
            running = self._connection.start(line, stdin=program)
        rest = b""
        try:
            running.skip_login()
            while True:
                while requests() > self._asked:
                    self._do(Done, "ask", self.directory)
                    self._asked += 1
                # A study may say as much as it likes.
                running.allow(ANSWER_BYTES_MAX)
                chunk = running.heard(0.2)
                if chunk is None:
                    continue
                if not chunk:
                    break
                *lines, rest = (rest + chunk).split(b"\n")
                for one in lines:
                    self._heard += len(one) + 1
                    hear(one.decode(errors="replace"))
                if len(rest) > _CHUNK:
                    self._heard += len(rest)
                    hear(rest.decode(errors="replace"))
                    rest = b""
            running.check()
        except ConnectionLostError:
            raise
        except EnvironmentFault as error:
            # Whatever became of who follows it, the study is another process.
            raise ConnectionLostError(str(error)) from error
        finally:
            running.kill()
        if rest:
            hear(rest.decode(errors="replace"))

    def fetch(
        self, into: Path, *, bytes_max: int = FILE_BYTES_MAX
    ) -> tuple[Path, Mapping[str, Path], list[str]]:
        """Fetch a copy of its database as of one moment, and its files.

        Args:
            into: an empty directory for them.
            bytes_max: of a file that is fetched; the database is, whatever its size.

        Returns:
            The database, which is not there where it has none yet; copies of its files by name;
            names of those that are too large to be kept here, too.

        Raises:
            EnvironmentFault: they cannot be had, or there is no room for them.
            OSError: they cannot be written.
        """
        files = into / "files"
        files.mkdir(exist_ok=True)
        found = dict[str, Path]()
        left_out = list[str]()
        with self._called("fetch", self.directory, self._name, str(bytes_max)) as packed:
            packed.allow(_HEADER_BYTES)
            # What links stand for, and where names lead, is the other machine's: neither is taken.
            with tarfile.open(fileobj=cast(IO[bytes], packed), mode="r|") as archive:
                for count, entry in enumerate(archive):
                    place, _, name = entry.name.partition("/")
                    path = into / _DATABASE
                    most = DATABASE_BYTES_MAX
                    if entry.name != _DATABASE:
                        if place not in ("files", "left") or not _is_plain(name):
                            raise tarfile.ReadError(f"it sends {quote(entry.name)}")
                        path = files / name
                        most = bytes_max
                    if count > FILES_MAX:
                        raise tarfile.ReadError(f"it sends more than {FILES_MAX:,} files")
                    if not entry.isreg() or entry.issparse():
                        raise tarfile.ReadError(f"{quote(entry.name)} is a link, or no file")
                    if place == "left":
                        left_out.append(name)
                    else:
                        self._require_room(entry, most=most, into=into)
                        packed.allow(entry.size + _HEADER_BYTES)
                        content = archive.extractfile(entry)
                        assert content is not None, "it is a file"
                        with path.open("wb") as file:
                            shutil.copyfileobj(content, file)
                        if place == "files":
                            found[name] = path
                    packed.allow(_HEADER_BYTES)
        return into / _DATABASE, found, left_out

    def _require_room(self, entry: tarfile.TarInfo, *, most: int, into: Path) -> None:
        """Raise where a file that is about to be fetched is too large, before it is written."""
        name = f"{quote(entry.name)} of study {self._name} on {self._connection.address}"
        size = units.gib(entry.size)
        if entry.size > most:
            where = f"copy it by hand from {self.directory}/runs"
            limit = f"no more than {units.gib(most)} is fetched"
            raise EnvironmentFault(f"{name} has {size}, and {limit}: {where}")
        free = shutil.disk_usage(into).free
        if entry.size > free:
            cure = "free some space, or set TMPDIR to another disk"
            raise EnvironmentFault(f"{name} has {size}, and {into} has {units.gib(free)}: {cure}")


def _is_plain(name: str) -> bool:
    """Whether a name that the other machine gives leads to no other directory."""
    is_name = 0 < len(name.encode()) <= NAME_BYTES_MAX and name.isprintable()
    return is_name and "/" not in name and name not in (".", "..")
