"""Owns who drives a study, in words: how a driver names itself and how it is told to others.

Knows nothing of locks.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from search_spaces.errors import EnvironmentFault

_NAME_LIMIT = 63
"""PostgreSQL cuts an application name here."""
_PREFIX = "sweep "
_TIME_DIGITS, _OWN_DIGITS = 8, 6
"""Hexadecimal ones: the second in which a driver took its lease, and what tells it from others."""


@dataclass(frozen=True)
class Holder:
    """Who drives a study."""

    who: str
    """``host:pid``."""
    since: str | None = None
    """UTC, ISO 8601; None where the database does not tell."""

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
    own = f"{int(time.time()):0{_TIME_DIGITS}x}{secrets.token_hex(_OWN_DIGITS // 2)}"
    room = _NAME_LIMIT - len(_PREFIX) - 1 - len(own)
    # A name of many letters loses its first ones; bytes are what is counted.
    who = this_driver().encode()[-room:].decode(errors="ignore")
    return f"{_PREFIX}{who} {own}"


def holder_of(session: str, began: datetime | None) -> Holder:
    """Return who holds a lease, by what the server knows of the session that has it.

    Args:
        session: its name.
        began: when the server began it, which is what an earlier version's name leaves to go by;
            None where another user's is not shown.
    """
    words = session.removeprefix(_PREFIX).split()
    who = words[0] if session.startswith(_PREFIX) and words else "another process"
    taken = _taken_at(words[1]) if len(words) == 2 else None
    since = taken or began
    return Holder(who, None if since is None else _iso(since))


def _taken_at(own: str) -> datetime | None:
    if len(own) != _TIME_DIGITS + _OWN_DIGITS:
        return None
    try:
        return datetime.fromtimestamp(int(own[:_TIME_DIGITS], 16), UTC)
    except ValueError:
        return None


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
