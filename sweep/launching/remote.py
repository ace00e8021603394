"""A study that another machine drives, reached by ssh: prepared and started there, followed from
here, asked to stop, and fetched. It goes on there whatever becomes of the connection.

The way there is the system's own ssh with the user's own configuration, and one connection for
everything. It never asks anybody anything, and never takes a host key that nobody has looked at.
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
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, Self

from search_spaces.errors import EnvironmentFault, InputError, quote
from search_spaces.redaction import shown
from sweep.launching import parcel, there

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
_REFUSALS = {
    "HOST IDENTIFICATION HAS CHANGED": "its host key is another than the one that is known here: "
    "somebody else may answer in its name. Find out why before you remove it with ssh-keygen -R",
    "Host key verification failed|No .* host key is known": "its host key is unknown here: run "
    "`{by_hand}` once, compare the fingerprint, and accept it",
    "Permission denied": "no key of yours is accepted there: run ssh-copy-id, or ssh-add where the "
    "key has a passphrase, until `{by_hand} true` asks nothing",
    "Could not resolve": "no such host is known: mind the spelling, or name it in ~/.ssh/config",
    "Connection refused": "nobody listens there: is sshd running, and is that its port?",
    "timed out|No route|unreachable": "no answer: is it on, and does `{by_hand}` get there?",
}
"""Why there is no connection, by what ssh says, and what to do about it."""
HOME = "~/qlora-sweep"
"""There: a directory for each study, which is its ``SWEEP_HOME``."""
PYTHON = "~/.cache/qlora-sweep/venv/bin/python"
"""There: of the environment that is sweep's own."""
RECONNECT_SECONDS = (1.0, 2.0, 5.0, 10.0, 20.0)
"""Pauses before each attempt, which takes as long as ssh waits besides."""
FILE_BYTES_MAX = 512 * 1024 * 1024
_MARK = f"{there.MARK}\n".encode()
_FIND = (
    "echo {mark}; for python in {pythons}; do "
    'command -v "$python" >/dev/null 2>&1 && '
    '"$python" -I -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null && '
    'command -v "$python" && exit; done; true'
)
"""Prints a Python that is new enough."""


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


