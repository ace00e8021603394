"""Owns the text of a storage URL: what it may be, what it means, how it reads without its password.

Opens nothing and touches no file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from search_spaces.documents import home_expanded, is_directory
from search_spaces.errors import InputError
from search_spaces.redaction import redact, remember

_EXAMPLE = "postgresql://user@host:port/database"
"""With no password in it: what is printed would show stars in its place."""
_POSTGRESQL = ("postgresql", "postgres", "postgresql+psycopg")
_SCHEMES = ("sqlite", "sqlite+pysqlite", *_POSTGRESQL)
# In a URL that is none, whatever is between the first ':' and the last '@' may be a password.
_SUSPECT = re.compile(r":.*@", re.DOTALL)


@dataclass(frozen=True)
class SqliteUrl:
    """A database file."""

    path: Path
    """Absolute, symbolic links resolved: two names of one file are one database."""

    def __str__(self) -> str:
        return f"sqlite:///{self.path}"


@dataclass(frozen=True, repr=False)
class PostgresUrl:
    """A PostgreSQL database, reached through psycopg."""

    text: str
    """With the password, for SQLAlchemy alone. ``str`` gives the redacted one."""

    def __str__(self) -> str:
        return redact(self.text).replace("postgresql+psycopg", "postgresql", 1)


DatabaseUrl = SqliteUrl | PostgresUrl


def parse_url(url: str) -> DatabaseUrl:
    """Read a storage URL.

    Args:
        url: ``sqlite:///relative.db``, ``sqlite:////absolute.db`` or
            ``postgresql://user:password@host/database``.

    Raises:
        InputError: it is neither; the message never shows a password.
    """
    scheme, separator, rest = url.partition("://")
    if scheme not in _SCHEMES[:2]:
        remember(*_written_passwords(url))
    if not separator:
        meant = _EXAMPLE if "@" in url else f"sqlite:///{redact(url) or 'runs/sweep.db'}"
        raise InputError(f"storage '{_guarded(url)}' is no database URL; did you mean '{meant}'?")
    if scheme not in _SCHEMES:
        raise InputError(
            f"storage '{_guarded(url)}': unknown database '{scheme}'; "
            "known are sqlite and postgresql"
        )
    return _parse_postgresql(url) if scheme in _POSTGRESQL else _parse_sqlite(url, rest)


def require_directory(url: str, *, made: Path) -> None:
    """Refuse the URL of a file in a directory that does not exist.

    Args:
        url: as `parse_url` takes it.
        made: the one directory that is made where it is missing.

    Raises:
        InputError: it is one, or no URL.
    """
    parsed = parse_url(url)
    if isinstance(parsed, SqliteUrl):
        directory = parsed.path.parent
        if directory != made.resolve() and not is_directory(directory, label=str(parsed)):
            raise InputError(f"storage '{url}': there is no directory {directory}: make it first")


def _guarded(url: str) -> str:
    """Return a URL that is not right without anything that could be meant as a password."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    return f"{scheme}{separator}{_SUSPECT.sub(':***@', redact(rest))}"


def _parse_sqlite(url: str, rest: str) -> SqliteUrl:
    if not rest.startswith("/"):
        raise InputError(
            f"storage '{_guarded(url)}': three slashes and a path, as in 'sqlite:///runs/sweep.db'"
        )
    path = rest[1:]
    if path in ("", ":memory:"):
        raise InputError(
            f"storage '{url}' keeps nothing: name a file, as in 'sqlite:///runs/sweep.db'"
        )
    if "?" in path or "\0" in path:
        raise InputError(
            f"storage '{_guarded(url)}': options behind '?' are not supported; give the path alone"
        )
    return SqliteUrl(home_expanded(path).resolve())


def _parse_postgresql(url: str) -> PostgresUrl:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        # The original may quote the part with the password, so it is not chained.
        raise InputError(
            f"storage '{redact(url)}' is malformed; it reads like {_EXAMPLE}"
        ) from None
    if not parsed.database:
        raise InputError(f"storage '{redact(url)}' names no database; it reads like {_EXAMPLE}")
    if "@" in (parsed.host or ""):
        raise InputError(f"storage '{redact(url)}': an '@' in a password is written %40")
    text = parsed.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    values = [parsed.password or ""]
    for key, value in parsed.query.items():
        if key.endswith("password"):
            values += [value] if isinstance(value, str) else value
    # From here on no text has it, whoever writes it: libraries quote what they were given.
    remember(*values, *_written_passwords(url))
    return PostgresUrl(text)


def _written_passwords(url: str) -> list[str]:
    """Return the password as it was typed, whether or not that is a URL."""
    return re.findall(r"://[^:/@\s]*:(.*)@", url, re.DOTALL)
