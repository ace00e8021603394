"""Owns what a shell completes where a name is typed: presets, GPUs, models, studies.

It is asked at every press of a key, so names are read from files and the database as they are: what
cannot be read completes to nothing. Each imports what it needs when it is asked: help does not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from search_spaces.documents import home_expanded
from sweep.paths import STORAGE, runs_directory

_NAMES = "SELECT study_name FROM studies ORDER BY study_id"
_CARD = re.compile(r"^  - name: (\S+)$", re.MULTILINE)


def presets(incomplete: str) -> list[str]:
    """Return the shipped presets that begin so; a shell adds files by itself."""
    return _beginning(_names_in("presets", ".yaml"), incomplete)


def models(incomplete: str) -> list[str]:
    """Return the shipped architectures that begin so."""
    return _beginning(_names_in("architectures", ".json"), incomplete)


def gpus(incomplete: str) -> list[str]:
    """Return the GPUs of the catalogue that begin so."""
    return _beginning(_cards(), incomplete)


def run_gpus(incomplete: str) -> list[str]:
    """Return the same with what a study takes beside them."""
    return _beginning(["auto", "cpu", *_cards()], incomplete)


def presets_and_gpus(incomplete: str) -> list[str]:
    """Return both, where either may be typed."""
    return sorted({*presets(incomplete), *gpus(incomplete)})


def studies(incomplete: str) -> list[str]:
    """Return the studies of ``SWEEP_STORAGE`` or the default database that begin so."""
    return _beginning(_studies(), incomplete)


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _names_in(folder: str, ending: str) -> list[str]:
    from importlib.resources import files

    found = (path.name for path in (files("search_spaces") / folder).iterdir())
    return sorted(name.removesuffix(ending) for name in found if name.endswith(ending))


def _cards() -> Iterator[str]:
    from importlib.resources import files

    # To parse all of it takes half a second.
    text = (files("search_spaces") / "gpus.yaml").read_text(encoding="utf-8")
    return (match[1] for match in _CARD.finditer(text))


def _studies() -> list[str]:
    named = os.environ.get(STORAGE)
    if not named:
        return _studies_in(runs_directory() / "sweep.db")
    scheme, _, rest = named.partition("://")
    if scheme.startswith("sqlite"):
        return _studies_in(home_expanded(rest.removeprefix("/")))
    return _studies_on_server(f"postgresql://{rest}")


def _studies_on_server(url: str) -> list[str]:
    with suppress(ImportError):
        import psycopg

        with (
            suppress(psycopg.Error),
            psycopg.connect(url, connect_timeout=2, options="-c statement_timeout=1s") as database,
        ):
            rows = database.execute(_NAMES).fetchall()
            return [str(name) for (name,) in rows]
    return []


def _studies_in(path: Path) -> list[str]:
    import sqlite3
    from urllib.parse import quote

    if not path.is_file():
        return []
    with (
        suppress(sqlite3.Error),
        closing(
            sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=0.5)
        ) as database,
    ):
        return [str(name) for (name,) in database.execute(_NAMES).fetchall()]
    return []
