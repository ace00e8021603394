"""Owns getting a model's config from the Hugging Face hub: the cache first, then one quick try.

The only module here that may touch the network. Knows nothing of what a config says.
"""

from __future__ import annotations

import re
from pathlib import Path

from search_spaces.errors import EnvironmentFault, InputError, SweepError, words_of

SECONDS_MAX = 10.0
"""How long the hub may take to answer."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

ADVICE = "give a directory with its config.json, or set HF_HUB_OFFLINE=1 with a cache that holds it"


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form of a hub id, ``org/name``."""
    return _HUB_ID.fullmatch(name) is not None


def fetch_config(name: str) -> Path:
    """Return the path of a hub id's ``config.json``, from the local cache where it is there.

    Raises:
        InputError: the hub has no such model, no config in it, or none that this account may read.
        EnvironmentFault: the hub cannot be reached, or its cache cannot be written.
    """
    # Only hub ids need these, and they take longer to import than most commands to run.
    import httpx
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "config.json", local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    except HFValidationError as error:
        raise InputError(f"model '{name}' is neither a directory nor a hub id") from error
    try:
        # Asked first because it tries once; the download alone retries for half a minute.
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=SECONDS_MAX)
        return Path(hf_hub_download(name, "config.json", etag_timeout=SECONDS_MAX))
    except (OSError, httpx.HTTPError) as error:
        raise translate(error, name=name) from error


def translate(error: Exception, *, name: str) -> SweepError:
    """Return what a failed request for the hub id ``name`` means for the person who named it."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    match error:
        case GatedRepoError():
            return InputError(
                f"model '{name}' is gated: accept its licence on the hub and log in with "
                "'hf auth login'"
            )
        case RepositoryNotFoundError():
            return InputError(
                f"model '{name}': the hub has no such model, or it is private and nobody is "
                "logged in ('hf auth login')"
            )
        case EntryNotFoundError():
            return InputError(f"model '{name}' has no config.json on the hub")
        case OfflineModeIsEnabled():
            return EnvironmentFault(
                f"model '{name}' is not in the local cache and HF_HUB_OFFLINE is set: unset it, "
                "or give a directory with its config.json"
            )
        case _:
            return EnvironmentFault(
                f"model '{name}': the hub cannot be reached ({words_of(error)}): {ADVICE}"
            )


_WEIGHT_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer*", "*.model"]
_TEXT_FILES = ["merges.txt", "*.jinja"]


def fetch_weights(name: str) -> Path:
    """Return the directory of a hub id's weights and tokenizer, fetched where they are not cached.

    Weights in safetensors alone: others are pickles.

    Raises:
        InputError: the hub has no such model, or none that this account may read.
        EnvironmentFault: the hub cannot be reached, or its cache cannot be written.
    """
    import httpx
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name, allow_patterns=[*_WEIGHT_FILES, *_TEXT_FILES], etag_timeout=SECONDS_MAX
            )
        )
    except (OSError, httpx.HTTPError) as error:
        raise translate(error, name=name) from error
