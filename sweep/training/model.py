"""The frozen base model, ready for adapters: built from random weights straight into 4 bits, or
loaded.

A base depends on a few settings only (`TrialConfig.base`), so that it can stay on the device from
one trial to the next.
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import bitsandbytes as bnb
import torch
from peft import PeftModel, prepare_model_for_kbit_training
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import __version__ as transformers_version
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer, get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError, install_extra
from qlora_sweep.search_spaces.kinds import COMPUTE_DTYPES
from qlora_sweep.search_spaces.linears import READ_BY_CODE
from qlora_sweep.search_spaces.models import WHOLE, ModelSpec
from qlora_sweep.search_spaces.quantized import KEY as STORED_KEY
from qlora_sweep.search_spaces.space import Weights
from qlora_sweep.search_spaces.vision import VISION, whole_config
from qlora_sweep.storage.records import EightBitProducts
from qlora_sweep.sweep.training.eight_bit import (
    EightBitLinear,
    UnfitWeightError,
    compute_in_8_bits,
    half_dtype,
    to_8_bits,
)
from qlora_sweep.sweep.training.experts import (
    Choice,
    give_8_bits,
    hold_all_on_host,
    hold_in_8_bits,
    hold_on_host,
    is_packed,
    pack_experts,
    packed_when_loaded,
    quantized,
    shape_of,
)
from qlora_sweep.sweep.training.host_memory import HostMemoryError
from qlora_sweep.sweep.training.in_trl import add_head
from qlora_sweep.sweep.training.offload import WeightsOnHost
from qlora_sweep.sweep.training.recurrent import refused

LINEAR = (torch.nn.Linear, Conv1D)
_ZERO_AT_FIRST = frozenset({"correct_output_scale", "mm_input_projection_weight"})
"""Parameters that a constructor leaves at zero, by which what is before them is of no account: of
Gemma 3n's embeddings for each layer, of what Gemma 3 sees. A trained model's are others."""
_NEVER = (torch.nn.Embedding, torch.nn.modules.conv._ConvNd)
DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, kind.torch_name) for name, kind in COMPUTE_DTYPES.items()
}
"""Torch's types by the names that settings have for them."""


def compute_type(config: TrialConfig) -> torch.dtype:
    """Return the type that a configuration computes in, beside what it multiplies in 8 bits."""
    return half_dtype() if config.is_8bit_compute else DTYPES[config.compute_dtype]


class Unavailable(Exception):  # noqa: N818 - the name says what is the matter
    """A setting's value needs a package that is not installed here, or not for this device."""

    def __init__(self, setting: str, reason: str) -> None:
        super().__init__(reason)
        self.setting = setting


@dataclass
class BaseModel:
    """A frozen base on the device."""

    config: TrialConfig
    """What shapes it, and nothing else."""
    spec: ModelSpec
    model: PreTrainedModel
    undo: contextlib.ExitStack
    """Takes back what the kernels patched outside the instance."""
    quantized_share: float | None = None
    """Of the weights that are to be in 4 or 8 bits, how many are; None for a 16-bit base."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Of this process; what is sharded gets its weights there with its adapters."""
    seed: int = 0
    """Of the weights, and of what is trained on."""
    on_host: dict[torch.nn.Module, torch.nn.Module] = field(default_factory=dict)
    """Of each module of a base that is to be sharded, the one with its loaded weights; none where
    they are random."""
    is_pretrained: bool = False
    """Whether its weights are a trained model's."""
    eight_bit: EightBitProducts | None = None
    """What 8-bit compute makes of such weights, once that was looked at."""
    layers_left: frozenset[int] = frozenset()
    """Numbers of the decoder layers that are stored in 16 bits among quantized ones."""
    offloaded: WeightsOnHost | None = None
    """The experts' weights that lie on the host; None where none do."""

    def close(self) -> None:
        """Drop the weights and every patch."""
        self.undo.close()
        if self.offloaded is not None:
            self.offloaded.close()
        del self.model
        gc.collect()


