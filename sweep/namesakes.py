"""Whether what is imported under our packages' names is ours.

Another distribution, a file of the user's or a directory in PYTHONPATH may have one of those names
too: that is told here, with its path and what to do, before anything fails for a reason that nobody
can read. It imports nothing of ours, and nothing heavy; looking costs less than a millisecond.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec

DISTRIBUTION = "qlora-sweep"
NAMES = ("search_spaces", "storage", "reports", "sweep")
"""Top-level packages of the distribution."""
EXIT_CODE = 3
"""The environment is at fault."""
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""Where all of it is: site-packages, or a checkout."""
_PACKAGES = {"yaml": "pyyaml"}
"""Of modules whose package has another name."""
_BEGINNING = f'"""{DISTRIBUTION}:'.encode()
"""How the first line of each of our packages begins, which no other package's does."""
_OWN_ENVIRONMENT = "give sweep an environment of its own (python -m venv)"
_AGAIN = f"pip install --force-reinstall --no-deps {DISTRIBUTION}"
APART = f"{_OWN_ENVIRONMENT}, or remove the other and: {_AGAIN}"
"""What to do where two distributions share a name."""


def refuse_namesakes() -> None:
    """End the process where one of our names is somebody else's, and say whose and what to do.

    An exit and no exception, of which ``python -m`` would print a traceback.
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
        found = None if spec is None else spec.origin
        if found is None or os.path.realpath(found) != os.path.realpath(own):
            found = (found or "another place").removesuffix(f"{os.sep}__init__.py")
            yield (
                f"'{name}' is not ours: Python finds {found} first, and sweep needs "
                f"{os.path.dirname(own)}\n  -> {_cure(found)}"
            )
            continue
        with open(own, "rb") as file:
            is_replaced = file.read(len(_BEGINNING)) != _BEGINNING
        if is_replaced:
            owners = " and ".join(owners_of({f"{name}/__init__.py"}))
            removal = f"pip uninstall {owners.split()[0]}" if owners else "remove it"
            yield (
                f"'{name}' is not ours any more: {owners or 'something else'} has replaced {own}\n"
                f"  -> {_OWN_ENVIRONMENT}, or {removal} and: {_AGAIN}"
            )


def missing_words(error: ImportError) -> str:
    """Return what to say where something that we need cannot be imported, and what installs it."""
    from importlib.metadata import PackageNotFoundError, packages_distributions, requires

    module = (error.name or "").partition(".")[0]
    words = str(error).splitlines()[0] if str(error) else "an import failed"
    if "failed to map segment" in words or "allocate memory" in words:
        return f"no memory is left to load a library ({words}): raise `ulimit -v`, or end some"
    if module in NAMES:
        return f"{DISTRIBUTION} is incomplete: {words}: {_AGAIN}"
    if not module or not isinstance(error, ModuleNotFoundError):
        broken = packages_distributions().get(module, [module])[0]
        again = f"pip install --force-reinstall {broken}" if broken else _AGAIN
        return f"a library of sweep's cannot be imported: {words}: {again}"
    package = _PACKAGES.get(module, module)
    needed = list[str]()
    with suppress(PackageNotFoundError):
        needed = requires(DISTRIBUTION) or []
    for one in needed:
        name, _, extra = one.partition("; extra == ")
        if re.split(r"[^\w.-]", name)[0].lower().replace("_", "-") == package.replace("_", "-"):
            cure = (
                f"pip install '{DISTRIBUTION}[{extra[1:-1]}]'" if extra else f"pip install '{name}'"
            )
            return f"{package} is not installed, which sweep needs here: {cure}"
    # What another package needs, whose installation was cut short.
    return (
        f"{package} is not installed, which a library of sweep's needs: pip install {package}, or "
        f"all of it again with pip install --force-reinstall {DISTRIBUTION}"
    )


def _cure(found: str) -> str:
    """Return what to do about a module that stands before ours on Python's path."""
    directory = os.path.realpath(os.path.dirname(found))
    listed = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if directory in map(os.path.realpath, listed):
        return f"take {os.path.dirname(found)} out of PYTHONPATH: env -u PYTHONPATH sweep ..."
    if directory == os.path.realpath(os.getcwd()):
        return "start it by the command `sweep`, which does not look in this directory; or rename"
    owners = " and ".join(owners_of({os.path.basename(found)}))
    return f"{f'uninstall {owners}' if owners else 'rename it'}, or {_OWN_ENVIRONMENT}"


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
    from base64 import urlsafe_b64encode
    from hashlib import sha256
    from importlib.metadata import PackageNotFoundError, distribution

    def digest(path: str) -> str:
        try:
            with open(path, "rb") as file:
                return urlsafe_b64encode(sha256(file.read()).digest()).rstrip(b"=").decode()
        except OSError:
            return ""

    try:
        files = distribution(DISTRIBUTION).files or ()
    except PackageNotFoundError:
        return []
    ours = (file for file in files if file.parts[0] in NAMES and file.hash is not None)
    return [str(f) for f in ours if f.hash and digest(str(f.locate())) != f.hash.value]
