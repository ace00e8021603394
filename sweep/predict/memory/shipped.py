"""What ships worked out: profiles of the shipped models' structures, and surveys of the presets.

`make profiles` writes both, and a test compares them with what the code works out. So they hold for
code as committed; an edited checkout works out everything itself. A digest of the code would refuse
them after commits that change none of their numbers, too.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.sweep.predict.memory.profiles import Change, Profile, Structure, Untraceable

ROOT = Path(__file__).resolve().parents[3]
"""Where the code lies: the package, or the root of a checkout, to which a package's links lead."""
PROFILES = Path(__file__).with_name("profiles.zip")
"""A member for each model, by its fingerprint, and one with the versions that traced them."""
NOTHING = Path(os.devnull)
"""In place of that file, where nothing that ships is to be used."""
VERSIONS = "versions"
_UNREADABLE = (
    OSError, EOFError, LookupError, TypeError, ValueError, RuntimeError, BadZipFile, lzma.LZMAError
)  # fmt: skip


def read(archive: Path, name: str) -> Any:
    """Return the JSON values of a member; None where there is none that can be read."""
    try:
        with ZipFile(archive) as members:
            return json.loads(members.read(name))
    except _UNREADABLE:
        return None


def is_as_committed(*places: str) -> bool:
    """Return whether code is what is tested with what ships; of a checkout, git tells.

    Args:
        places: modules and directories of this program, named from where it lies.
    """
    return not any(path.startswith(places) for path in _edited())


@cache
def _edited() -> Sequence[str]:
    """Return the files that were changed in this checkout; none of an installation, or of a copy
    that git does not know."""
    if not (ROOT / ".git").exists():
        return ()
    # Where nothing was ever committed, nothing is edited either.
    command = ("git", "--no-optional-locks", "diff", "--name-only", "--no-renames", "HEAD")
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ()
    return done.stdout.decode(errors="replace").splitlines()


class ShippedProfiles:
    """The profiles of one model that ship.

    Args:
        model: whose.
        archive: the file that holds them; one that cannot be read has none.
    """

    def __init__(self, model: ModelSpec, archive: Path) -> None:
        self._model = model
        self._archive = archive

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """Versions of the libraries that traced them; none where there are no profiles."""
        return read(self._archive, VERSIONS) or {}

    @cached_property
    def digest(self) -> str:
        """Of the file."""
        return hashlib.sha256(self._archive.read_bytes()).hexdigest()

    @cached_property
    def _packed(self) -> Mapping[str, Any]:
        return read(self._archive, self._model.fingerprint) or {}

    def get(self, structure: Structure) -> Profile | InputError | None:
        """Return a structure's profile, or why it has none; None where that does not ship."""
        try:
            packed = self._packed["profiles"][structure.key]
            if isinstance(packed, str):
                return Untraceable(f"model '{self._model.name}': {packed}")
            return self._unpacked(packed)
        except _UNREADABLE:
            return None

    def _unpacked(self, packed: Mapping[str, Any]) -> Profile:
        """Return a profile whose segments are codes: the numbers of what happens, in order.

        What dies that was born in the same segment is named by how many of those still alive were
        born after it, so that segments alike have the same codes.
        """
        happenings = self._packed["happenings"]
        codes = self._packed["codes"]
        sizes: dict[int, int] = {}
        segments = {}
        for name, (number, highest) in packed["segments"].items():
            tape: list[Any] = []
            alive: list[Any] = []
            for change, key, size, purpose, layers in map(happenings.__getitem__, codes[number]):
                if change == Change.DEATH:
                    key, size, purpose, layers = alive.pop(-1 - key)
                elif change == Change.BIRTH:
                    key = len(tape)
                    alive.append((key, size, purpose, layers))
                tape.append((change, key, sizes.setdefault(size, len(sizes)), purpose, layers))
            segments[name] = {"tape": tape, "highest": highest}
        known = [self._packed["sizes"][size] for size in sizes]
        return Profile.from_json({**packed, "segments": segments, "sizes": known})
