"""What goes along to another machine: this very installation as a wheel, the versions that run here
beside it, and the files of a person's that a study reads.

An installed wheel and a checkout are repacked alike, from the files that run, so that nothing is
built and nothing is fetched.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata, resources
from itertools import chain
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from qlora_sweep.search_spaces.documents import exists, home_expanded
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.loading import preset_name
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.search_spaces.redaction import remember
from qlora_sweep.storage.directory import SPOOL
from qlora_sweep.storage.directory import STUDY as IDENTITY
from qlora_sweep.storage.files import replace
from qlora_sweep.sweep.data.files import is_on_hub, telling_files
from qlora_sweep.sweep.data.prepared_dataset import text_files, translated
from qlora_sweep.sweep.installation import DISTRIBUTION, PACKAGE
from qlora_sweep.sweep.paths import runs_directory
from qlora_sweep.sweep.request import BESIDE, RunRequest

TOKEN = "HF_TOKEN"
FILES = (f"{PACKAGE}-*.whl", "constraints.txt", "there.py")
"""What `write` writes."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Endings of files that hold a model's weights, in lower case."""
_ROOMS = ("search_spaces", "storage", "reports", "sweep")
_ENTRY_POINTS = b"[console_scripts]\nsweep = qlora_sweep.sweep.entry_point:main\n"
_DATE = (1980, 1, 1, 0, 0, 0)
"""The same files make the same wheel."""
_LEFT_OUT = re.compile(r"(?:triton|nvidia-.*|cuda-.*|pip|setuptools|wheel|qlora-sweep)")
"""What a build of torch asks for itself, and what installs."""


@cache
def make_wheel() -> tuple[str, bytes]:
    """Return this installation as a wheel: its name, and what is in it. Raises `OSError`."""
    own = metadata.distribution(DISTRIBUTION)
    stem = f"{PACKAGE}-{own.version}"
    info = f"{stem}.dist-info"
    files = _package_files()
    files[f"{info}/METADATA"] = (own.read_text("METADATA") or "").encode()
    files[f"{info}/entry_points.txt"] = _ENTRY_POINTS
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: qlora-sweep\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    lines = [f"{info}/RECORD,,\n"]
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(data)}\n")
    files[f"{info}/RECORD"] = "".join(lines).encode()
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, _DATE)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return f"{stem}-py3-none-any.whl", memory.getvalue()


