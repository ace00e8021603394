"""Finding a tokenizer's files: beside the model, shipped with it, named, or on the hub. Imports no
transformers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from qlora_sweep.search_spaces.documents import home_expanded, is_directory
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, words_of
from qlora_sweep.search_spaces.models import (
    SECONDS_MAX,
    ModelSpec,
    is_hub_id,
    shipped_models,
    translate,
)

_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
)
"""Whatever transformers may read of a tokenizer, the config for its class included."""
_TEMPLATES = "additional_chat_templates"
_TELLING = frozenset(_FILES) - {"config.json", "chat_template.jinja", "chat_template.json"}
_VOCABULARIES = (
    "tokenizer.model",
    "tokenizer.model.v3",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_RANK = re.compile(rb"[A-Za-z0-9+/]+=* \d+\s*$")
"""A line of tiktoken's files: a token in base64 and its rank."""
_LINE_BYTES = 4096
NEEDS = (
    "name the directory or hub id that has one, with --model or --set data.tokenizer=NAME "
    "(data.tokenizer=demo for a rough count)"
)


@dataclass(frozen=True)
class TokenizerFiles:
    """Where a tokenizer is."""

    name: str
    """As the person named it, or the model that it belongs to."""
    directory: Path

    @property
    def files(self) -> tuple[Path, ...]:
        """Those of its files that are there; the model's config is none of them."""
        files = []
        for name in _FILES:
            file = self.directory / name
            if name != "config.json" and file.is_file():
                files.append(file)
        files += sorted((self.directory / _TEMPLATES).glob("*.jinja"))
        return tuple(files)

    @property
    def digest(self) -> str:
        """Hex digest of its files: equal for equal tokenizers, wherever they are."""
        hashed = hashlib.sha256()
        for file in self.files:
            hashed.update(f"{file.relative_to(self.directory)}\0".encode())
            hashed.update(hashlib.sha256(file.read_bytes()).digest())
        return hashed.hexdigest()[:16]


def fetch_tokenizer(name: str) -> Path:
    """Return the directory of a hub id's tokenizer, from the local cache where it is there.

    Raises:
        InputError: the hub has no such model, or none that this account may read.
        EnvironmentFault: the hub cannot be reached, or its cache cannot be written.
    """
    import httpx
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    patterns = [*_FILES, f"{_TEMPLATES}/*"]
    try:
        found = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
        if _has_tokenizer(found):
            return found
    except LocalEntryNotFoundError:
        pass
    except HFValidationError as error:
        raise InputError(f"tokenizer '{name}' is neither a directory nor a hub id") from error
    try:
        # Asked first because it tries once; the download alone retries for half a minute.
        HfApi().model_info(name, timeout=SECONDS_MAX)
        return Path(snapshot_download(name, allow_patterns=patterns, etag_timeout=SECONDS_MAX))
    except (OSError, httpx.HTTPError) as error:
        fault = translate(error, name=name)
        words = str(fault).replace(f"model '{name}'", f"tokenizer '{name}'")
        words = words.replace("its config.json", "its tokenizer's files")
        raise type(fault)(words) from error


def find_tokenizer(
    named: str | None,
    model: ModelSpec | None,
    *,
    fetch: Callable[[str], Path] = fetch_tokenizer,
) -> TokenizerFiles:
    """Return the tokenizer that was named, else the model's own.

    Raises:
        InputError: there is none, or none is named.
        EnvironmentFault: the hub cannot be reached and its cache does not hold it.
    """
    name, directory = named, None if named is None else home_expanded(named)
    if named and directory and is_directory(directory, label=f"tokenizer '{named}'"):
        directory = directory.resolve()
    elif named is not None and named not in {spec.name for spec in shipped_models()}:
        if not is_hub_id(named):
            raise InputError(f"tokenizer '{named}': no such directory, and no hub id (org/name)")
        directory = fetch(named)
    else:
        spec = model
        if named is not None:
            spec = {shipped.name: shipped for shipped in shipped_models()}[named]
        if spec is None:
            raise InputError(f"texts are counted in a tokenizer's tokens: {NEEDS}")
        name = spec.name
        directory = spec.tokenizer_path
        if spec.source == "hub":
            directory = fetch(name)
        if directory is None:
            raise InputError(
                f"model '{name}' ships as an architecture, without a tokenizer: {NEEDS}"
            )
    try:
        if not _has_tokenizer(directory):
            raise InputError(f"'{name}' has no tokenizer (tokenizer.json or its like): {NEEDS}")
    except OSError as error:
        raise EnvironmentFault(f"tokenizer '{name}': {words_of(error)}") from error
    return TokenizerFiles(str(name), directory)


def why_unreadable(directory: Path) -> str | None:
    """Return what a tokenizer that transformers cannot read needs; None where that is not known.

    transformers 5.17 says of a SentencePiece model that tiktoken is missing, and of a tokenizer
    with code of its own how to run that.
    """
    for name in ("tokenizer_config.json", "config.json"):
        if _names_own_code(directory / name):
            return (
                f"it brings code of its own (auto_map in {name}), and such code is never run here "
                "(trust_remote_code is never on): name one that has a tokenizer.json, with --set "
                "data.tokenizer=NAME"
            )
    if (directory / "tokenizer.json").is_file():
        return None
    for file, package, what in _needed_packages(directory):
        if find_spec(package.replace("-", "_")) is None:
            return (
                f"its {file} is {what}, which needs {package}: pip install {package}, or name a "
                "directory that has its tokenizer.json"
            )
    return None


def _names_own_code(path: Path) -> bool:
    """Whether a config names code of its own for the tokenizer."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict) or not config.get("auto_map"):
        return False
    named = config["auto_map"]
    # In a tokenizer's own config it may be the two classes alone.
    return not isinstance(named, dict) or "AutoTokenizer" in named


def _needed_packages(directory: Path) -> Iterator[tuple[str, str, str]]:
    """Yield each file of a tokenizer that a package of its own reads, the package, and what the
    file is."""
    for name in _VOCABULARIES:
        path = directory / name
        if path.is_file():
            with path.open("rb") as file:
                is_ranks = _RANK.match(file.readline(_LINE_BYTES)) is not None
            if is_ranks:
                yield name, "tiktoken", "a list of tiktoken's tokens"
            else:
                yield name, "sentencepiece", "a SentencePiece model"
    if (directory / "tekken.json").is_file():
        yield "tekken.json", "mistral-common", "a Tekken vocabulary"


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in _TELLING)
