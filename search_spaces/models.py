"""What is known of a model before any weight is loaded: its config, found by name and checked.

A name is a shipped architecture, a directory with a ``config.json``, or a hub id. Weights are not
loaded and remote code is never run: ``auto_map`` is dropped, so that nothing further down can pick
it up. Of a hub id the local cache is asked first, then the hub, once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal

from qlora_sweep.search_spaces.documents import exists, home_expanded, is_directory, read_json
from qlora_sweep.search_spaces.errors import (
    EnvironmentFault,
    InputError,
    SweepError,
    did_you_mean,
    quote,
    words_of,
)
from qlora_sweep.search_spaces.quantized import (
    StoredQuantization,
    name_of_base,
    of_decoder,
    said_beside,
    stored_quantization,
)
from qlora_sweep.search_spaces.ropes import check_ropes, longest_length
from qlora_sweep.search_spaces.vision_sizes import check_vision

SIZE_MAX = 2**24
"""No size of a decoder model reaches this; a larger one is a lie or a slip. Llama 4 Scout has the
most, 10,485,760 positions."""
LAYERS_MAX = 2_000
"""The deepest published decoders have some 130 layers; each is predicted and checked."""
SECONDS_MAX = 10.0
"""How long the hub may take to answer."""

OWN_CODE = (
    "the model brings code of its own (auto_map), and such code is never run here: name a model of "
    "a type that transformers has"
)
"""Why a config that transformers' own classes cannot read is not read."""
SCORE_CAP = "attn_logit_softcapping"
"""Key of a config that says beyond which number no attention score goes."""
PART_OF = "part_of"
"""Key of a decoder's config that names the type of the model that it is stored with."""
WHOLE = "whole"
"""Key of a decoder's config that holds the config of the model that it sees with."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")
_BASE_OF_CARD = re.compile(r"^base_model:\s*(?:\[|-\s*)?[\"']?([\w./-]+)", re.MULTILINE)
_CARD_CHARACTERS = 4096
"""Of a model card, in which its header is."""
_REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
_OPTIONAL = ("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings")
_OF_EACH_LAYER = "intermediate_size"
"""Key that may have a value for each layer, as of Gemma 3n."""
SIZES = _REQUIRED + _OPTIONAL
"""Keys of a config whose values are counts."""
_OTHER_WORDS = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
}
"""What GPT-2, Bloom, MPT and their like call what everybody else calls otherwise."""
_LISTED_LAYERS = "layers_block_type"
"""Key that lists the kind of each layer where transformers saves no number of them (Nemotron-H)."""
_MULTIMODAL = {
    "emu3": "emu3_text_model",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "llama4": "llama4_text",
    "mllama": "mllama_text_model",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen4_exp": "qwen4_exp_text",
}
"""Types whose sizes at the top level transformers 5.17 would not even read, and their decoders."""
_TEXT_ONLY = {
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), "qwen2"),
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Decoders that on texts, where all positions of a token are equal, are others."""
_LEFT_OUT: dict[str, dict[str, int]] = {
    "cohere2": {
        "num_hidden_layers": 40,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "intermediate_size": 22_528,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
    },
    "gemma": {
        "num_hidden_layers": 28,
        "hidden_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "intermediate_size": 24_576,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
    },
    "gemma2": {
        "num_hidden_layers": 26,
        "hidden_size": 2304,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 9216,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
    },
    "gemma3_text": {
        "num_hidden_layers": 26,
        "hidden_size": 2304,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 9216,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
    },
    "granite": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 11_008,
        "vocab_size": 32_000,
        "max_position_embeddings": 2048,
    },
    "llama": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 11_008,
        "vocab_size": 32_000,
        "max_position_embeddings": 2048,
    },
    "ministral3": {
        "num_hidden_layers": 34,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14_336,
        "vocab_size": 131_072,
        "max_position_embeddings": 262_144,
    },
    "mistral": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "vocab_size": 32_000,
        "max_position_embeddings": 131_072,
    },
    "qwen2": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 22_016,
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
    },
    "qwen3": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "intermediate_size": 22_016,
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
    },
}
"""Sizes of transformers' classes, by the type of a text config that is stored inside of another:
``save_pretrained`` leaves out of it what equals them, so that a published one may lack any."""
_PUBLISHED = dict.fromkeys(
    (
        *("gemma-3-4b", "gemma-3-12b", "gemma-3-27b"),
        *("gemma-4-e2b", "gemma-4-e4b", "gemma-4-26b-a4b", "gemma-4-31b"),
        *("ministral-3-8b", "ministral-3-14b"),
        *("qwen3.5-9b", "qwen3.5-27b", "qwen3.5-35b-a3b"),
    ),
    "with a vision tower: to train its text decoder download it and name the directory",
)
_PUBLISHED["gpt-oss-20b"] = "in MXFP4, which is not trained here"
"""Shipped decoders whose hub ids hold something else."""


