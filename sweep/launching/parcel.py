"""What goes along to a rented machine: this package, the versions beside it, a person's files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from search_spaces.errors import EnvironmentFault
from storage.files import replace
from sweep.launching.package import NAME as PACKAGE
from sweep.launching.package import make_wheel

EXTRA = "gpu"
"""What a GPU needs beside: Liger's kernels."""


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
    package: Path
    """A wheel of this package, as it runs here."""
    inputs: tuple[Input, ...] = ()


def requirements() -> tuple[str, ...]:
    """Return what this package and its extra for a GPU need, as it is installed here.

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
    # A build for the CPU, 2.13.0+cpu, is not what a GPU needs.
    found[name] = f"{name}=={Version(distribution.version).public}"
    needed = distribution.requires or []
    for further in _applying(needed, extras=tuple(sorted(requirement.extras))):
        _collect(further, found)


def package(directory: Path) -> Path:
    """Write this very installation as a wheel into a directory, whole or not at all.

    A wheel of that name gives way: a job that was written before installs this one too.

    Raises:
        EnvironmentFault: it is not installed, or cannot be read or written.
    """
    wheel = make_wheel()
    try:
        replace(directory / wheel.name, wheel.data)
    except OSError as error:
        raise EnvironmentFault(f"cannot write to {directory}: {error.strerror or error}") from error
    return (directory / wheel.name).absolute()


def python_version() -> str:
    """Return the Python that this runs on, which is what was tried."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"
