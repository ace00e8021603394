"""The way to another machine: the system's own ssh with the user's own configuration, one
connection for everything, and what its refusals mean.

Never asks anybody anything, and never takes a host key that nobody has looked at.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from search_spaces.errors import EnvironmentFault, InputError, quote
from search_spaces.redaction import shown

SSH = "SWEEP_SSH"
"""Variable with another ssh command and its options."""
CONNECT_SECONDS = 15
_OPEN_SECONDS = 4 * CONNECT_SECONDS
"""A name may have several addresses, and a jump host before it."""
_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": str(CONNECT_SECONDS),
    # A connection that is gone is noticed within half a minute.
    "ServerAliveInterval": "10",
    "ServerAliveCountMax": "3",
    "LogLevel": "ERROR",
    "ClearAllForwardings": "yes",
    "RemoteCommand": "none",
    "RequestTTY": "no",
}
_READY = "qlora-sweep-is-connected"
_LOST = 255
_SHORT = 50
_ADDRESS = re.compile(
    r"(?:(?P<user>[^\s@:/'\"-][^\s@:/'\"]*)@)?"
    r"(?:\[(?P<ip>[0-9A-Fa-f:.]+)\]|(?P<box>[\w.][\w.-]*))(?::(?P<port>\d{1,5}))?"
)


class ConnectionLostError(EnvironmentFault):
    """The connection ended; what was started there goes on."""


@dataclass(frozen=True)
class Address:
    """Who and where, as ``--on ssh:`` names them."""

    destination: str
    port: int | None

    @classmethod
    def parse(cls, typed: str) -> Address:
        """Read ``user@box:port``; user and port may be missing, the user's configuration has them.

        Raises:
            InputError: it is none.
        """
        found = _ADDRESS.fullmatch(typed)
        port = None if found is None or found["port"] is None else int(found["port"])
        if found is None or (port is not None and not 0 < port < 65536):
            raise InputError(f"--on ssh: an address is like user@box:22, got {quote(typed)}")
        user = "" if found["user"] is None else f"{found['user']}@"
        return cls(user + (found["ip"] or found["box"]), port)

    def __str__(self) -> str:
        return self.destination if self.port is None else f"{self.destination}:{self.port}"

    @property
    def words(self) -> list[str]:
        """How ssh is told of it."""
        return [*(() if self.port is None else ("-p", str(self.port))), "--", self.destination]

    @property
    def by_hand(self) -> str:
        """What a person types to go there."""
        port = "" if self.port is None else f" -p {self.port}"
        return f"ssh{port} {self.destination}"


class Connection:
    """A connection that commands share; use it in a ``with``.

    Ctrl-C in the terminal does not reach it, and it ends with this process however that ends.

    Raises:
        EnvironmentFault: there is no ssh here, or no way there; says what to do.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._ssh = _ssh_command()
        self._directory = tempfile.TemporaryDirectory(prefix="sweep-ssh-", dir=_short_directory())
        self._master: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self._directory.cleanup()
            raise
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._hang_up()
        self._directory.cleanup()

    def open(self) -> None:
        """Connect, again where the connection was lost."""
        self._hang_up()
        with tempfile.TemporaryFile() as said:
            self._master = self._started(
                # It ends with its stdin, which ends with this process.
                f"echo {_READY} && exec cat",
                ("-o", "ControlMaster=yes"),
                stderr=said,
            )
            if not _has_said(self._master, _READY, _OPEN_SECONDS):
                self._hang_up()
                said.seek(0)
                raise EnvironmentFault(self._why(said.read().decode(errors="replace")))

    def call(
        self,
        command: str,
        *,
        stdin: bytes = b"",
        file: IO[bytes] | None = None,
        into: IO[bytes] | None = None,
    ) -> bytes:
        """Return what a command prints there.

        Args:
            command: a line for the shell of the user's there.
            stdin: what it reads.
            file: what it reads behind that, of any size, before it prints much.
            into: a file that it prints into, of any size, and nothing is returned.

        Raises:
            ConnectionLostError: the connection ended before the command.
            EnvironmentFault: the command failed; with the last that it said.
        """
        with tempfile.TemporaryFile() as said:
            process = self._started(
                command, ("-o", "ControlMaster=no"), stdout=into or subprocess.PIPE, stderr=said
            )
            try:
                if file is None:
                    printed, _ = process.communicate(stdin)
                else:
                    printed = _fed(process, stdin, file)
            except BaseException:
                process.kill()
                process.wait()
                raise
            said.seek(0)
            self.check(process.returncode, said.read().decode(errors="replace"))
        return printed or b""

    def stream(self, command: str, *, stdin: bytes, stderr: IO[bytes]) -> subprocess.Popen[bytes]:
        """Return a command that runs there, whose stdout is to be read as it comes."""
        process = self._started(command, ("-o", "ControlMaster=no"), stderr=stderr)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(stdin)
        return process

    def check(self, code: int, said: str) -> None:
        """Raise what an exit code of ssh means."""
        lines = [line for line in shown(said).splitlines() if line.strip()]
        last = lines[-1].strip() if lines else f"exit status {code}"
        if code == _LOST:
            raise ConnectionLostError(f"the connection to {self.address} was lost: {last}")
        if code != 0:
            raise EnvironmentFault(f"on {self.address}: {last}")

    def _started(
        self,
        command: str,
        options: Sequence[str],
        *,
        stdout: IO[bytes] | int = subprocess.PIPE,
        stderr: IO[bytes],
    ) -> subprocess.Popen[bytes]:
        fixed = [word for key, value in _OPTIONS.items() for word in ("-o", f"{key}={value}")]
        socket = Path(self._directory.name, "socket")
        try:
            return subprocess.Popen(
                [
                    *self._ssh,
                    *fixed,
                    *options,
                    *("-o", "ControlPersist=no", "-o", f"ControlPath={socket}"),
                    *self.address.words,
                    command,
                ],
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentFault(f"ssh cannot be started: {error.strerror}") from error

    def _hang_up(self) -> None:
        master, self._master = self._master, None
        if master is None:
            return
        assert master.stdin is not None
        assert master.stdout is not None
        with contextlib.suppress(OSError):
            master.stdin.close()
        master.stdout.close()
        master.terminate()
        try:
            master.wait(5)
        except subprocess.TimeoutExpired:
            master.kill()
            master.wait()

    def _why(self, said: str) -> str:
        """Return why there is no connection, and what to do about it."""
        where, by_hand = self.address, self.address.by_hand
        if "HOST IDENTIFICATION HAS CHANGED" in said:
            return (
                f"{where}: its host key is another than the one that is known here: somebody else "
                "may answer in its name; nothing was sent. Find out why before you remove the old "
                "key with ssh-keygen -R"
            )
        if "Host key verification failed" in said:
            return (
                f"{where}: its host key is unknown here: run `{by_hand}` once, compare the "
                "fingerprint, and accept it"
            )
        if "Permission denied" in said:
            return (
                f"{where}: no key of yours is accepted there: run ssh-copy-id, or ssh-add where "
                f"the key has a passphrase, until `{by_hand} true` asks nothing"
            )
        if "Could not resolve hostname" in said:
            return f"{where}: no such host is known: mind the spelling, or name it in ~/.ssh/config"
        if "Connection refused" in said:
            return f"{where}: nobody listens there: is sshd running, and is that its port?"
        if re.search("timed out|No route to host|unreachable", said) or not said.strip():
            return f"{where}: no answer: is it on, and does `{by_hand}` get there?"
        return f"{where}: {shown(said).strip().splitlines()[-1]}: what does `{by_hand}` say?"


def _ssh_command() -> list[str]:
    named = shlex.split(os.environ.get(SSH, "")) or ["ssh"]
    if shutil.which(named[0]) is None:
        raise EnvironmentFault(
            f"{named[0]} is not here: install the OpenSSH client, or name one with {SSH}"
        )
    return named


def _fed(process: subprocess.Popen[bytes], stdin: bytes, file: IO[bytes]) -> bytes:
    """Return what a process prints that was given a file to read."""
    assert process.stdin is not None
    # One that ended before it read all says why.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(stdin)
        shutil.copyfileobj(file, process.stdin)
    return process.communicate()[0]


def _short_directory() -> str | None:
    """Return where a socket can be: its whole name is no longer than a hundred letters."""
    usual = tempfile.gettempdir()
    return "/tmp" if len(usual) > _SHORT and os.access("/tmp", os.W_OK) else None


def _has_said(process: subprocess.Popen[bytes], word: str, seconds: float) -> bool:
    """Return whether a process printed a word before it ended, or the time did."""
    assert process.stdout is not None
    printed, until = b"", time.monotonic() + seconds
    os.set_blocking(process.stdout.fileno(), False)
    while time.monotonic() < until:
        chunk = process.stdout.read()
        printed += chunk or b""
        if word.encode() in printed:
            return True
        if chunk == b"" or process.poll() is not None:
            return False
        time.sleep(0.02)
    return False
