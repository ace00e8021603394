"""An adapter added to its base by PEFT, one module after the other, in the base's own files."""

from __future__ import annotations

import json
import shutil
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from safetensors import SafetensorError
from safetensors.torch import save_file

from qlora_sweep.search_spaces.checkpoints import INDEX
from qlora_sweep.search_spaces.documents import read_json
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, quote, words_of
from qlora_sweep.sweep.json_child import Say
from qlora_sweep.sweep.merging.attached import (
    FAULTS,
    Adapter,
    Form,
    base_of,
    forms_of,
    is_target,
    resize,
)
from qlora_sweep.sweep.merging.checkpoint import Checkpoint, Names
from qlora_sweep.sweep.training.model import DTYPES

_TIED = "tie_word_embeddings"
_STREAMED = {"LORA", "ADALORA", "IA3", "LOHA", "LOKR", "LN_TUNING", "TRAINABLE_TOKENS"}
"""Kinds that PEFT puts on a model without looking at its weights. For the others the base is in
memory, in fp32."""
_REPEATED = ("pissa", "olora", "loftq")
"""Values of `init_lora_weights` that change the base before the training, by a rule that PEFT
applies again when it loads the adapter."""
_CHANGED = ("pissa_niter", "corda", "lora_ga")
"""Beginnings of those that change it by chance or by data, which no adapter holds."""