@dataclass(frozen=True)
class ModelSpec:
    """A decoder model: a name, a parsed ``config.json``, and where its weights would be."""

    name: str
    """As the person named it."""
    source: Literal["shipped", "directory", "hub"]
    config: dict[str, Any]
    """The parsed ``config.json``."""
    path: Path | None = None
    """The directory, for ``directory``; the snapshot's directory where a hub model is cached, None
    for the hub id of a shipped architecture."""

    @property
    def model_type(self) -> str:
        """transformers' name of the architecture (``mistral``); empty where the config has none."""
        return str(self.config.get("model_type", ""))

    @property
    def part_of(self) -> str | None:
        """Type of the checkpoint that holds more, as a vision tower, where it is the text decoder
        of one."""
        return self.config.get(PART_OF)

    @property
    def is_part(self) -> bool:
        """Whether it is the text decoder of a checkpoint that holds more."""
        return self.part_of is not None

    @property
    def hidden_layers(self) -> int:
        """Number of decoder layers."""
        return int(self.config["num_hidden_layers"])

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return int(self.config["hidden_size"])

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self.config["vocab_size"])

    @cached_property
    def max_positions(self) -> int | None:
        """Longest sequence the model's positions allow, as its rotary embeddings are scaled; None
        where the config does not say."""
        return longest_length(self.config)

    @cached_property
    def stored(self) -> StoredQuantization | None:
        """What its weights are stored in; None where that is 16 bits."""
        return stored_quantization(self.config)

    @cached_property
    def unquantized_base(self) -> str | None:
        """What a quantized checkpoint was made of, as its config, its model card or its name say;
        None where none of them does."""
        origin = self.config.get("_name_or_path")
        if isinstance(origin, str) and is_hub_id(origin) and name_of_base(origin) is None:
            return origin
        card = None
        if self.path is not None:
            card = _base_of_card(self.path / "README.md")
        return card or name_of_base(self.name)

    @property
    def tokenizer_path(self) -> Path | None:
        """Directory in which its tokenizer is, where it has one; of shipped ones the demo has."""
        if self.source != "shipped":
            return self.path
        shipped = Path(str(files("qlora_sweep.search_spaces") / "tokenizers" / self.name))
        if not shipped.is_dir():
            return None
        return shipped

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of the decoder's config, blind to key order and to what does not shape it."""
        ignored = {"_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype"}
        ignored |= {PART_OF, WHOLE}
        return _digest({key: value for key, value in self.config.items() if key not in ignored})

    @cached_property
    def whole_fingerprint(self) -> str:
        """The same of a decoder with the tower that it is stored with."""
        return _digest([self.fingerprint, self.config.get(WHOLE)])

    def fingerprint_of(self, *, sees: bool) -> str:
        """Return that of what is built: the whole where rows have images, else the decoder."""
        return self.whole_fingerprint if sees else self.fingerprint

    @cached_property
    def vision_fault(self) -> str | None:
        """Why what it is stored with cannot see for it; None where it can, or has no such part. The
        decoder alone can be trained all the same."""
        try:
            check_vision(self.config.get(WHOLE, {}), self.config, label=self.name, most=SIZE_MAX)
        except InputError as error:
            return str(error)
        return None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, as the worker and the study's definition keep them."""
        path = None
        if self.path is not None:
            path = str(self.path)
        return {"name": self.name, "source": self.source, "config": self.config, "path": path}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ModelSpec:
        """Read what `to_json` wrote."""
        path = None
        if values.get("path") is not None:
            path = Path(values["path"])
        return cls(values["name"], values["source"], values["config"], path)


