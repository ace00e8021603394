"""Owns what is known of a model before any weight is loaded: its config and where it came from.

Knows nothing of torch or transformers; a config is plain JSON here.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

Weights = Literal["random", "pretrained"]


@dataclass(frozen=True)
class ModelSpec:
    """A decoder model: a name, a parsed ``config.json``, and where its weights would be."""

    name: str
    """As the person named it."""
    source: Literal["shipped", "directory", "hub"]
    config: dict[str, Any]
    """The parsed ``config.json``."""
    path: Path | None = None
    """The directory, for ``directory``; the snapshot's directory where a hub model is cached."""

    @property
    def model_type(self) -> str:
        """transformers' name of the architecture (``mistral``); empty where the config has none."""
        return str(self.config.get("model_type", ""))

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

    @property
    def max_positions(self) -> int | None:
        """Longest sequence the model's positions allow; None where the config does not say."""
        value = self.config.get("max_position_embeddings")
        return None if value is None else int(value)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of the config, blind to key order and to what does not shape the model."""
        ignored = {"_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype"}
        shaped = {key: value for key, value in self.config.items() if key not in ignored}
        return hashlib.sha256(json.dumps(shaped, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, as the worker and the study's definition keep them."""
        return {
            "name": self.name,
            "source": self.source,
            "config": self.config,
            "path": None if self.path is None else str(self.path),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ModelSpec:
        """Read what `to_json` wrote."""
        path = values.get("path")
        return cls(
            values["name"], values["source"], values["config"], None if path is None else Path(path)
        )
