"""Whether all that sweep needs is installed, as it was: what is missing and what installs it, and
which of sweep's own files were changed.

Imports nothing of ours, and nothing heavy until something is wrong.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress

DISTRIBUTION = "qlora-sweep"
PACKAGE = "qlora_sweep"
DIRECTORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""Where the package is."""
REINSTALL = f"pip install --force-reinstall --no-deps {DISTRIBUTION}"
"""What mends an installation some of whose own files are missing or changed."""
_DISTRIBUTIONS = {"yaml": "pyyaml"}
"""Of modules whose distribution has another name."""


def missing_words(error: ImportError) -> str:
    """Return what to say where something that we need cannot be imported, and what installs it."""
    from importlib.metadata import PackageNotFoundError, packages_distributions, requires

    module = (error.name or "").partition(".")[0]
    words = (str(error) or "an import failed").splitlines()[0]
    if "failed to map segment" in words or "allocate memory" in words:
        return f"no memory is left to load a library ({words}): raise `ulimit -v`, or end some"
    if module == PACKAGE:
        return f"{DISTRIBUTION} is incomplete: {words}: {REINSTALL}"
    if not module or not isinstance(error, ModuleNotFoundError):
        again = REINSTALL
        if module:
            broken = packages_distributions().get(module, [module])[0]
            again = f"pip install --force-reinstall {broken}"
        return f"a library of sweep's cannot be imported: {words}: {again}"
    package = _DISTRIBUTIONS.get(module, module)
    needed: list[str] = []
    with suppress(PackageNotFoundError):
        needed = requires(DISTRIBUTION) or []
    for requirement in needed:
        name, _, extra = requirement.partition("; extra == ")
        if re.split(r"[^\w.-]", name)[0].lower().replace("_", "-") == package.replace("_", "-"):
            if extra:
                name = f"{DISTRIBUTION}[{extra[1:-1]}]"
            return f"{package} is not installed, which sweep needs here: pip install '{name}'"
    # What another package needs, whose installation was cut short.
    return (
        f"{package} is not installed, which a library of sweep's needs: pip install {package}, or "
        f"all of it again with pip install --force-reinstall {DISTRIBUTION}"
    )


def changed_files() -> list[str]:
    """Return the files of this installation that are gone or not what was installed.

    Empty for a checkout, whose files are meant to change.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        files = distribution(DISTRIBUTION).files or ()
    except PackageNotFoundError:
        return []
    ours = [file for file in files if file.parts[0] == PACKAGE]
    return [str(f) for f in ours if f.hash and _digest(str(f.locate())) != f.hash.value]


def _digest(path: str) -> str:
    """Return a file's digest as a wheel records it; nothing where it cannot be read."""
    from base64 import urlsafe_b64encode
    from hashlib import sha256

    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError:
        return ""
    return urlsafe_b64encode(sha256(content).digest()).rstrip(b"=").decode()
