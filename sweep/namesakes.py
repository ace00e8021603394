"""Owns that what is imported under our names is ours.

The packages are named for what they hold, and land in site-packages under those names. Another
distribution, a file of the user's or a directory in PYTHONPATH may have one of them too: that is
told here, with its path and what to do, before anything fails for a reason that nobody can read.
It imports nothing of ours, and nothing heavy; looking costs less than a millisecond.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec

DISTRIBUTION = "qlora-sweep"
NAMES = ("search_spaces", "storage", "reports", "sweep")
"""Top-level packages of the distribution."""
EXIT_CODE = 3
"""The environment is at fault."""
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""Where all of it is: site-packages, or a checkout."""
_BEGINNING = f'"""{DISTRIBUTION}:'.encode()
"""How the first line of each of our packages begins, which no other package's does."""
_OWN_ENVIRONMENT = "give sweep an environment of its own (python -m venv)"
_AGAIN = f"pip install --force-reinstall --no-deps {DISTRIBUTION}"
APART = f"{_OWN_ENVIRONMENT}, or remove the other and: {_AGAIN}"
"""What to do where two distributions share a name."""


def refuse_namesakes() -> None:
    """End the process where one of our names is somebody else's, and say whose and what to do.

    An exit and no exception: whoever gets here has asked for `sweep` by some way, ``python -m``
    among them, which would print a traceback of any exception.
    """
    words = next(namesakes(), None)
    if words is not None:
        sys.stderr.write(f"error: {words}\n")
        raise SystemExit(EXIT_CODE)


def namesakes() -> Iterator[str]:
    """Yield what to say of each of our names that Python would import from elsewhere."""
    for name in NAMES:
        own = os.path.join(ROOT, name, "__init__.py")
        if not os.path.exists(own):
            yield f"'{name}' is incomplete: {own} is missing\n  -> {_AGAIN}"
            continue
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            yield f"'{name}' cannot be found, although {own} is there\n  -> {_AGAIN}"
        elif os.path.realpath(spec.origin) != os.path.realpath(own):
            yield _elsewhere(name, _shown(spec.origin), own)
        elif not _begins_as_ours(own):
            yield _replaced(name, own)


def _begins_as_ours(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING


def _shown(origin: str) -> str:
    """Return the file of a module, or the directory of a package."""
    return os.path.dirname(origin) if os.path.basename(origin) == "__init__.py" else origin


def _elsewhere(name: str, found: str, own: str) -> str:
    return (
        f"'{name}' is not ours: Python finds {found} first, and sweep needs {_shown(own)}\n"
        f"  -> {_cure(found)}"
    )


def _cure(found: str) -> str:
    """Return what to do about a module that stands before ours on Python's path."""
    directory = os.path.dirname(found)
    listed = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if any(entry and _is_same(entry, directory) for entry in listed):
        return f"take {directory} out of PYTHONPATH: env -u PYTHONPATH sweep ..."
    if _is_same(os.getcwd(), directory):
        return "start it by the command `sweep`, which does not look in this directory; or rename"
    owners = owners_of({os.path.basename(found)})
    return (
        f"uninstall {' and '.join(owners)}, or {_OWN_ENVIRONMENT}"
        if owners
        else (f"rename it, or {_OWN_ENVIRONMENT}")
    )


def _is_same(entry: str, directory: str) -> bool:
    return os.path.realpath(entry) == os.path.realpath(directory)


def _replaced(name: str, own: str) -> str:
    owners = owners_of({f"{name}/__init__.py"})
    who = " and ".join(owners) or "something else"
    removal = f"pip uninstall {' '.join(one.split()[0] for one in owners)} && " if owners else ""
    return (
        f"'{name}' is not ours any more: {who} has replaced {own}\n"
        f"  -> {_OWN_ENVIRONMENT}, or {removal}{_AGAIN}"
    )


def owners_of(beginnings: Iterable[str]) -> list[str]:
    """Return the other distributions that installed a file whose path begins like one of these.

    Reads what each installed distribution says of its files: not for every start.
    """
    from importlib.metadata import distributions

    wanted = tuple(beginnings)
    records = ((one, one.read_text("RECORD") or "") for one in distributions())
    return sorted(
        f"{one.name} {one.version}"
        for one, record in records
        if one.name != DISTRIBUTION and any(line.startswith(wanted) for line in record.splitlines())
    )


def sharers() -> list[str]:
    """Return the other distributions that installed something under our names."""
    return owners_of(f"{name}{end}" for name in NAMES for end in ("/", ".py"))


def changed_files() -> list[str]:
    """Return the files of this installation that are gone or not what was installed.

    Empty for a checkout, whose files are meant to change.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        files = distribution(DISTRIBUTION).files or ()
    except PackageNotFoundError:
        return []
    return [
        str(file)
        for file in files
        if file.parts[0] in NAMES
        and file.hash is not None
        and not _is_as_installed(str(file.locate()), file.hash.value)
    ]


def _is_as_installed(path: str, digest: str) -> bool:
    from base64 import urlsafe_b64encode
    from hashlib import sha256

    try:
        with open(path, "rb") as file:
            found = sha256(file.read()).digest()
    except OSError:
        return False
    return urlsafe_b64encode(found).rstrip(b"=").decode() == digest
