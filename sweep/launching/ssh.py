"""The way to another machine: the system's own ssh with the user's own configuration, and one
connection for everything.

It never asks anybody anything, and never takes a host key that nobody has looked at.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Self

from search_spaces.errors import EnvironmentFault, InputError, quote
from search_spaces.redaction import shown

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
