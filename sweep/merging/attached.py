"""Which of a checkpoint's models an adapter belongs to, and the adapter put on it by PEFT."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, load_peft_weights
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from qlora_sweep.search_spaces.errors import InputError, did_you_mean, words_of
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.sweep.training.experts import adapt_experts, show_shapes
from qlora_sweep.sweep.training.model import DECODER_KEYS

PREFIX = "base_model.model."
FAULTS = (
    ValueError,
    RuntimeError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    AssertionError,
    ImportError,
)
"""What PEFT raises for an adapter that does not fit a model, or that it cannot build."""


_OTHER_TASKS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "SEQ_2_SEQ_LM")


@dataclass(frozen=True)
class Form:
    """One of the models that a checkpoint can be loaded as."""

    config: Any
    auto: Any
    key_mapping: Mapping[str, str] | None = None
    """Of the checkpoint's names, for a text decoder that is stored beside a vision tower."""

    def skeleton(self) -> Any:
        """Return the model without weights, its parameters on the meta device."""
        with torch.device("meta"):
            return self.auto.from_config(self.config, dtype=torch.float32)

    def load(self, base: Path, *, dtype: torch.dtype, device: str) -> Any:
        """Return the model with its weights and the attention that transformers picks for it."""
        return self.auto.from_pretrained(
            base,
            config=self.config,
            key_mapping=self.key_mapping,
            dtype=dtype,
            device_map={"": device},
            trust_remote_code=False,
        )


def forms_of(base: Path) -> Iterator[Form]:
    """Yield the models that a checkpoint can be loaded as; what `sweep train` trains comes first.

    An adapter of a vision-language model may be of the whole, or of its text decoder alone.
    """
    spec = load_model_spec(str(base))
    if spec.is_part:
        decoder = AutoConfig.for_model(**spec.config)
        yield Form(decoder, AutoModelForCausalLM, DECODER_KEYS)
    # Adapters of embedding models are of a model without its head.
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel):
        config = AutoConfig.from_pretrained(base, trust_remote_code=False)
        if type(config) in auto._model_mapping:
            yield Form(config, auto)


class Adapter:
    """What PEFT saved in a directory.

    Attributes:
        config: PEFT's configuration of it.
        tensors: by the names that PEFT saves them by.

    Raises:
        InputError: PEFT cannot read it, or it is of a kind that is not in the weights.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            self.config: Any = PeftConfig.from_pretrained(str(directory))
            stored = load_peft_weights(str(directory), device="cpu")
        except FAULTS as error:
            raise InputError(f"PEFT cannot read the adapter: {words_of(error)}") from error
        self.kind = self.config.peft_type.value
        if self.config.is_prompt_learning or self.config.is_adaption_prompt:
            raise InputError(
                f"the adapter is {self.kind}: it adds to a model's inputs, not to its weights, and "
                "cannot be merged; load base and adapter with PEFT"
            )
        if self.config.task_type in _OTHER_TASKS:
            raise InputError(
                f"the adapter's task_type is {self.config.task_type}: its model ends in another "
                "head than a language model's, and is not merged; load base and adapter with PEFT"
            )
        self.tensors = {}
        for name, tensor in stored.items():
            if ".original_module." not in name:
                # PEFT keeps its part in fp32 beside a base of 16 bits, too.
                wide = tensor.float() if tensor.is_floating_point() else tensor
                self.tensors[_saved_name(name)] = wide

    def attach(self, model: Any, *, is_hollow: bool = False, **changes: Any) -> PeftModel:
        """Return a model with this adapter on it, ready to compute.

        Args:
            model: the base.
            is_hollow: its parameters take no memory, so that PEFT does not look at them.
            changes: to PEFT's configuration of the adapter.

        Raises:
            InputError: it does not fit the model.
        """
        config: Any = PeftConfig.from_pretrained(str(self.directory))
        # The path that the adapter names is not where the base is now.
        config.base_model_name_or_path = None
        for key, value in changes.items():
            setattr(config, key, value)
        tensors = self._tensors_of(model)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                show_shapes(model)
                peft = get_peft_model(model, config, low_cpu_mem_usage=is_hollow)
                adapt_experts(peft)
                found = set_peft_model_state_dict(peft, tensors, low_cpu_mem_usage=is_hollow)
        except FAULTS as error:
            raise InputError(f"PEFT cannot put the adapter on this base: {_why(error)}") from error
        if found.unexpected_keys:
            target = found.unexpected_keys[0].removeprefix(PREFIX).replace(".default", "")
            hint = did_you_mean(target, [name for name, _ in model.named_parameters()])
            raise InputError(f"the adapter changes '{target}', which the base does not hold{hint}")
        peft.eval()
        return peft

    def vocabulary(self, model: Any) -> int | None:
        """Return how many tokens the adapter's embedding or head has; None if it holds neither."""
        names = {id(module): name for name, module in model.named_modules()}
        axes: dict[str, int] = {}
        if (embedding := model.get_input_embeddings()) is not None:
            path = names[id(embedding)]
            axes |= {f"{path}.weight": 0, f"{path}.base_layer.weight": 0}
            axes |= {f"{path}.lora_embedding_A": 1}
        if (head := model.get_output_embeddings()) is not None:
            path = names[id(head)]
            axes |= {f"{path}.weight": 0, f"{path}.base_layer.weight": 0}
            axes |= {f"{path}.lora_B.weight": 0}
        tensors = self._tensors_of(model)
        for name, axis in axes.items():
            if (tensor := tensors.get(PREFIX + name)) is not None:
                return int(tensor.shape[axis])
        return None

    def _tensors_of(self, model: Any) -> dict[str, torch.Tensor]:
        """Return the tensors by the names that the model's modules have now.

        In transformers 4 the parts of vision-language models had others. PEFT 0.21 renames some of
        them, and none that is whole (`modules_to_save`).
        """
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        modules = {path for path, _ in model.named_modules()}
        found = {}
        for name, tensor in self.tensors.items():
            own = name.removeprefix(PREFIX)
            path = own.rpartition(".lora_")[0] or own.rpartition(".")[0]
            renamed, _ = rename_source_key(path, renamings, [])
            if path not in modules and renamed in modules:
                name = f"{PREFIX}{renamed}{own.removeprefix(path)}"
            found[name] = tensor
        return found


def _why(error: Exception) -> str:
    """Return what an error says; below its first line torch lists tensors of other sizes."""
    lines = str(error).splitlines()
    if len(lines) > 1 and "size mismatch" in lines[1]:
        return f"{lines[1].strip()} Name the base that it was trained on with --model"
    return words_of(error)


def _saved_name(name: str) -> str:
    """Return the name that PEFT saves a tensor by, of one in the model's own state dict."""
    # PEFT 0.21 writes a whole module's copy by this name where it saves embeddings as well.
    name = name.replace(".modules_to_save.", ".")
    parts = name.split(".")
    if "default" in parts[1:] and "default" not in parts[:1]:
        parts.remove("default")
    return ".".join(parts)


def resize(model: Any, rows: int | None) -> None:
    """Give a model so many tokens."""
    if rows is None or rows == model.get_input_embeddings().weight.shape[0]:
        return
    model.resize_token_embeddings(rows, mean_resizing=False)


def is_target(module: torch.nn.Module) -> bool:
    """Return whether PEFT wrapped a module of the base."""
    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def base_of(module: Any) -> Any:
    """Return the base's own module of one that PEFT may have wrapped."""
    while is_target(module):
        if isinstance(module, BaseTunerLayer):
            module = module.get_base_layer()
        else:
            module = getattr(module, "original_module", None) or module.token_adapter
    return module