def build_base(
    config: TrialConfig, *, spec: ModelSpec, weights: Weights, device: torch.device, seed: int
) -> BaseModel:
    """Put the frozen base on the device; no 16-bit copy of the whole model exists at any time.

    Raises:
        torch.OutOfMemoryError: the base alone passes the budget.
        OSError, ValueError: transformers cannot read or build it.
        InputError: weights that 8 bits cannot hold.
        Unavailable: the attention or the kernels are not installed, or the host has too little
            memory.
    """
    torch.manual_seed(seed)
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as unless_built:
        host: WeightsOnHost | None = None
        try:
            if config.offload_fraction > 0:
                host = WeightsOnHost(device)
                unless_built.callback(host.close)
            with _needing("attention", is_own=config.attention == "flash_attention_2"):
                model = _with_weights(config, spec, weights, device=device, host=host)
                on_host: dict[torch.nn.Module, torch.nn.Module] = {}
                if weights == "pretrained" and config.is_sharded:
                    on_host = _loaded_on_host(model, config, spec)
            if config.is_8bit_compute:
                compute_in_8_bits(model, config.compute_dtype)
        except UnfitWeightError as error:
            raise InputError(f"model '{spec.name}': {error}") from error
        except HostMemoryError as error:
            raise Unavailable("offload_fraction", str(error)) from error
        if device.type == "cuda":
            why = refused(model, torch.cuda.get_device_capability(device))
            if why is not None:
                raise Unavailable("attention", why)
        model.config.use_cache = model.config.get_text_config().use_cache = False
        if config.upcast_fp32:
            upcast(model, config)
        model.requires_grad_(False)
        model.train()
        if config.kernels_kind.fuses_loss:
            with _needing("kernels", cure=install_extra("gpu")):
                _apply_liger(model, config, undo)
        if config.has_head_of_trl:
            with _needing("trainer", cure="TRL 1.16 or newer is needed"):
                add_head(model)
        unless_built.pop_all()
        return BaseModel(
            config.base(),
            spec,
            model,
            undo.pop_all(),
            quantized_share(model, config, spec=spec),
            device,
            seed,
            on_host,
            is_pretrained=weights == "pretrained",
            layers_left=layers_left(model, spec),
            offloaded=host,
        )


def _with_weights(
    config: TrialConfig,
    spec: ModelSpec,
    weights: Weights,
    *,
    device: torch.device,
    host: WeightsOnHost | None,
) -> PreTrainedModel:
    """Return a model with its weights on the device, or what is offloaded of them on the host; of
    one that is to be sharded its shapes alone, as each rank gets its own share."""
    if config.is_sharded:
        return skeleton(config, spec=spec)
    if weights == "random":
        model = skeleton(config, spec=spec)
        for module in model.modules():
            give_weights(module, model, config, device=device, host=host)
        model.tie_weights()
        if host is not None:
            host.open()
        return model
    return load_pretrained(config, spec=spec, device=device, host=host)


def _loaded_on_host(
    model: PreTrainedModel, config: TrialConfig, spec: ModelSpec
) -> dict[torch.nn.Module, torch.nn.Module]:
    """Return for each module of a skeleton the one that is loaded in 16 bits on the host."""
    plain = config.changed(quantization="none")
    whole = load_pretrained(plain, spec=spec, device=torch.device("cpu"))
    return {module: whole.get_submodule(name) for name, module in model.named_modules()}


@contextlib.contextmanager
def _needing(key: str, *, is_own: bool = True, cure: str = "") -> Iterator[None]:
    """Say which setting's value cannot be had where a package of its own is missing."""
    try:
        yield
    except ImportError as error:
        if not is_own:
            raise
        raise Unavailable(key, f"{error}: {cure}" if cure else str(error)) from error


