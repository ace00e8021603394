"""Another machine as a place where sweep runs: a Python that is new enough, an environment with
this very version in it, and what is done by it there.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import IO, Any

from search_spaces.errors import EnvironmentFault
from sweep.launching import package
from sweep.launching.ssh import Connection
from sweep.launching.there import BOOT, MARK

ENVIRONMENT = "~/.cache/qlora-sweep/venv"
_PYTHONS = ("python3", "python3.13", "python3.12", "python3.11", "python")
_MARK = MARK.encode() + b"\n"
_IS_NEW_ENOUGH = "import sys; sys.exit(sys.version_info < (3, 11))"


@dataclass(frozen=True)
class Box:
    """A Python on another machine, and the way there."""

    connection: Connection
    python: str

    def do(
        self, verb: str, *arguments: str, stdin: bytes = b"", file: IO[bytes] | None = None
    ) -> dict[str, Any]:
        """Return what a verb of `there` answers. Takes and raises what `Connection.call` does."""
        return dict(json.loads(self._called(verb, arguments, stdin, file)))

    def fetch(self, *arguments: str, into: IO[bytes]) -> None:
        """Write the archive that is there into a file, which then stands at its beginning."""
        self.connection.call(self._line("fetch", arguments), stdin=_program(), into=into)
        into.seek(0)
        while into.readline() not in (_MARK, b""):
            pass

    def _called(
        self, verb: str, arguments: Sequence[str], stdin: bytes, file: IO[bytes] | None = None
    ) -> bytes:
        line = self._line(verb, arguments)
        printed = self.connection.call(line, stdin=_program() + stdin, file=file)
        return printed.partition(_MARK)[2]

    def follow(self, *arguments: str, stderr: IO[bytes]) -> subprocess.Popen[bytes]:
        """Return what prints what a study says there, as it says it."""
        line = self._line("follow", arguments)
        process = self.connection.stream(line, stdin=_program(), stderr=stderr)
        assert process.stdout is not None
        while process.stdout.readline() not in (_MARK, b""):
            pass
        return process

    def _line(self, verb: str, arguments: Sequence[str]) -> str:
        words = [self.python, "-I", "-c", BOOT, str(len(_program())), verb, *arguments]
        return "exec " + shlex.join(words)


def _program() -> bytes:
    return resources.files("sweep.launching").joinpath("there.py").read_bytes()


def reached(connection: Connection, *, python: str | None) -> Box:
    """Return a machine as it is, with whatever Python is there: enough to look, follow and fetch.

    Args:
        connection: the way there.
        python: of an environment there that is to be used; None for any.

    Raises:
        EnvironmentFault: there is none that is new enough.
    """
    return Box(connection, _python(connection, python))


def prepared(found: Box, *, python: str | None, studies: str, say: Callable[[str], None]) -> Box:
    """Return a machine with this version of sweep, installed where it is not.

    Args:
        found: the machine as it is.
        python: of an environment there that is to be used; None for one of sweep's own.
        studies: directory there of all studies: none that runs has a sweep installed beneath it.
        say: told what takes long, and what differs.

    Raises:
        EnvironmentFault: it cannot be installed, or not now.
    """
    connection = found.connection
    where = connection.address
    seen = found.do("look")
    if python is None:
        keep = "yes" if seen["has_torch"] else "no"
        made = found.do("make_environment", ENVIRONMENT, seen["executable"], keep)
        found = Box(connection, made["python"])
        seen = found.do("look")
    if _needs_installing(seen, where=str(where)):
        if not seen["is_environment"]:
            raise EnvironmentFault(
                f"--with python: {found.python} on {where} is of no environment, and sweep is not "
                "installed for it: name the python of an environment, or leave the option out"
            )
        say(f"Installing sweep {package.version()} on {where} ...")
        _install(found, studies, has_torch=seen["has_torch"])
        seen = found.do("look")
    differing = [f"{n} {t} (here {h})" for n, t, h in package.differences(seen["versions"])]
    if differing:
        say(f"On {where} other versions run than here: {', '.join(differing)}.")
    return found


def _python(connection: Connection, named: str | None) -> str:
    """Return a Python there that is new enough."""
    candidates = _PYTHONS if named is None else (named,)
    # A path that begins with ~ is the shell's to expand.
    spelled = [_expandable(one) for one in candidates]
    tries = " || ".join(
        f"{{ command -v {one} >/dev/null 2>&1 && {one} -I -c {shlex.quote(_IS_NEW_ENOUGH)} "
        f"2>/dev/null && command -v {one}; }}"
        for one in spelled
    )
    line = f"echo '{MARK}'; {tries} || true"
    printed = connection.call(f"sh -c {shlex.quote(line)}").partition(_MARK)[2]
    if printed.strip():
        return printed.decode().splitlines()[0]
    if named is not None:
        raise EnvironmentFault(
            f"--with python: {named} on {connection.address} is no Python 3.11 or newer"
        )
    raise EnvironmentFault(
        f"{connection.address}: no Python 3.11 or newer is found there: install one, or name one "
        "with --with python=PATH"
    )


def _expandable(path: str) -> str:
    if path.startswith("~/"):
        return f"~/{shlex.quote(path[2:])}"
    return shlex.quote(path)


def _needs_installing(seen: dict[str, Any], *, where: str) -> bool:
    """Return whether what is there is not what runs here.

    Raises:
        EnvironmentFault: somebody else installed another version into that environment.
    """
    there, here = seen["sweep"], package.version()
    if there is None or seen["stamp"] is not None:
        return bool(there != here or seen["stamp"] != package.make_wheel().digest)
    if there != here:
        raise EnvironmentFault(
            f"{where} has sweep {there} in {seen['executable']}, and here is {here}: install the "
            "same there, or leave it out"
        )
    return False


def _install(box: Box, studies: str, *, has_torch: bool) -> None:
    wheel = package.make_wheel()
    held = package.constraints(has_torch=has_torch).encode()
    size = str(len(wheel.data))
    box.do("install", studies, wheel.name, wheel.digest, size, stdin=wheel.data + held)