def _package_files() -> dict[str, bytes]:
    """Return the package's files, by their paths in a wheel."""
    files = {}
    for file in sorted(Path(str(resources.files(PACKAGE))).iterdir()):
        if file.is_file() and file.name not in _ROOMS:
            files[f"{PACKAGE}/{file.name}"] = file.read_bytes()
    # In a checkout the package has links to them.
    root = Path(__file__).resolve().parents[2]
    for room in _ROOMS:
        for file in sorted((root / room).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                files[f"{PACKAGE}/{file.relative_to(root).as_posix()}"] = file.read_bytes()
    return files


def constraints() -> str:
    """Return the versions that run here, as constraints of pip: of what an index can have.

    Torch is to be of the version here, in the build that the index has. What was built here, from a
    directory or a repository, a nightly build, and an alpha of a vendor's are in no index: there
    the newest release that sweep takes is installed, and `differences` tells of it.
    """
    lines = []
    for one in metadata.distributions():
        version = released_version(one)
        name = canonicalize_name(one.name or "")
        if name and version is not None and not _LEFT_OUT.fullmatch(name):
            lines.append(f"{name}=={version}\n")
    return "".join(sorted(set(lines)))


def released_version(distribution: metadata.Distribution) -> str | None:
    """Return the version of a distribution without what tells one build of it from another; None
    where no index has it."""
    try:
        version = Version(distribution.version or "")
        source = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return None
    is_of_a_vendor = version.is_prerelease and version.local is not None
    is_built_here = "vcs_info" in source or "dir_info" in source
    if version.is_devrelease or is_of_a_vendor or is_built_here:
        return None
    return version.public


def write(directory: Path) -> Path:
    """Write what is installed elsewhere into a directory; return the wheel.

    Raises what `make_wheel` does.
    """
    name, wheel = make_wheel()
    replace(directory / name, wheel)
    replace(directory / FILES[1], constraints().encode())
    replace(directory / FILES[2], Path(__file__).with_name(FILES[2]).read_bytes())
    return (directory / name).absolute()


def installed_versions() -> dict[str, str]:
    """Return the version of everything that is installed here, without its build, by its canonical
    name."""
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        if distribution.name and distribution.version:
            versions[canonicalize_name(distribution.name)] = _unbuilt(distribution.version)
    return versions


def _unbuilt(version: str) -> str:
    """Return a version without the build that it names: ``2.11.0`` for ``2.11.0+cpu``."""
    return version.partition("+")[0]


def differences(there: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield name, version there and version here of what sweep needs, where they differ."""
    here = installed_versions()
    versions_there = {canonicalize_name(name): _unbuilt(version) for name, version in there.items()}
    for required in sorted(metadata.requires(DISTRIBUTION) or ()):
        requirement = Requirement(required)
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None or name not in here:
            continue
        version_there = versions_there.get(name, here[name])
        if version_there != here[name]:
            yield name, version_there, here[name]


# A person's files.


def packed(
    request: RunRequest, *, with_weights: bool = False
) -> tuple[RunRequest, dict[str, Path]]:
    """Return a request as another machine reads it, and what goes along, by its path beside it.

    Args:
        request: what was typed here.
        with_weights: whether pretrained weights of a directory here go along.

    Raises:
        InputError: something that was typed or named is not right, or is here alone.
    """
    name, space = request.named()
    model = load_model_spec(space.model)
    files: dict[str, Path] = {}

    def put(kind: str, path: Path) -> str:
        """Let a file go along, or of a directory what a study reads; return its name there."""
        # What a link is called says what its dataset is, as its ending does.
        there = Path(kind, Path(os.path.abspath(path)).name)
        has_weights = kind == "model" and space.weights == "pretrained"
        for file in _read_files(kind, path):
            if has_weights or kind == "data" or file.suffix.lower() not in WEIGHTS:
                files[str(there / file.relative_to(path))] = file.absolute()
        return f"{BESIDE}{there}"

    overrides = dict(request.overrides)
    changes: dict[str, Any] = {"overrides": overrides, "study": name, "storage": None}
    if preset_name(request.space) is None:
        changes["space"] = put("space", home_expanded(request.space))
    if model.source == "directory" and model.path is not None:
        if space.weights == "pretrained" and not with_weights:
            here = f"the weights in {space.model} do not go along"
            raise InputError(f"{here}: name a hub id, or log in there and run it beside them")
        overrides["model"] = put("model", model.path)
    if space.data is not None:
        data = space.data.model_dump()
        for kind, key in (("data", "texts"), ("tokenizer", "tokenizer")):
            if data[key] is None:
                continue
            path = home_expanded(data[key])
            if exists(path, label=data[key]):
                data[key] = put(kind, path)
            elif key == "texts" and not is_on_hub(data[key]):
                text_files(data[key])
        overrides["data"] = data
    if request.carried is not None:
        path = home_expanded(request.carried)
        if not ("/" in request.carried or path.suffix == ".jsonl"):
            path = runs_directory() / request.carried / SPOOL
        if not path.is_file():
            raise InputError(f"--from {request.carried}: {path}: no such file")
        there = f"from/{path.absolute().parent.name}"
        # With the file that says whose it is.
        for file in (path, path.with_name(IDENTITY)):
            if file.is_file():
                files[f"{there}/{file.name}"] = file.absolute()
        changes["carried"] = f"{BESIDE}{there}/{path.name}"
    return replaced(request, **changes), files


def _read_files(kind: str, path: Path) -> list[Path]:
    """Return a file, or the files of a directory that a study reads."""
    if not path.is_dir():
        return [path]
    if kind == "data":
        with translated(str(path)):
            return telling_files(str(path))
    files = []
    for file in sorted(chain(path.iterdir(), path.glob("additional_chat_templates/*"))):
        if file.is_file() and not file.name.startswith("."):
            files.append(file)
    return files


def hub_variables(request: RunRequest) -> dict[str, str]:
    """Return the token for the hub, where a study fetches model, dataset or tokenizer there: that
    of the environment, else of `hf auth login`. From here on no text that is shown has it."""
    _, space = request.named()
    is_fetched = load_model_spec(space.model).source == "hub"
    if space.data is not None:
        is_fetched = is_fetched or is_on_hub(space.data.texts)
        is_fetched = is_fetched or is_on_hub(space.data.tokenizer or "")
    if not is_fetched:
        return {}
    # It takes longer to import than all that is done here.
    from huggingface_hub import constants, get_token

    token = os.environ.get(TOKEN)
    if not token and not constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        token = get_token()
    if not token:
        return {}
    remember(token)
    return {TOKEN: token}