def name_quantizer(model: PeftModel) -> None:
    """Give a base that was built in 4 bits what `from_pretrained` gives one, and Trainer reads."""
    base = model.get_base_model()
    if getattr(base, "is_quantized", False) and getattr(base, "hf_quantizer", None) is None:
        base.hf_quantizer = AutoHfQuantizer.from_config(base.config.quantization_config)


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the decoder layers in order.

    They are the outermost list with as many modules as the config has layers, of one kind or of
    several (a hybrid's). A model that counts otherwise has them in the longest list of modules
    that transformers can checkpoint. Experts may be more than layers, and are neither.
    """
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    longest: list[torch.nn.Module] = []
    root: Any = model
    if model.config.get_text_config() is not model.config:
        # A tower may have as many.
        root = model.get_decoder()
    for module in root.modules():
        if not isinstance(module, torch.nn.ModuleList):
            continue
        layers = list(module)
        if len(layers) == count:
            return layers
        can_checkpoint = all(isinstance(m, GradientCheckpointingLayer) for m in layers)
        if can_checkpoint and len(layers) > len(longest):
            longest = layers
    return longest


def unquantized_layers(model: PreTrainedModel, config: TrialConfig) -> list[str]:
    """Return the names of the decoder layers that the configuration leaves in 16 bits."""
    layers = decoder_layers(model)
    chosen = config.quantized_layers(len(layers))
    left = {id(layer) for index, layer in enumerate(layers) if index not in chosen}
    return [name for name, module in model.named_modules() if id(module) in left]


def layers_left(model: PreTrainedModel, spec: ModelSpec) -> frozenset[int]:
    """Return the numbers of the decoder layers that a checkpoint stores in 16 bits, all of them,
    where it stores others in 4."""
    if spec.stored is None or spec.stored.left is None:
        return frozenset()
    names = {id(module): name for name, module in model.named_modules()}
    patterns = list(spec.stored.left)
    left = set()
    for index, layer in enumerate(decoder_layers(model)):
        linears = [names[id(m)] for m in layer.modules() if isinstance(m, torch.nn.Linear)]
        if not any(should_convert_module(name, patterns) for name in linears):
            left.add(index)
    return frozenset(left)


def quantized_share(
    model: PreTrainedModel, config: TrialConfig, *, spec: ModelSpec | None = None
) -> float | None:
    """Return how many are in 4 or 8 bits of the weights of a base that the configuration, or what
    it is stored as, means to be; None where it means none.

    bitsandbytes replaces `torch.nn.Linear` alone, and `experts` the one tensor that transformers
    keeps all experts of a layer in; linear layers and experts of a class of their own stay in 16
    bits without a word.
    """
    if not config.is_quantized:
        return None
    left = tuple(f"{name}." for name in unquantized_layers(model, config))
    stored: list[str] = []
    if spec is not None and spec.stored is not None:
        stored += spec.stored.left or ()
    count = 0
    total = 0
    for matrix in _matrices(model):
        is_left = not should_convert_module(matrix.name.removesuffix(".weight"), stored)
        if not matrix.name.startswith(left) and not is_left:
            total += matrix.weights
            count += matrix.weights * matrix.is_quantized
    return count / total if total else 1.0


@dataclass(frozen=True)
class _Matrix:
    """A matrix, or the experts of a layer, that QLoRA means to quantize."""

    name: str
    """Of its parameter."""
    weights: int
    is_quantized: bool


def _matrices(model: PreTrainedModel) -> Iterator[_Matrix]:
    """Yield every matrix that QLoRA means to quantize, of a base without adapters.

    Linear layers and experts; embeddings and head never are, as transformers decides. A router or
    the state of a recurrent layer is no matrix here: it is smaller than a square of the hidden
    size, or belongs to a convolution.
    """
    kept = tuple(f"{name}." for name in never_quantized(model))
    square = int(model.config.get_text_config().hidden_size) ** 2
    for path, module in model.named_modules():
        if isinstance(module, _NEVER) or f"{path}.".startswith(kept):
            continue
        parameter: Any
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{path}.{name}"
            if isinstance(module, LINEAR):
                if name == "weight":
                    is_quantized = isinstance(module, bnb.nn.Linear4bit | EightBitLinear)
                    yield _Matrix(full_name, weights_of(module), is_quantized)
            elif is_packed(parameter):
                yield _Matrix(full_name, shape_of(parameter).numel(), is_quantized=True)
            elif parameter.ndim >= 3 or (parameter.ndim == 2 and parameter.numel() > square):
                yield _Matrix(full_name, parameter.numel(), is_quantized=False)


def weights_of(linear: Any) -> int:
    """Return how many weights a linear layer has; packed ones are two in a byte."""
    if isinstance(linear, Conv1D):
        return int(linear.weight.numel())
    return int(linear.in_features * linear.out_features)


def never_quantized(model: PreTrainedModel) -> list[str]:
    """Return the names of what every quantized base has in 16 bits: its head, what the model's own
    code reads, and what sees for it."""
    left = READ_BY_CODE.get(model.config.get_text_config().model_type, ())
    left += _parts_that_see(model)
    names = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in left]
    return [*get_keys_to_not_convert(model), *names]


def vision_pattern(model: PreTrainedModel) -> str | None:
    """Return a pattern of the names of all modules that see for a model's decoder; None of a
    decoder alone."""
    parts = _parts_that_see(model)
    if not parts:
        return None
    return rf"(.*\.)?({'|'.join(parts)})(\..*)?"


def _parts_that_see(model: PreTrainedModel) -> tuple[str, ...]:
    kind = VISION.get(model.config.model_type)
    if kind is None:
        return ()
    return kind.parts


def vision_modules(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the modules that see for a model's decoder, the whole tower first."""
    pattern = vision_pattern(model)
    if pattern is None:
        return []
    return [module for name, module in model.named_modules() if re.fullmatch(pattern, name)]


def _kept_modules(model: PreTrainedModel, config: TrialConfig, spec: ModelSpec) -> list[str]:
    """Return the patterns of what is not quantized, as transformers matches names."""
    if spec.stored is not None and spec.stored.left is not None:
        kept: list[str] = HfQuantizer.get_modules_to_not_convert(
            model, list(spec.stored.left), model._keep_in_fp32_modules
        )
        return kept
    # It takes a pattern for the start of a name, so that layer 1 would match layer 10 too.
    left = [f"{re.escape(name)}\\." for name in unquantized_layers(model, config)]
    return never_quantized(model) + left


def _bnb_config(config: TrialConfig, kept: list[str] | None) -> BitsAndBytesConfig:
    """Return how transformers quantizes a 4-bit base, but for patterns of what stays in 16 bits;
    None leaves those to transformers."""
    return BitsAndBytesConfig(
        llm_int8_skip_modules=kept,
        load_in_4bit=True,
        bnb_4bit_quant_type=config.quantization,
        bnb_4bit_use_double_quant=config.double_quant,
        bnb_4bit_compute_dtype=compute_type(config),
        bnb_4bit_quant_storage=_storage_dtype(config),
    )


def _storage_dtype(config: TrialConfig) -> torch.dtype:
    """Return as what type 4-bit weights lie in memory: bytes, or what FSDP can move."""
    return compute_type(config) if config.is_sharded else torch.uint8


DECODER_KEYS = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^language_model\.model\.": "model.",
    r"^model\.language_model\.": "model.",
}
"""What tensors of a text decoder are called among others, and alone."""