def _base_of_card(path: Path) -> str | None:
    """Return the base model that a model card names; None where there is none."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            header = file.read(_CARD_CHARACTERS)
    except OSError:
        return None
    named = _BASE_OF_CARD.search(header)
    if named is None or not is_hub_id(named[1]):
        return None
    return named[1]


# The hub. Only hub ids need its libraries, which take longer to import than most commands to run.


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form of a hub id, ``org/name``."""
    return _HUB_ID.fullmatch(name) is not None


def fetch_config(name: str) -> Path:
    """Return the path of a hub id's ``config.json``, from the local cache where it is there.

    Raises:
        InputError: the hub has no such model, no config in it, or none that this account may read.
        EnvironmentFault: the hub cannot be reached, or its cache cannot be written.
    """
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


_FETCHED = [
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "tokenizer*",
    "*.model",
    "merges.txt",
    "vocab.txt",
    "*.jinja",
    "LICENSE*",
]
"""Weights in safetensors alone, as others are pickles; and what a tokenizer is made of."""
_SAME_AGAIN = ["original/*", "consolidated*"]
"""The same weights in other files."""


def fetch_weights(name: str) -> Path:
    """Return the directory of a hub id's weights and tokenizer, fetched where they are not cached.

    Raises:
        InputError: the hub has no such model, or none that this account may read.
        EnvironmentFault: the hub cannot be reached, or its cache cannot be written.
    """
    import httpx
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            name,
            allow_patterns=_FETCHED,
            ignore_patterns=_SAME_AGAIN,
            etag_timeout=SECONDS_MAX,
        )
        return Path(found)
    except (OSError, httpx.HTTPError) as error:
        raise translate(error, name=name) from error


def translate(error: Exception, *, name: str) -> SweepError:
    """Return what a failed request for the hub id ``name`` means for the person who named it."""
    from huggingface_hub import errors

    offline = "is not in the local cache and HF_HUB_OFFLINE is set: unset it"
    gated = "is gated: accept its licence on the hub and log in with 'hf auth login'"
    unseen = "is not on the hub, or is private and nobody is logged in ('hf auth login')"
    known: list[tuple[type[Exception], type[SweepError], str]] = [
        (errors.GatedRepoError, InputError, gated),
        (errors.RepositoryNotFoundError, InputError, unseen),
        (errors.EntryNotFoundError, InputError, "has no config.json on the hub"),
        (errors.OfflineModeIsEnabled, EnvironmentFault, f"{offline}, or give a directory"),
    ]
    for kind, fault, words in known:
        if isinstance(error, kind):
            return fault(f"model '{name}' {words}")
    return EnvironmentFault(
        f"model '{name}': the hub cannot be reached ({words_of(error)}): give a directory with its "
        "config.json, or set HF_HUB_OFFLINE=1 with a cache that holds it"
    )


# Names.


