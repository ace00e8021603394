"""Owns what goes along to a rented machine: this package, the versions beside it, a person's files.

Knows no provider. Builds a wheel where this runs from a checkout; fetches nothing else.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import sweep
from search_spaces.errors import EnvironmentFault, words_of

PACKAGE = "qlora-sweep"
EXTRA = "gpu"
"""What a card needs beside: Liger's kernels."""


@dataclass(frozen=True)
class Input:
    """A file or directory of a person's that the study reads."""

    local: Path
    name: str
    """There: below the directory of all of them."""


@dataclass(frozen=True)
class Parcel:
    """What is installed on the machine, and what is laid beside it."""

    python: str
    """As ``3.11``."""
    requirements: tuple[str, ...]
    """Everything but this package, at the versions that are installed here."""
    package: str | Path
    """This package: a wheel of the checkout it runs from, or its version."""
    inputs: tuple[Input, ...] = ()


def requirements() -> tuple[str, ...]:
    """Return what this package and its extra for a card need, as it is installed here.

    What is not installed here, Liger say, is asked for as this package asks for it.

    Raises:
        EnvironmentFault: this package is not installed, so nobody knows what it needs.
    """
    try:
        declared = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError as error:
        raise EnvironmentFault(
            f"{PACKAGE} is not installed here, so what it needs is not known: pip install -e ."
        ) from error
    found: dict[str, str] = {}
    for requirement in _applying(declared, extras=(EXTRA,)):
        _collect(requirement, found)
    return tuple(found[name] for name in sorted(found))


def _applying(declared: list[str], *, extras: tuple[str, ...]) -> Iterator[Requirement]:
    for text in declared:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            yield requirement


def _collect(requirement: Requirement, found: dict[str, str]) -> None:
    """Add a requirement and what it needs in turn, each at its installed version."""
    name = canonicalize_name(requirement.name)
    if name in found:
        return
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        found[name] = f"{requirement.name}{requirement.specifier}"
        return
    # A build for the CPU, 2.13.0+cpu, is not what a card needs.
    found[name] = f"{name}=={Version(distribution.version).public}"
    needed = distribution.requires or []
    for further in _applying(needed, extras=tuple(sorted(requirement.extras))):
        _collect(further, found)


def package(directory: Path) -> str | Path:
    """Return this package as pip takes it: a new wheel in ``directory``, or a released version.

    Raises:
        EnvironmentFault: the wheel of a checkout cannot be built.
    """
    root = Path(sweep.__file__).parents[1]
    if not (root / "pyproject.toml").exists():
        return f"{PACKAGE}=={metadata.version(PACKAGE)}"
    return _built(root, directory)


def _built(root: Path, directory: Path) -> Path:
    """Build a wheel, and put it beside what a person may have in that directory."""
    with tempfile.TemporaryDirectory(prefix="sweep-wheel-") as made:
        wheel = _wheel(root, Path(made))
        try:
            shutil.copy(wheel, directory / wheel.name)
        except OSError as error:
            raise EnvironmentFault(f"cannot write to {directory}: {error.strerror}") from error
    return (directory / wheel.name).absolute()


def _wheel(root: Path, directory: Path) -> Path:
    command = [sys.executable, "-P", "-m", "pip", "wheel", "--quiet", "--no-deps"]
    if importlib.util.find_spec("hatchling") is not None:
        command.append("--no-build-isolation")
    command += ["--disable-pip-version-check", "--wheel-dir", str(directory), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode or not wheels:
        said = done.stderr.strip().splitlines()
        reason = words_of(RuntimeError(said[-1] if said else "pip made none"))
        raise EnvironmentFault(f"the wheel of {root} cannot be built: {reason}")
    return wheels[0]


def python_version() -> str:
    """Return the Python that this runs on, which is what was tried."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"