def _load_part(
    name: str, spec: ModelSpec, arguments: dict[str, Any], *, offloaded: Choice
) -> PreTrainedModel:
    """Return the text decoder of a checkpoint that holds more."""
    with packed_when_loaded(offloaded):
        model, found = AutoModelForCausalLM.from_pretrained(
            name,
            key_mapping=DECODER_KEYS,
            output_loading_info=True,
            trust_remote_code=False,
            **arguments,
        )
    for missing in sorted(found["missing_keys"]):
        raise InputError(f"model '{spec.name}': its text decoder's '{missing}' is not in it")
    return model


def _class_of(config: TrialConfig) -> Any:
    """Return what makes a configuration's model: the whole, where rows have images."""
    if config.image_size is None:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def load_pretrained(
    config: TrialConfig,
    *,
    spec: ModelSpec,
    device: torch.device,
    host: WeightsOnHost | None = None,
) -> PreTrainedModel:
    """Return a model loaded as a configuration quantizes it, and computes in.

    Args:
        config: the configuration.
        spec: the model.
        device: where it is put.
        host: takes what is offloaded; needed where anything is.
    """
    arguments = loading_arguments(config, spec=spec, device=device)
    if config.weight_bits == 8:
        # What is rounded to 8 bits goes to the device layer by layer.
        arguments["device_map"] = {"": "cpu"}
    name = str(spec.path) if spec.path is not None else spec.name
    if spec.is_part and config.image_size is None:
        arguments["config"] = architecture_of(spec)
        model = _load_part(name, spec, arguments, offloaded=config.offloaded_layers)
    else:
        auto = _class_of(config)
        with packed_when_loaded(config.offloaded_layers):
            model = auto.from_pretrained(name, **arguments, trust_remote_code=False)
    if config.weight_bits == 8:
        left = never_quantized(model)
        hold_in_8_bits(model, config.quantization, left=left, device=device)
        to_8_bits(model, config.quantization, left=left, device=device)
    if host is not None:
        hold_all_on_host(model, host)
        host.open()
    return model