def load_model_spec(name: str, *, fetch: Callable[[str], Path] = fetch_config) -> ModelSpec:
    """Return the model that ``name`` names.

    Args:
        name: a shipped architecture, a directory with a ``config.json``, or a hub id (``org/x``).
        fetch: gets a hub id's ``config.json`` and returns its path.

    Raises:
        InputError: there is no such model, or its config is not one that can be used.
        EnvironmentFault: the hub cannot be reached and its cache does not hold the model.
    """
    if name in _shipped():
        return ModelSpec(name, "shipped", _shipped()[name])
    directory = home_expanded(name)
    label = f"model '{name}'"
    if name and is_directory(directory, label=label):
        config = _read_config(directory / "config.json", label=str(Path(name) / "config.json"))
        return ModelSpec(name, "directory", config, directory.resolve())
    if name and exists(directory, label=label):
        raise InputError(f"{label} is a file: name the directory that holds its config.json")
    if is_hub_id(name):
        shipped = _hub_ids().get(name.lower())
        if shipped in _PUBLISHED:
            raise InputError(
                f"{label} is published {_PUBLISHED[shipped]}; its text decoder ships as "
                f"'{shipped}', an architecture without weights"
            )
        if shipped is not None:
            # The same whether or not the hub is reached; pretrained weights are fetched by the id.
            return ModelSpec(name, "hub", _shipped()[shipped])
        path = fetch(name)
        return ModelSpec(name, "hub", _read_config(path, label=f"{name}/config.json"), path.parent)
    if "/" in name or name.startswith((".", "~")):
        raise InputError(f"{label}: no such directory")
    raise InputError(
        f"unknown {label}{did_you_mean(name, _shipped(), lists='sweep models')} "
        "(a shipped architecture, a directory with a config.json, or a hub id like org/name)"
    )


def located(name: str, *, beside: Path) -> str:
    """Return what a file in the directory ``beside`` means by a model's name.

    A shipped architecture, else a directory beside the file; anything else is left as it is, a
    directory where the command runs or a hub id.
    """
    if not name or name in _shipped():
        return name
    directory = beside / home_expanded(name)
    if not is_directory(directory, label=f"model '{name}'"):
        return name
    return str(directory)


def shipped_models() -> list[ModelSpec]:
    """Return the shipped architectures by name, where 4b comes before 12b."""

    def natural(name: str) -> list[str | float]:
        # Every second part is a number.
        parts = _NUMBER.split(name)
        return [float(part) if index % 2 else part for index, part in enumerate(parts)]

    return [load_model_spec(name) for name in sorted(_shipped(), key=natural)]


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    with as_file(files("qlora_sweep.search_spaces") / "architectures") as directory:
        paths = sorted(directory.glob("*.json"))
        return {path.stem: _read_config(path, label=path.name) for path in paths}


@cache
def _hub_ids() -> dict[str, str]:
    """Return the shipped architectures by their hub ids, in lower case, as the hub takes any."""
    known = json.loads(
        files("qlora_sweep.search_spaces").joinpath("hub_ids.json").read_text("utf-8")
    )
    names: dict[str, str] = {}
    for name, hub_ids in known.items():
        names |= {hub_id.lower(): name for hub_id in hub_ids}
    return names