class Connection:
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
        short = "/tmp" if len(tempfile.gettempdir()) > 50 else None
        self._directory = tempfile.TemporaryDirectory(prefix="sweep-ssh-", dir=short)
        options = {**_OPTIONS, "ControlPath": str(Path(self._directory.name, "socket"))}
        self._command = [*ssh, *(f"-o{key}={value}" for key, value in options.items())]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        close = [*self._command, "-O", "exit", "--", f"ssh://{self.address}"]
        subprocess.run(close, capture_output=True, check=False)
        self._directory.cleanup()

    def start(
        self, command: str, *, stdin: IO[bytes], stdout: IO[bytes] | int, stderr: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Return a command that runs there, in the user's shell; it reads a file from its start."""
        stdin.seek(0)
        line = [*self._command, "--", f"ssh://{self.address}", command]
        return subprocess.Popen(
            line, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
        )

    def call(self, command: str, stdin: IO[bytes]) -> IO[bytes]:
        """Return what a command prints there, in a temporary file that is the caller's to close.

        Raises:
            ConnectionLostError: there is no connection, or it ended before the command.
            EnvironmentFault: the command failed; with the last that it said.
        """
        printed = tempfile.TemporaryFile()  # noqa: SIM115
        with tempfile.TemporaryFile() as said:
            process = self.start(command, stdin=stdin, stdout=printed, stderr=said)
            try:
                self.check(process.wait(), said)
            except BaseException:
                process.kill()
                process.wait()
                printed.close()
                raise
        printed.seek(0)
        return printed

    def check(self, code: int, stderr: IO[bytes]) -> None:
        """Raise what an exit code of ssh means, with what to do about it."""
        stderr.seek(0)
        said = shown(stderr.read().decode(errors="replace"))
        last = (said.strip().splitlines() or [f"exit status {code}"])[-1].strip()
        if code == _LOST:
            by_hand = f"ssh ssh://{self.address}"
            known = (words for pattern, words in _REFUSALS.items() if re.search(pattern, said))
            why = next(known, f"the connection was lost: {last}").format(by_hand=by_hand)
            raise ConnectionLostError(f"{self.address}: {why}")
        if code != 0:
            raise EnvironmentFault(f"on {self.address}: {last}")


class RemoteStudy:
    """A study in its directory on another machine, and the Python that is to run it.

    Args:
        connection: the way there.
        name: of the study.
        python: of an environment there that is to be used; None for one of sweep's own.

    Raises:
        EnvironmentFault: there is no way there, or no Python that is new enough.
    """

    def __init__(self, connection: Connection, name: str, *, python: str | None = None) -> None:
        self._connection, self._name = connection, name
        self.directory = f"{HOME}/{name}"
        self._program = Path(there.__file__).read_bytes()
        self._heard = self._asked = 0
        pythons = "python3 python3.13 python3.12 python3.11 python"
        if python is not None:
            home, rest = ('"$HOME"/', python[2:]) if python.startswith("~/") else ("", python)
            pythons = home + shlex.quote(rest)
        find = _FIND.format(mark=shlex.quote(there.MARK), pythons=pythons)
        with tempfile.TemporaryFile() as nothing:
            printed = connection.call(f"sh -c {shlex.quote(find)}", nothing)
        with printed:
            found = printed.read().partition(_MARK)[2].decode().splitlines()
        if not found:
            words = f"--with python: {python} on {connection.address} is no Python 3.11 or newer"
            if python is None:
                words = f"{connection.address}: no Python 3.11 or newer is found there: install "
                words += "one, or name one with --with python=PATH"
            raise EnvironmentFault(words)
        self._base = found[0]
        self._python = PYTHON if python is None else self._base

    def _line(self, verb: str, arguments: Sequence[str]) -> str:
        size = str(len(self._program))
        return "exec " + shlex.join([self._base, "-I", "-c", there.BOOT, size, verb, *arguments])

    def _called(self, verb: str, *arguments: str, stdin: IO[bytes] | None = None) -> IO[bytes]:
        """Return a file that stands where what a verb of `there` answers begins."""
        with tempfile.TemporaryFile() as whole:
            whole.write(self._program)
            if stdin is not None:
                stdin.seek(0)
                shutil.copyfileobj(stdin, whole)
            printed = self._connection.call(self._line(verb, arguments), whole)
        while printed.readline() not in (_MARK, b""):
            pass
        return printed

    def _do(self, verb: str, *arguments: str, stdin: IO[bytes] | None = None) -> dict[str, Any]:
        with self._called(verb, *arguments, stdin=stdin) as printed:
            return dict(json.load(printed))

    def look(self) -> dict[str, Any]:
        """Return whether it runs, and what is installed there; changes nothing."""
        return self._do("look", self.directory, self._python)

    def prepare(self, target: dict[str, Any] | None, *, say: Callable[[str], None]) -> None:
        """Install this version of sweep there, where it is not.

        Args:
            target: what `look` found installed for the Python of the environment.
            say: told what takes long, and which versions differ.

        Raises:
            EnvironmentFault: it cannot be installed, or not now.
        """
        where, here = self._connection.address, version(parcel.NAME)
        seen, digest = target or {}, hashlib.sha256(parcel.make_wheel()[1]).hexdigest()
        if seen.get("sweep") and seen["stamp"] is None:
            # Somebody else installed it.
            if seen["sweep"] != here:
                there_is = f"{where} has sweep {seen['sweep']} in {seen['executable']}"
                raise EnvironmentFault(f"{there_is}, and here is {here}: install the same there")
        elif not seen.get("sweep") or seen["stamp"] != digest:
            if seen and not seen["is_environment"]:
                bare = f"{self._python} on {where} is of no environment and has no sweep"
                raise EnvironmentFault(f"--with python: {bare}: name an environment's, or leave it")
            say(f"Installing sweep {here} on {where} ...")
            with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as packed:
                parcel.write(Path(scratch))
                with tarfile.open(fileobj=packed, mode="w") as archive:
                    archive.add(scratch, ".")
                self._do("install", self._python, "-", "", "", HOME, stdin=packed)
            seen = self.look()["target"]
        differing = [f"{n} {t} (here {h})" for n, t, h in parcel.differences(seen["versions"])]
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
            answer = self._do("start", self.directory, self._python, stdin=packed)
            return bool(answer["was_running"])

    def follow(
        self,
        *,
        hear: Callable[[str], None],
        requests: Callable[[], int],
        say: Callable[[str], None],
        pauses: Sequence[float] = RECONNECT_SECONDS,
    ) -> tuple[int | None, str]:
        """Follow what it says until it has ended; return its exit code and what it printed.

        The exit code is None where nobody noted it: the machine went down, say.

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
                ended = self._do("end", self.directory)
                return ended["exit"], ended["stdout"]
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
        with tempfile.TemporaryFile() as program, tempfile.TemporaryFile() as said:
            program.write(self._program)
            line = self._line("follow", (self.directory, str(self._heard)))
            process = self._connection.start(
                line, stdin=program, stdout=subprocess.PIPE, stderr=said
            )
            assert process.stdout is not None
            output, rest, has_begun = process.stdout.fileno(), b"", False
            try:
                while True:
                    while requests() > self._asked:
                        self._do("ask", self.directory)
                        self._asked += 1
                    if not select.select([output], [], [], 0.2)[0]:
                        continue
                    chunk = os.read(output, 65536)
                    if not chunk:
                        break
                    *lines, rest = (rest + chunk).split(b"\n")
                    for one in lines:
                        if has_begun:
                            self._heard += len(one) + 1
                            hear(one.decode(errors="replace"))
                        has_begun = has_begun or one == _MARK.strip()
                code = process.wait()
            finally:
                process.kill()
                process.wait()
                process.stdout.close()
            try:
                self._connection.check(code, said)
            except EnvironmentFault as error:
                # Whatever became of who follows it, the study is another process.
                raise ConnectionLostError(str(error)) from error
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
            EnvironmentFault: they cannot be had.
            OSError: there is no room for them.
        """
        found: dict[str, dict[str, Path]] = {"host.db": {}, "files": {}, "left": {}}
        with (
            self._called("fetch", self.directory, self._name, str(bytes_max)) as packed,
            tarfile.open(fileobj=packed, mode="r|") as archive,
        ):
            for entry in archive:
                # Names that the other machine gives are followed nowhere.
                kind, _, name = entry.name.partition("/")
                content = archive.extractfile(entry)
                if content is None or kind not in found or "/" in name or name in (".", ".."):
                    continue
                found[kind][name] = path = into / kind / name
                path.parent.mkdir(exist_ok=True)
                with path.open("wb") as file:
                    shutil.copyfileobj(content, file)
        return into / "host.db", found["files"], list(found["left"])