def loading_arguments(
    config: TrialConfig, *, spec: ModelSpec, device: torch.device
) -> dict[str, Any]:
    """Return what `from_pretrained` is told to load the base, one of 8 bits in 16."""
    common = {
        "dtype": compute_type(config),
        "device_map": {"": device},
        "attn_implementation": config.attention,
    }
    if spec.stored is not None:
        # Weights and constants are as they are stored. What they are multiplied in is not: the
        # config's type is the choice of whoever saved it.
        architecture = architecture_of(spec)
        dtype = str(compute_type(config)).removeprefix("torch.")
        stored = {**spec.config[STORED_KEY], "bnb_4bit_compute_dtype": dtype}
        setattr(architecture, STORED_KEY, stored)
        return {"config": architecture, **common}
    kept = None
    is_partly = config.quantized_count(spec.hidden_layers) < spec.hidden_layers
    leaves_more = is_partly or config.image_size is not None or spec.model_type in READ_BY_CODE
    if config.is_quantized and leaves_more:
        kept = _kept_modules(_plain_skeleton(config, spec=spec), config, spec)
    return {
        "quantization_config": _bnb_config(config, kept) if config.is_4bit else None,
        **common,
    }


def give_weights(
    module: torch.nn.Module,
    model: PreTrainedModel,
    config: TrialConfig,
    *,
    device: torch.device,
    host: WeightsOnHost | None = None,
) -> None:
    """Give a module of a skeleton its own random weights, quantized at once where they are to be,
    so that only one is ever wide, and those of offloaded experts on the host."""
    if isinstance(module, bnb.nn.Linear4bit | EightBitLinear):
        if isinstance(module, EightBitLinear):
            module.hold(_random_weight(module, config=config, device=device))
        else:
            quantize_random(module, config=config, device=device)
        if module.bias is not None:
            bias = torch.zeros(module.out_features, device=device, dtype=compute_type(config))
            module.bias = torch.nn.Parameter(bias, requires_grad=False)
    elif any(map(is_packed, own_tensors(module))):
        _give_experts(module, config, device=device)
        if host is not None and module.is_on_host:
            hold_on_host(module, host)
    elif list(own_tensors(module)):
        module.to_empty(device=device, recurse=False)
        fill_module(model, module)


