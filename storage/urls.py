"""Storage URLs: what one may be, what it means, and how it reads without its password."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from qlora_sweep.search_spaces.documents import home_expanded, is_directory
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, words_of
from qlora_sweep.search_spaces.redaction import redact, remember

_EXAMPLE = "postgresql://user@host:port/database"
"""With no password in it: what is printed would show stars in its place."""
_READS = f"it reads like {_EXAMPLE}"
_SQLITE = ("sqlite", "sqlite+pysqlite")
_POSTGRESQL = ("postgresql", "postgres", "postgresql+psycopg")
_SUSPECT = re.compile(r":.*@", re.DOTALL)
"""In a URL that is none, whatever is between the first ':' and the last '@' may be a password."""


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
    if scheme in _POSTGRESQL and separator:
        return _parse_postgresql(url)
    if scheme not in _SQLITE:
        _remember_written(url)
    if not separator:
        guarded = _SUSPECT.sub(":***@", redact(url))
        meant = f"sqlite:///{redact(url) or 'runs/sweep.db'}"
        if "@" in url:
            meant = _EXAMPLE
        raise InputError(f"storage '{guarded}' is no database URL; did you mean '{meant}'?")
    guarded = f"{scheme}://" + _SUSPECT.sub(":***@", redact(rest))
    if scheme not in _SQLITE:
        known = "known are sqlite and postgresql"
        raise InputError(f"storage '{guarded}': unknown database '{scheme}'; {known}")
    path = rest.removeprefix("/")
    if path == rest or "?" in path or "\0" in path or path in ("", ":memory:"):
        form = "three slashes and the path of a file, without options"
        raise InputError(f"storage '{guarded}': {form}, as in 'sqlite:///runs/sweep.db'")
    try:
        resolved = home_expanded(path).resolve()
        str(resolved).encode()
    except (OSError, RuntimeError, UnicodeEncodeError) as error:
        # A RuntimeError is what Python before 3.13 raises of links in a circle. Neither SQLite nor
        # a study's definition has a path that is not UTF-8.
        raise EnvironmentFault(
            f"storage '{guarded}': {words_of(error)}: name another file"
        ) from error
    return SqliteUrl(resolved)


def _parse_postgresql(url: str) -> PostgresUrl:
    # From here on no text has it, whoever writes it: libraries quote what they were given.
    _remember_written(url)
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        # The original may quote the part with the password, so it is not chained.
        raise InputError(f"storage '{redact(url)}' is malformed; {_READS}") from None
    if not parsed.database:
        raise InputError(f"storage '{redact(url)}' names no database; {_READS}")
    if "@" in (parsed.host or ""):
        raise InputError(f"storage '{redact(url)}': an '@' in a password is written %40")
    remember(parsed.password or "")
    for key, value in parsed.query.items():
        if key.endswith("password"):
            if isinstance(value, str):
                value = (value,)
            remember(*value)
    text = parsed.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    return PostgresUrl(text)


def _remember_written(url: str) -> None:
    """Let no text show a password as it was typed, whether or not that is a URL."""
    remember(*re.findall(r"://[^:/@\s]*:(.*)@", url, re.DOTALL))


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
