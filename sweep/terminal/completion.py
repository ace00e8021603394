"""Owns what a shell completes where a name is typed: presets, cards, models, studies.

It is asked at every press of a key, so names are read from files and the database as they are: what
cannot be read completes to nothing. Each imports what it needs when it is asked: help does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress

from sweep.paths import runs_directory

_CARD = re.compile(r"^  - name: (\S+)$", re.MULTILINE)


def presets(incomplete: str) -> list[str]:
    """Return the shipped presets that begin so; a shell adds files by itself."""
    return _beginning(_names_in("presets", ".yaml"), incomplete)


def models(incomplete: str) -> list[str]:
    """Return the shipped architectures that begin so."""
    return _beginning(_names_in("architectures", ".json"), incomplete)


def gpus(incomplete: str) -> list[str]:
    """Return the cards of the catalogue that begin so."""
    return _beginning(_cards(), incomplete)


def run_gpus(incomplete: str) -> list[str]:
    """Return the same with what a study takes beside them."""
    return _beginning(["auto", "cpu", *_cards()], incomplete)


def presets_and_gpus(incomplete: str) -> list[str]:
    """Return both, where either may be typed."""
    return sorted({*presets(incomplete), *gpus(incomplete)})


def studies(incomplete: str) -> list[str]:
    """Return the studies of the default database that begin so."""
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
    import sqlite3
    from urllib.parse import quote

    path = runs_directory() / "sweep.db"
    if not path.is_file():
        return []
    with (
        suppress(sqlite3.Error),
        closing(
            sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=0.5)
        ) as database,
    ):
        rows = database.execute("SELECT study_name FROM studies ORDER BY study_id").fetchall()
        return [str(name) for (name,) in rows]
    return []
