"""Owns the tracing child: started at the first question, asked in JSON lines, gone with its owner.

Knows nothing of what is asked. The child is where torch and transformers are imported; this process
never does.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import subprocess
import sys
import tempfile
import weakref
from typing import IO, Any

from search_spaces.errors import EnvironmentFault, InputError
from search_spaces.models import ModelSpec
from sweep.predict.memory.profiles import Structure, Untraceable

_COMMAND = (sys.executable, "-P", "-m", "sweep.predict.memory.trace")
_DEADLINE_SECONDS = 120.0
"""For one structure, the imports included; a slow disk makes those take most of a minute."""


class TracingChild:
    """A `Tracer` in a process of its own."""

    def __init__(self, command: tuple[str, ...] = _COMMAND) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def trace(self, model: ModelSpec, structure: Structure) -> dict[str, Any]:
        """See `Tracer.trace`."""
        answer = self._ask({"model": model.to_json(), "structure": structure.to_json()})
        match answer:
            case {"profile": dict(profile)}:
                return profile
            case {"untraceable": str(reason)}:
                raise Untraceable(f"model '{model.name}': memory is not predicted: {reason}")
            case {"input": str(reason)}:
                raise InputError(f"model '{model.name}': {reason}")
        raise EnvironmentFault(f"the tracing process answered {str(answer)[:200]}")

    def close(self) -> None:
        """End the child. Idempotent; a later question starts a new one."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._errors = self._finalizer = None

    def _ask(self, question: dict[str, Any]) -> Any:
        process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            line = _read_line(process.stdout)
        except OSError:
            line = b""
        if not line:
            reason = self._last_words()
            self.close()
            raise EnvironmentFault(f"the tracing process gave no answer{reason}")
        return json.loads(line)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                # Ctrl-C in the terminal is this process's to handle.
                start_new_session=True,
            )
            self._finalizer = weakref.finalize(self, _end, self._process, self._errors)
        return self._process

    def _last_words(self) -> str:
        """Return the last line that the child wrote to its standard error."""
        assert self._errors is not None
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""


def _read_line(stream: IO[bytes]) -> bytes:
    """Return the next line; nothing where the deadline passes or the child has ended."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return stream.readline() if selector.select(_DEADLINE_SECONDS) else b""


def _end(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, errors):
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()