def _digest(values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


# Configs.


def _read_config(path: Path, *, label: str) -> dict[str, Any]:
    if not exists(path, label=label):
        raise InputError(f"{label}: no such file; a model's directory needs its config.json")
    config = read_json(path, label=label)
    return checked_config({**config, **said_beside(path.parent, config)}, label=label)


def checked_config(config: dict[str, Any], *, label: str) -> dict[str, Any]:
    """Return a parsed ``config.json`` in the usual words, once its sizes go together.

    Raises:
        InputError: it is no text decoder's, or a size is missing or contradicts another; the
            message begins with ``label``.
    """
    has_own_code = bool(config.get("auto_map"))
    config = _decoder(config)
    try:
        _check_kind(config, label=label)
        config = _in_usual_words(config)
        _check_sizes(config, label=label)
    except InputError as error:
        if has_own_code:
            raise InputError(f"{error}; {OWN_CODE}") from error
        raise
    check_ropes(config, label=label, most=SIZE_MAX)
    stored_quantization(config, label=label)
    return {key: value for key, value in config.items() if key != "auto_map"}


def _in_usual_words(config: dict[str, Any]) -> dict[str, Any]:
    if isinstance(listed := config.get(_LISTED_LAYERS), list):
        config = {"num_hidden_layers": len(listed), **config}
    for key, words in _OTHER_WORDS.items():
        own = next((word for word in words if word in config), None)
        if own is not None:
            config = {key: config[own], **config}
    return config


def _decoder(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a vision-language model's text decoder; another's as it is."""
    kind = config.get("model_type")
    text = config.get("text_config")
    if not isinstance(text, dict):
        text = {}
    own = text.get("model_type") or _MULTIMODAL.get(str(kind))
    if text and own and (kind in _MULTIMODAL or "num_hidden_layers" not in config):
        shared = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        shared |= of_decoder(config)
        if isinstance(config.get("vision_config"), dict):
            shared[WHOLE] = config
        config = {**_LEFT_OUT.get(str(own), {}), **text, **shared, "model_type": own, PART_OF: kind}
    if (own := _TEXT_ONLY.get(str(config.get("model_type")))) is None:
        return config
    config = {PART_OF: kind, **config, "model_type": own}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(key), dict):
            kept = {k: v for k, v in rope.items() if "mrope" not in (k[:5], v)}
            config[key] = kept or None
    return config


def _check_kind(config: dict[str, Any], *, label: str) -> None:
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise InputError(f"{label}: model_type must name the architecture, got {quote(kind)}")
    if config.get("is_encoder_decoder"):
        raise InputError(f"{label}: is_encoder_decoder is true; only decoder models can be trained")
    text = config.get("text_config")
    is_nested = isinstance(text, dict)
    if kind in _MULTIMODAL or ("num_hidden_layers" not in config and is_nested):
        has = ""
        decoder = _MULTIMODAL.get(kind)
        if isinstance(text, dict):
            has = " (it has a text_config)"
            if isinstance(text.get("model_type"), str):
                decoder = text["model_type"]
        named = ""
        if decoder is not None:
            named = f" (model_type '{decoder}')"
        raise InputError(
            f"{label}: model_type '{kind}' is a multimodal model{has}; only text decoders can be "
            f"trained: write its text_config{named} to a config.json of its own"
        )


def _check_sizes(config: dict[str, Any], *, label: str) -> None:
    """Refuse sizes that are none, or contradict each other: such a model could not be built."""
    for key in SIZES:
        value = config.get(key)
        if key in _REQUIRED and key not in config:
            raise InputError(f"{label}: {key} is missing; model_type '{config['model_type']}'")
        if value is None and key in _OPTIONAL:
            continue
        most = SIZE_MAX
        if key == "num_hidden_layers":
            most = LAYERS_MAX
        sizes = [value]
        if key == _OF_EACH_LAYER and isinstance(value, list):
            sizes = value
        for size in sizes:
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= most:
                raise InputError(
                    f"{label}: {key} must be a whole number from 1 to {most:,}, got {quote(size)}"
                )
    cap = config.get(SCORE_CAP)
    is_number = isinstance(cap, int | float) and not isinstance(cap, bool)
    if cap is not None and not (is_number and cap > 0):
        raise InputError(f"{label}: {SCORE_CAP} must be a number above 0 or null, got {quote(cap)}")
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    # Latent attention says the widths of its heads in keys of its own.
    is_latent = config.get("kv_lora_rank") is not None
    if config.get("head_dim") is None and not is_latent and hidden % heads:
        of = f"num_attention_heads {heads}, and there is no head_dim"
        raise InputError(f"{label}: hidden_size {hidden} is not a multiple of {of}")
    keys = config.get("num_key_value_heads") or heads
    if heads % keys:
        of = f"num_key_value_heads {keys}"
        raise InputError(f"{label}: num_attention_heads {heads} is not a multiple of {of}")
