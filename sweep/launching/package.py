"""This very installation as a wheel, to be installed on another machine, and the versions that run
here beside it.

An installed wheel and a checkout are repacked alike, from the files that run, so that nothing is
built and nothing is fetched.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import zipfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from search_spaces.errors import EnvironmentFault

NAME = "qlora-sweep"
_PACKAGES = ("search_spaces", "storage", "sweep", "reports")
_START = "qlora_sweep.py"
_DATE = (1980, 1, 1, 0, 0, 0)
"""The same files make the same wheel."""
_LEFT_OUT = re.compile(r"^(?:torch|triton|nvidia-.*|cuda-.*|pip|setuptools|wheel|qlora-sweep)$")
"""What a build of torch asks for itself, and what installs."""


@dataclass(frozen=True)
class Wheel:
    """A wheel in memory."""

    name: str
    data: bytes

    @property
    def digest(self) -> str:
        """What tells it from any other."""
        return hashlib.sha256(self.data).hexdigest()


def version() -> str:
    """Return the version that runs here.

    Raises:
        EnvironmentFault: it runs from a directory in which it is not installed.
    """
    return _distribution().version


def _distribution() -> metadata.Distribution:
    try:
        return metadata.distribution(NAME)
    except metadata.PackageNotFoundError as error:
        raise EnvironmentFault(
            f"{NAME} is not installed here, so that nothing says what it needs elsewhere: "
            "pip install it, with -e from a checkout"
        ) from error


def make_wheel() -> Wheel:
    """Return this installation as a wheel.

    Raises:
        EnvironmentFault: it is not installed, or a file of it cannot be read.
    """
    distribution = _distribution()
    stem = f"{NAME.replace('-', '_')}-{distribution.version}"
    info, root = f"{stem}.dist-info", Path(__file__).resolve().parents[2]
    try:
        files = dict(_files(root))
    except OSError as error:
        raise EnvironmentFault(f"{error.filename}: {error.strerror}") from error
    files[f"{info}/METADATA"] = (distribution.read_text("METADATA") or "").encode()
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nsweep = qlora_sweep:main\n"
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: qlora-sweep\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD").encode()
    return Wheel(f"{stem}-py3-none-any.whl", _zipped(files))


def _files(root: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of every file of ours."""
    beside = root / _START
    # In a checkout it has its place in a room; a wheel has it beside the packages.
    start = root / "sweep" / "entry_point.py"
    yield _START, (start if start.exists() else beside).read_bytes()
    for package in _PACKAGES:
        for file in sorted((root / package).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts and file != start:
                yield file.relative_to(root).as_posix(), file.read_bytes()


def _record(files: dict[str, bytes], name: str) -> str:
    lines = []
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(data)}")
    return "\n".join([*lines, f"{name},,"]) + "\n"


def _zipped(files: dict[str, bytes]) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _DATE)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return memory.getvalue()


def constraints(*, has_torch: bool) -> str:
    """Return the versions that run here, as constraints of pip.

    Args:
        has_torch: whether torch is there already, and is kept: what goes with its GPU and driver.
            Where it is not, it is to be of the version here, in the build that the index has.
    """
    versions = installed_versions()
    lines = [f"{name}=={held}" for name, held in versions.items() if not _LEFT_OUT.match(name)]
    if not has_torch and "torch" in versions:
        lines.append(f"torch=={versions['torch']}")
    return "\n".join(lines) + "\n"


def installed_versions() -> dict[str, str]:
    """Return the version of everything that is installed here, by its name in lower case.

    Without what tells one build of it from another: ``2.11.0`` for ``2.11.0+cpu``.
    """
    found = {
        _plain(one.name): one.version.partition("+")[0]
        for one in metadata.distributions()
        if one.name
    }
    return dict(sorted(found.items()))


def differences(there: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield name, version there and version here of what sweep needs, where they differ."""
    here = installed_versions()
    theirs = {_plain(name): version.partition("+")[0] for name, version in there.items()}
    for name in needed():
        if name in theirs and name in here and theirs[name] != here[name]:
            yield name, theirs[name], here[name]


def needed() -> Collection[str]:
    """Return the names of what sweep cannot do without."""
    requires = _distribution().requires or ()
    return sorted(
        _plain(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in requires if ";" not in line
    )


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
