"""What a volume says of a study's machines: what was paid for them, and whose the study is.

One machine at a time keeps a study on a volume. It writes down who it is and that it is there; what
starts beside it gives way, and so does what another has taken over from.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LEDGER_SECONDS = 30.0
"""How often the machine that has the study says so, and what is paid for by now."""
QUIET_SECONDS = 90.0
"""A machine that has said nothing for so long is gone: two of three times may be lost on the way.
"""
STOP_SECONDS = 30.0
"""Before the limit: the worker's end, the report and the last copy take as long."""
PART = ".part"


def _nonce() -> str:
    return uuid.uuid4().hex


@dataclass
class Ledger:
    """Seconds that are paid for, of this machine and of those before it, kept on the volume."""

    path: Path
    limit_seconds: float
    """Of all of them together."""
    since: float
    """When this machine's billing began, as far as it is known: seconds of the epoch."""
    overhead_seconds: float = 0.0
    """Of each machine: paid for, and not seen from inside."""
    clock: Callable[[], float] = time.time
    owner: str = field(default_factory=_nonce)
    """This process: nobody else is called so."""
    machine: str | None = None
    """What is paid for: one machine, whatever is started on it in turn; None: the owner's own."""
    quiet_seconds: float = QUIET_SECONDS
    _written: float = 0.0

    def __post_init__(self) -> None:
        self._others = self._paid_by_others(self._read())

    def _read(self) -> dict[str, Any]:
        """Return what the volume says; nothing where it cannot be read."""
        try:
            said = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return said if isinstance(said, dict) else {}

    @property
    def _key(self) -> str:
        return self.owner if self.machine is None else self.machine

    def _paid_by_others(self, said: dict[str, Any]) -> dict[str, float]:
        try:
            paid = {str(one): float(seconds) for one, seconds in said["seconds"].items()}
        except (ValueError, KeyError, AttributeError, TypeError):
            return {}
        return {one: seconds for one, seconds in paid.items() if one != self._key}

    @property
    def paid_seconds(self) -> float:
        """Seconds paid for so far."""
        own = max(0.0, self.clock() - self.since) + self.overhead_seconds
        return sum(self._others.values()) + own

    @property
    def is_spent(self) -> bool:
        """Whether it is time to stop, so that stopping is within the limit too."""
        return self.paid_seconds + STOP_SECONDS >= self.limit_seconds

    @property
    def is_ours(self) -> bool:
        """Whether no other machine has taken the study over."""
        return self._read().get("owner") in (None, self.owner)

    def claim(self, *, wait: Callable[[float], bool]) -> bool:
        """Take the study over once nobody has it; return whether that was done.

        A machine that ended as it should has said so, and one that is gone says nothing any more:
        whoever comes next waits until that is told from one that is there.

        Args:
            wait: so many seconds; returns False where there is nothing to wait for any more.

        Raises:
            OSError: the volume does not take it.
        """
        before = self._read()
        seen = before.get("written")
        until = self.clock() + self._quiet_left(seen)
        while before.get("owner") not in (None, self.owner) and not before.get("has_ended"):
            if self.clock() >= until:
                break
            if not wait(min(1.0, self.quiet_seconds / 5)):
                return False
            before = self._read() or before
            if before.get("written") != seen and not before.get("has_ended"):
                return False
        self._others = self._paid_by_others(before)
        self.write(force=True)
        return True

    def _quiet_left(self, written: object) -> float:
        """Return for how long it is not known whether who wrote then is gone."""
        age = self.clock() - written if isinstance(written, int | float) else 0.0
        # Clocks of two machines differ: what is of the future was written just now.
        return self.quiet_seconds - max(0.0, age)

    def write(self, *, force: bool = False, is_last: bool = False) -> None:
        """Write down what has been paid for and whose the study is, unless that was just done.

        Args:
            force: though it was.
            is_last: says goodbye: the next machine need not wait.
        """
        now = self.clock()
        if not force and now - self._written < LEDGER_SECONDS:
            return
        own = self.paid_seconds - sum(self._others.values())
        said = {
            "seconds": {**self._others, self._key: round(own, 1)},
            "owner": self.owner,
            "written": now,
            "has_ended": is_last,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(self.path.name + PART)
        part.write_text(json.dumps(said), encoding="utf-8")
        os.replace(part, self.path)
        self._written = now