def _give_experts(experts: torch.nn.Module, config: TrialConfig, *, device: torch.device) -> None:
    """Give experts of a skeleton random weights in 4 or 8 bits, one product's after the other, and
    biases of zero."""
    dtype = compute_type(config)
    parameter: Any
    for name, parameter in list(experts.named_parameters(recurse=False)):
        if is_packed(parameter):
            wide = torch.empty(shape_of(parameter), device=device, dtype=dtype).normal_(0.0, 0.02)
            if config.weight_bits == 8:
                give_8_bits(experts, name, wide)
            else:
                setattr(experts, name, quantized(wide, parameter, device))
            del wide
        else:
            bias = torch.zeros(parameter.shape, device=device, dtype=dtype)
            setattr(experts, name, torch.nn.Parameter(bias, requires_grad=False))


def take_weights(
    module: torch.nn.Module, whole: torch.nn.Module, config: TrialConfig, *, device: torch.device
) -> None:
    """Give a module of a skeleton the weights of the same one on the host, quantized at once where
    they are to be."""
    named = list(whole.named_buffers(recurse=False))
    named += whole.named_parameters(recurse=False)
    for name, tensor in named:
        if name == "weight" and isinstance(module, bnb.nn.Linear4bit):
            _quantize(module, tensor.detach(), config=config, device=device)
            continue
        if is_packed(getattr(module, name)):
            setattr(module, name, quantized(tensor.detach(), getattr(module, name), device))
            continue
        value = tensor.detach().to(device, copy=True)
        if isinstance(tensor, torch.nn.Parameter):
            value = torch.nn.Parameter(value, requires_grad=False)
        setattr(module, name, value)


def own_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield a module's own parameters and buffers."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def fill_module(model: PreTrainedModel, module: torch.nn.Module) -> None:
    """Give a module's own tensors finite values, also those that `_init_weights` leaves alone.

    Some get theirs where the module is made, which happens on the meta device here: what is left of
    other programs in their memory would make the loss infinite now and then.
    """
    for tensor in own_tensors(module):
        if tensor.dim() > 1 and tensor.is_floating_point():
            torch.nn.init.normal_(tensor, std=0.02)
        else:
            torch.nn.init.ones_(tensor)
    # A model within the model has a way of its own for its own tensors, as in transformers.
    if isinstance(module, PreTrainedModel):
        model = module
    model._init_weights(module)
    for name, parameter in module.named_parameters(recurse=False):
        if name in _ZERO_AT_FIRST:
            torch.nn.init.ones_(parameter)


def skeleton(config: TrialConfig, *, spec: ModelSpec) -> PreTrainedModel:
    """Return the base's modules on the meta device: right types, shapes and dtypes, no data."""
    model = _plain_skeleton(config, spec=spec)
    if config.is_4bit:
        quantization = _bnb_config(config, None)
        kept = _kept_modules(model, config, spec)
        with torch.device("meta"):
            model = replace_with_bnb_linear(
                model, modules_to_not_convert=kept, quantization_config=quantization
            )
        pack_experts(
            model,
            quant_type=config.quantization,
            double_quant=config.double_quant,
            left=kept,
            offloaded=config.offloaded_layers,
        )
        # What `from_pretrained` says of a model it quantized; PEFT and accelerate ask for it.
        model.is_loaded_in_4bit = model.is_quantized = True
        model.quantization_method = quantization.quantization_method()
        model.config.quantization_config = quantization
    if config.weight_bits == 8:
        left = never_quantized(model)
        hold_in_8_bits(model, config.quantization, left=left)
        to_8_bits(model, config.quantization, left=left)
    return model


