"""A base's tensors by the names that a model has for them, read one at a time.

transformers renames, splits and fuses what a checkpoint holds; its own rules are asked here, one
parameter at a time, so that the whole is never in memory.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import load_state_dict

from qlora_sweep.search_spaces.checkpoints import INDEX, SINGLE
from qlora_sweep.search_spaces.documents import read_json


class Checkpoint:
    """The safetensors files of a base.

    Attributes:
        files: the tensors in each file, without data.
        tensors: all of them.
        stored: the type of most of its matrices.
    """

    def __init__(self, base: Path) -> None:
        self._base = base
        index = base / INDEX
        names = {SINGLE}
        if index.exists():
            names = set(read_json(index, label=INDEX)["weight_map"].values())
        self.files: dict[str, dict[str, torch.Tensor]] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self._file_of: dict[str, str] = {}
        for file in sorted(names):
            self.files[file] = load_state_dict(str(base / file), map_location="meta")
            self.tensors |= self.files[file]
            self._file_of |= dict.fromkeys(self.files[file], file)
        dtypes = Counter(tensor.dtype for tensor in self.tensors.values() if tensor.ndim > 1)
        self.stored = torch.float32
        if dtypes:
            self.stored = dtypes.most_common(1)[0][0]
        self._opened = ExitStack()
        self._open: dict[str, Any] = {}

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor as it is stored."""
        file = self._file_of[name]
        if file not in self._open:
            opened = safe_open(self._base / file, framework="pt")
            self._open[file] = self._opened.enter_context(opened)
        tensor: torch.Tensor = self._open[file].get_tensor(name)
        return tensor

    def close(self) -> None:
        """Let go of the files, and of what is mapped of them."""
        self._open.clear()
        self._opened.close()


class Names:
    """Which of a model's parameters are made of which of a checkpoint's tensors.

    Attributes:
        parameters: of each of the checkpoint's tensors that the model takes, what it becomes.
    """

    def __init__(self, model: Any, checkpoint: Checkpoint, key_mapping: Any) -> None:
        self._model = model
        self._checkpoint = checkpoint
        rules = get_model_conversion_mapping(model, key_mapping=key_mapping)
        renamings: list[WeightRenaming] = []
        converters: list[WeightConverter] = []
        self._converters: dict[str, WeightConverter] = {}
        for rule in rules:
            if isinstance(rule, WeightRenaming):
                renamings.append(rule)
            elif isinstance(rule, WeightConverter):
                converters.append(rule)
                self._converters |= dict.fromkeys(rule.source_patterns, rule)
        own = model.state_dict()
        self._sources: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
        self._unit_of: dict[str, str] = {}
        self.parameters: dict[str, list[str]] = {}
        prefix = model.base_model_prefix
        for name in sorted(checkpoint.tensors, key=dot_natural_key):
            renamed, pattern = rename_source_key(name, renamings, converters, prefix, own)
            if renamed not in own and name in own:
                renamed, pattern = rename_source_key(name, [], [], prefix, own)
            if renamed not in own:
                continue
            made = [renamed]
            if pattern is not None:
                targets = self._converters[pattern].target_patterns
                made = [renamed.replace(targets[0], target, 1) for target in targets]
            self._sources[renamed].append((name, pattern))
            self._unit_of |= dict.fromkeys(made, renamed)
            self.parameters[name] = made
        # What transformers writes in the checkpoint's names again, it asks the model for.
        model._weight_conversions = [rule for rule in rules if rule.was_used()]

    def has(self, parameter: str) -> bool:
        """Return whether the checkpoint holds a parameter."""
        return parameter in self._unit_of

    def source(self, parameter: str) -> str:
        """Return the first of the tensors that a parameter is made of."""
        return self._sources[self._unit_of[parameter]][0][0]

    def load(self, parameter: str) -> torch.Tensor:
        """Return a parameter as transformers makes it of the checkpoint, in the stored type."""
        unit = self._unit_of[parameter]
        sources = self._sources[unit]
        first, pattern = sources[0]
        if pattern is None:
            return self._checkpoint.read(first)
        converter = deepcopy(self._converters[pattern])
        for name, of_name in sources:
            assert of_name is not None, "all of a fused parameter's tensors are converted"
            converter.add_tensor(unit, name, of_name, self._checkpoint.read(name))
        value = converter.convert(unit, model=self._model, config=self._model.config)[parameter]
        if isinstance(value, list):
            value = value[0]
        assert isinstance(value, torch.Tensor)
        return value

    def stored(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return parameters that are made together, by the names and shapes of the checkpoint."""
        first = next(iter(values))
        sources = self._sources[self._unit_of[first]]
        if sources[0][1] is None:
            return {sources[0][0]: values[first]}
        back: dict[str, torch.Tensor] = revert_weight_conversion(self._model, values)
        lacking = {name for name, _ in sources} - back.keys()
        assert not lacking, f"transformers writes {sorted(back)} and not {sorted(lacking)}"
        return back
