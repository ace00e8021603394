"""Owns who drives a study, in words: how a driver names itself and how it is told to others.

Knows nothing of locks.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from search_spaces.errors import EnvironmentFault

_NAME_LIMIT = 63
"""PostgreSQL cuts an application name here."""
_NAMED = re.compile(r"sweep (\S+) ([0-9a-f]{8})[0-9a-f]{6}")
"""Who drives, the second in which it took its lease, and what tells it from others."""


@dataclass(frozen=True)
class Holder:
    """Who drives a study."""

    who: str
    """``host:pid``."""
    since: str | None = None
    """UTC, ISO 8601; None where that is not known."""

    def __str__(self) -> str:
        return self.who if self.since is None else f"{self.who} since {self.since}"


def this_driver() -> str:
    """Return ``host:pid`` of this process."""
    return f"{socket.gethostname()}:{os.getpid()}"


def session_name() -> str:
    """Return what a lease's session is called on a server: ``sweep host:pid`` and what is its own.

    Two containers may well have a host's name and a process in common. When the session began is no
    measure of since when it drives: a pooler's may be older than its client.
    """
    own = f"{int(time.time()):08x}{secrets.token_hex(3)}"
    room = _NAME_LIMIT - len(f"sweep  {own}")
    # A name of many letters loses its first ones; bytes are what is counted.
    who = this_driver().encode()[-room:].decode(errors="ignore")
    return f"sweep {who} {own}"


def holder_of(session: str) -> Holder:
    """Return who holds a lease, by the name of the session that has it."""
    found = _NAMED.match(session)
    if found is None:
        return Holder("another process")
    return Holder(found[1], _iso(datetime.fromtimestamp(int(found[2], 16), UTC)))


def _iso(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds")


def now() -> str:
    """Return this second as a holder's file has it."""
    return _iso(datetime.now(UTC))


def taken(study: str, holder: Holder | None) -> EnvironmentFault:
    """Return the fault of a study that another process drives."""
    return EnvironmentFault(
        f"study '{study}' is driven by {holder or 'another process'}; wait for it, stop it, "
        "or start another study with --study"
    )