def architecture_of(spec: ModelSpec, *, sees: bool = False) -> PretrainedConfig:
    """Return a model's config as transformers reads it.

    Args:
        spec: a decoder.
        sees: whether what sees for it is there too.

    Raises:
        InputError: transformers has no decoder of its type, or it is one of several models.
    """
    if sees:
        values = whole_config(spec)
    else:
        values = dict(spec.config)
        values.pop(WHOLE, None)
    kind = values.pop("model_type")
    code = "code that a model brings is never run (trust_remote_code is never on)"
    if kind not in CONFIG_MAPPING_NAMES:
        raise InputError(
            f"model type '{kind}' is none that transformers {transformers_version} has, and {code}"
        )
    architecture = AutoConfig.for_model(kind, **values)
    if sees:
        return architecture
    text = architecture.get_text_config()
    if text is not architecture:
        # The sizes at the top level of a config of several models would not be the decoder's.
        raise InputError(
            f"model type '{spec.model_type}' is a multimodal model; only text decoders can be "
            f"trained: give its text_config as a model of its own, with model_type "
            f"'{text.model_type}'"
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InputError(
            f"model type '{kind}' has no decoder for text in transformers {transformers_version}, "
            f"and {code}"
        )
    return architecture


def _plain_skeleton(config: TrialConfig, *, spec: ModelSpec) -> PreTrainedModel:
    """Return the same with nothing quantized.

    Raises:
        InputError: the model is no text decoder.
    """
    architecture = architecture_of(spec, sees=config.image_size is not None)
    with torch.device("meta"):
        return _class_of(config).from_config(
            architecture,
            dtype=compute_type(config),
            attn_implementation=config.attention,
            trust_remote_code=False,
        )


def upcast(model: PreTrainedModel, config: TrialConfig) -> None:
    """Put a decoder's norms, embeddings, biases and head in fp32, and leave the frozen matrices and
    what sees for it as they are.

    PEFT's function does that for a 4-bit base; it would widen the matrices that are in 16 bits too.
    """
    tower = vision_modules(model)
    if config.is_quantized and not tower and not unquantized_layers(model, config):
        prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        return
    matrices = {matrix.name for matrix in _matrices(model)}
    of_tower = {id(own) for module in tower for own in module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        if name not in matrices and id(parameter) not in of_tower:
            parameter.data = parameter.data.to(torch.float32)


def quantize_random(
    module: bnb.nn.Linear4bit, *, config: TrialConfig, device: torch.device
) -> None:
    """Give a linear layer random 16-bit weights and quantize them at once, so that only one is ever
    wide.
    """
    weight = _random_weight(module, config=config, device=device)
    _quantize(module, weight, config=config, device=device)


def _quantize(
    module: bnb.nn.Linear4bit, weight: torch.Tensor, *, config: TrialConfig, device: torch.device
) -> None:
    module.weight = bnb.nn.Params4bit(
        weight,
        requires_grad=False,
        compress_statistics=config.double_quant,
        quant_type=config.quantization,
        quant_storage=_storage_dtype(config),
        module=module,
    ).to(device)


def _random_weight(
    module: torch.nn.Linear, *, config: TrialConfig, device: torch.device
) -> torch.Tensor:
    shape = (module.out_features, module.in_features)
    return torch.empty(shape, device=device, dtype=compute_type(config)).normal_(0.0, 0.02)


def _apply_liger(model: PreTrainedModel, config: TrialConfig, undo: contextlib.ExitStack) -> None:
    """Apply Liger's kernels to the instance; it also patches the modelling module."""
    # Triton, which Liger needs, is not there on a CPU-only machine.
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    modelling = vars(sys.modules[type(model).__module__])
    undo.callback(modelling.update, dict(modelling))
    # A decoder's norms are of another kind; those of a tower stay what they are.
    kernels = {"layer_norm": False, **(config.kernels_kind.in_liger or {})}
    if config.has_head_of_trl:
        kernels["fused_linear_cross_entropy"] = False
    _apply_liger_kernel_to_instance(model=model, **kernels)
