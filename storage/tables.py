"""Owns whose tables a database has, and whether this version can go by them. Changes nothing.

Optuna creates what it misses before it looks at what is there, and takes any history of migrations
for its own: another application's database would be left with tables of both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import sqlalchemy

from search_spaces.errors import EnvironmentFault, quote
from storage.urls import DatabaseUrl

if TYPE_CHECKING:
    from optuna.storages import RDBStorage

SCHEMA = "v3.2.0.a"
"""The newest version of Optuna's tables that is known here; another Optuna may know further."""
_HISTORY, _MARK = "alembic_version", "version_info"
"""Where migrations note how far they came, and a table that is Optuna's alone."""
_CLASHING = frozenset((_HISTORY, "studies", "trials"))
"""Of Optuna's tables those whose names another application may well have, too."""


def schema_of(
    engine: sqlalchemy.Engine,
    url: DatabaseUrl,
    *,
    unchecked: Callable[[], RDBStorage],
) -> str | None:
    """Return the version of the tables as Optuna's migrations name it; None where there is none.

    Args:
        engine: of the database.
        url: of the database.
        unchecked: opens Optuna's storage whatever its version, which knows other versions.

    Raises:
        EnvironmentFault: they are not Optuna's, or of an older or newer version of it.
    """
    with engine.connect() as connection:
        names = sqlalchemy.inspect(connection).get_table_names()
        if _MARK not in names and not _CLASHING.isdisjoint(names):
            raise _another_application(url, names)
        versions = _versions(connection) if _HISTORY in names else []
    if not versions:
        # Nothing is there, or another driver is about to create it.
        return None
    if versions != [SCHEMA]:
        _refuse_version(versions, url, unchecked())
    return versions[0]


def _versions(connection: sqlalchemy.Connection) -> list[str]:
    noted = sqlalchemy.text("SELECT version_num FROM alembic_version")
    return [str(version) for version in connection.execute(noted).scalars()]


def _another_application(url: DatabaseUrl, names: Collection[str]) -> EnvironmentFault:
    known = ", ".join(map(quote, sorted(names)[:3]))
    return EnvironmentFault(
        f"database {url}: its tables ({known}, ...) are another application's, and some have the "
        "names of those that sweep needs: create a database for sweep, and name that"
    )


def _refuse_version(versions: list[str], url: DatabaseUrl, storage: RDBStorage) -> None:
    """Raise where the Optuna that is installed does not go by those tables."""
    try:
        head, known = storage.get_head_version(), storage.get_all_versions()
    finally:
        storage.remove_session()
        storage.engine.dispose()
    if versions == [head]:
        return
    theirs = ", ".join(versions)
    if set(versions) <= set(known):
        raise EnvironmentFault(
            f"database {url}: its tables are of an older Optuna ({theirs}, this one has {head}): "
            "stop whoever uses it, keep a copy, then `optuna storage upgrade --storage URL` (of a "
            "server as postgresql+psycopg://...); installations of then cannot use it any more"
        )
    raise EnvironmentFault(
        f"database {url}: its tables are of a newer Optuna ({theirs}, this one has {head}): use "
        "the installation that made them, `pip install -U qlora-sweep optuna`, or another --storage"
    )