class Merge:
    """What an adapter makes of a base, tensor by tensor.

    Attributes:
        dtype: of the merged model; the base's own 16-bit type where None is given.
        checkpoint: the base's files.
        form_index: as which of `forms_of` the checkpoint is loaded.
        targets: the modules that PEFT wrapped, by name.
        replaced: parameters that the adapter holds in full, by name.
        notes: what a person is to know of the merged model.

    Raises:
        InputError: the two do not belong together.
    """

    form_index: int
    targets: list[str]
    replaced: dict[str, torch.Tensor]
    _target_of: dict[str, str]
    """Of each of the base's parameters in a module that PEFT wrapped, that module."""

    def __init__(self, adapter: Path, base: Path, *, dtype: str | None = None) -> None:
        self._config = read_json(base / "config.json", label=f"{base}/config.json")
        self._adapter = Adapter(adapter)
        self._init = _init_of(self._adapter)
        self.checkpoint = Checkpoint(base)
        self.dtype = dtype or "bf16"
        if dtype is None and self.checkpoint.stored == torch.float16:
            self.dtype = "fp16"
        self.notes: list[str] = []
        self._is_untied = False
        self._merged: dict[str, torch.Tensor] = {}
        self._written: dict[str, torch.Tensor] = {}
        fault: InputError | None = None
        for index, form in enumerate(forms_of(base)):
            self.form_index = index
            try:
                self._attach(form)
            except InputError as error:
                # The first form is the one that `sweep train` trains: its fault is said.
                fault = fault or error
            else:
                return
        raise fault or InputError(f"base '{base}' holds no causal language model")

    def _attach(self, form: Form) -> None:
        """Put the adapter on one of the checkpoint's models, and find what it changes."""
        model = form.skeleton()
        self._names = Names(model, self.checkpoint, form.key_mapping)
        self._resize(model)
        self._find_tied(model)
        self._is_streamed = self._adapter.kind in _STREAMED
        self._make_hollow(model)
        parameters = model.named_parameters(remove_duplicate=False)
        self._parameters: dict[str, torch.nn.Parameter] = dict(parameters)
        self._target_of = {}
        self.replaced = {}
        if not self._is_streamed:
            self._load_into(name for name in self._parameters if self._source(name) is not None)
        changes = {}
        if self._init is not None:
            changes["init_lora_weights"] = True
        peft = self._adapter.attach(model, is_hollow=self._is_streamed, **changes)
        self._base: Any = peft.get_base_model()
        self._find_targets()
        self._find_replaced()
        # Before that it was not known what the adapter holds in full.
        self.notes.clear()
        for name in self._target_of | self.replaced:
            if self._source(name) is None:
                raise InputError(f"the adapter changes '{name}', which the base does not hold")

    def _resize(self, model: Any) -> None:
        """Give a model the adapter's vocabulary, where that is another one than the base's."""
        self._vocabulary = self._adapter.vocabulary(model)
        self._resized_names: set[str] = set()
        if self._vocabulary == model.get_input_embeddings().weight.shape[0]:
            self._vocabulary = None
        if self._vocabulary is None:
            return
        resize(model, self._vocabulary)
        resized = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
        for path, module in model.named_modules():
            if id(module) in resized:
                self._resized_names |= {f"{path}.{name}" for name, _ in module.named_parameters()}

    def _load_into(self, names: Iterable[str]) -> None:
        """Give parameters of the model their memory, with the base's weights in fp32."""
        for name in names:
            self._parameters[name].data = self._load(name).clone()

    def _find_tied(self, model: Any) -> None:
        """Find the parameters that are one and the same."""
        groups: dict[int, list[str]] = defaultdict(list)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            groups[id(parameter)].append(name)
        self._tied: dict[str, list[str]] = {}
        for names in groups.values():
            self._tied |= dict.fromkeys(names, names)

    def _make_hollow(self, model: Any) -> None:
        """Give a model parameters that have a shape and no memory, tied as they were unless each
        is to have memory."""
        made: dict[int, torch.nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                hollow = made.get(id(parameter))
                if hollow is None or not self._is_streamed:
                    hollow = torch.nn.Parameter(_hollow(parameter.shape), requires_grad=False)
                    made[id(parameter)] = hollow
                setattr(module, name, hollow)

    def _find_targets(self) -> None:
        """Find the outermost modules that PEFT wrapped and the adapter has something for."""
        self.targets = []
        outermost: tuple[str, ...] = ()
        for path, module in self._base.named_modules():
            if not is_target(module) or path.startswith(outermost):
                continue
            outermost += (f"{path}.",)
            if not any(parameter.is_meta for parameter in module.parameters()):
                self.targets.append(path)
                self._target_of |= dict.fromkeys(self._names_in(path), path)

    def _names_in(self, path: str) -> list[str]:
        """Return the base's parameters in one of its modules."""
        return [name for name in self._parameters if name.startswith(f"{path}.")]

    def _find_replaced(self) -> None:
        """Find the base's parameters that the adapter has in full, and those that are tied to
        one."""
        for name, parameter in self._parameters.items():
            path, _, leaf = name.rpartition(".")
            module: Any = self._base
            for part in path.split("."):
                module = getattr(base_of(module), part)
            tensor = getattr(base_of(module), leaf)
            if tensor is not parameter:
                # PEFT adds to the one on the model in its place.
                self.replaced[name] = tensor.detach().clone()
        for name in list(self.replaced):
            for other in self._tied[name]:
                self.replaced.setdefault(other, self.replaced[name])

    def _source(self, name: str) -> str | None:
        """Return a parameter's name, or that of one tied to it, that the base's files hold."""
        if self._names.has(name):
            return name
        return next(filter(self._names.has, self._tied[name]), None)

    def _is_held_whole(self, name: str) -> bool:
        """Whether the adapter has a module's own copy (`modules_to_save`), and the base's is not
        used."""
        path = self._target_of.get(name)
        return path is not None and isinstance(self._base.get_submodule(path), ModulesToSaveWrapper)

    # Weights.

    def _load(self, name: str) -> torch.Tensor:
        """Return what a parameter is before anything is added to it, in fp32."""
        if name in self.replaced:
            return self.replaced[name].float()
        source = self._source(name)
        assert source is not None, "what the adapter changes is in the base"
        tensor = self._names.load(source).float()
        if name not in self._resized_names:
            return tensor
        assert self._vocabulary is not None
        lacking = self._vocabulary - tensor.shape[0]
        if lacking <= 0:
            return tensor[: self._vocabulary]
        if not self._is_held_whole(name):
            note = (
                f"{name}: neither the base nor the adapter holds the last {lacking} of its "
                f"{self._vocabulary} tokens, which are the mean of the others now"
            )
            if note not in self.notes:
                self.notes.append(note)
        mean = tensor.mean(dim=0, keepdim=True)
        return torch.cat([tensor, mean.expand(lacking, *tensor.shape[1:])])

    def _merge(self, path: str) -> None:
        """Have PEFT merge one module, in fp32; only one is in memory."""
        names = self._names_in(path)
        if self._is_streamed:
            self._load_into(names)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                merged = self._unloaded(self._base.get_submodule(path))
        except FAULTS as error:
            raise InputError(
                f"PEFT cannot merge the adapter's '{path}' ({self._adapter.kind}): "
                f"{words_of(error)}; load base and adapter with PEFT"
            ) from error
        for name, parameter in merged.named_parameters():
            full = f"{path}.{name}"
            self._merged[full] = self._narrow(full, parameter.detach())
        if self._is_streamed:
            for name in names:
                self._parameters[name].data = _hollow(self._parameters[name].shape)

    def _unloaded(self, module: Any) -> Any:
        """Return the base's module of a wrapped one, with the adapter merged into it by PEFT."""
        if self._init is not None and isinstance(module, LoraLayer):
            self._begin_as_trained(module)
        if hasattr(module, "unload_and_optionally_merge_module"):
            return module.unload_and_optionally_merge_module(
                merge=True, safe_merge=False, adapter_names=None
            )
        module.merge()
        return module.get_base_layer()

    def _begin_as_trained(self, layer: Any) -> None:
        """Change a layer's base weight as it was changed before the training."""
        if "default" not in layer.lora_A:
            return
        trained = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        kept = [weight.data for weight in trained]
        match self._init:
            case "pissa":
                layer.pissa_init("default", "pissa")
            case "olora":
                layer.olora_init("default")
            case "loftq":
                layer.loftq_init("default", self._adapter.config)
        for part, weight in zip((layer.lora_A, layer.lora_B), kept, strict=True):
            part["default"].weight.data = weight

    def _value(self, name: str) -> torch.Tensor:
        """Return a parameter of the merged model, in the type that it is written in."""
        path = self._target_of.get(name)
        if path is None:
            return self._narrow(name, self._load(name))
        if name not in self._merged:
            self._merge(path)
        return self._merged.pop(name)

    def _is_changed(self, name: str) -> bool:
        return name in self._target_of or name in self.replaced or name in self._resized_names

    def _narrow(self, name: str, wide: torch.Tensor) -> torch.Tensor:
        if not wide.is_floating_point():
            return wide
        narrow = wide.to(DTYPES[self.dtype]).contiguous()
        if self.dtype == "fp16" and not torch.isfinite(narrow).all() and wide.isfinite().all():
            raise InputError(f"'{name}' has weights too large for fp16: merge with --dtype bf16")
        return narrow

    def _stored(self, name: str) -> torch.Tensor:
        """Return one of the merged model's tensors, by the name that it has in the files."""
        if name in self._written:
            return self._written.pop(name)
        parameters = self._names.parameters.get(name, [])
        if not any(self._is_changed(parameter) for parameter in parameters):
            tensor = self.checkpoint.read(name)
            # The few tensors that a 16-bit base keeps in fp32 stay so.
            if tensor.dtype == torch.float32 and self.checkpoint.stored != torch.float32:
                return tensor
            return self._narrow(name, tensor)
        values = {parameter: self._value(parameter) for parameter in parameters}
        self._written |= self._names.stored(values)
        return self._written.pop(name)

    # Files.

    def write(self, directory: Path, say: Say = lambda _: None) -> int:
        """Write the merged weights, their index and config; return the bytes of the weights.

        Raises:
            InputError: PEFT cannot merge a module, or a weight is too large for the type.
            EnvironmentFault: the disk has no room.
        """
        files = self.checkpoint.files
        total = sum(tensor.nbytes for tensor in self.checkpoint.tensors.values())
        # Merged, most tensors have two bytes a number.
        needed = total * 2 // self.checkpoint.stored.itemsize
        if shutil.disk_usage(directory).free < needed:
            short = f"takes {needed / 2**30:.1f} GiB, and its disk has not as much free"
            raise EnvironmentFault(f"--output: the merged model {short}: nothing was written")
        done = 0
        written = 0
        weight_map: dict[str, str] = {}
        for file, stored in files.items():
            tensors: dict[str, torch.Tensor] = {}
            for name in stored:
                tensors[name] = self._stored(name)
                done += stored[name].nbytes
                say({"merged": done, "of": total})
            tensors |= self._parted(tensors)
            try:
                save_file(tensors, directory / file, metadata={"format": "pt"})
            except SafetensorError as error:
                raise EnvironmentFault(f"--output: {file} cannot be written: {error}") from error
            written += sum(tensor.nbytes for tensor in tensors.values())
            weight_map |= dict.fromkeys(tensors, file)
            self.checkpoint.close()
        documents: dict[str, Any] = {"config.json": self._merged_config()}
        if len(files) > 1:
            documents[INDEX] = {"metadata": {"total_size": written}, "weight_map": weight_map}
        for document, values in documents.items():
            text = json.dumps(values, indent=2, sort_keys=True) + "\n"
            (directory / document).write_text(text, encoding="utf-8")
        return written

    def _parted(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what was tied to one of a file's tensors, and is another one now."""
        found: dict[str, torch.Tensor] = {}
        for stored, tensor in tensors.items():
            for name in self._names.parameters.get(stored, []):
                for other in self._tied.get(name, ()):
                    is_changed = self._is_changed(name) or self._is_changed(other)
                    if other == name or not is_changed:
                        continue
                    if self._names.has(other):
                        self._is_untied = True
                        continue
                    value = self._value(other)
                    if not torch.equal(value, tensor):
                        self._is_untied = True
                        found[other] = value
        return found

    def _merged_config(self) -> dict[str, Any]:
        """Return the base's config with what the adapter changed of it."""
        config = self._config | {"dtype": str(DTYPES[self.dtype]).removeprefix("torch.")}
        config.pop("torch_dtype", None)
        parts = [config]
        for key in ("text_config", "llm_config"):
            if isinstance(config.get(key), dict):
                config[key] = dict(config[key])
                parts.append(config[key])
        for part in parts:
            if self._is_untied:
                part[_TIED] = False
            has_vocabulary = part is parts[-1] or "vocab_size" in part
            if self._vocabulary is not None and has_vocabulary:
                part["vocab_size"] = self._vocabulary
        return config


def _hollow(shape: torch.Size) -> torch.Tensor:
    """Return a tensor of a shape that takes no memory."""
    return torch.zeros(()).expand(shape)


def _init_of(adapter: Adapter) -> str | None:
    """Return how an adapter's base was changed before the training; None where it was not.

    Raises:
        InputError: in a way that cannot be repeated.
    """
    init = getattr(adapter.config, "init_lora_weights", None)
    if not isinstance(init, str):
        return None
    if init.lower().startswith(_CHANGED):
        raise InputError(
            f"adapter_config.json: init_lora_weights {quote(init)} changed the base before the "
            "training, and the adapter does not say how: save it with PEFT's "
            "path_initial_model_for_weight_conversion, and merge that"
        )
    if init.lower() in _REPEATED:
        return init.lower()
    return None
