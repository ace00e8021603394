"""What is forbidden before anything runs: rules between a configuration, a model and a GPU.

Each rule is a small function with its reason. What does not fit is no rule's business. That one
dtype should rule outside and inside (a model loaded in float16 under bfloat16 compute silently
trains float16 adapters) needs no rule: a configuration has only one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qlora_sweep.search_spaces.config import Attention, TrialConfig, as_typed
from qlora_sweep.search_spaces.errors import did_you_mean
from qlora_sweep.search_spaces.kinds import (
    AMPERE,
    DEVICES,
    SHARDED_OPTIMIZER,
    TURING,
    VOLTA,
    DeviceName,
)
from qlora_sweep.search_spaces.linears import (
    expert_layers,
    has_adapted_experts,
    has_experts,
    known_linear_modules,
    linear_shapes,
    target_sets,
    types,
    unquantized,
)
from qlora_sweep.search_spaces.models import SCORE_CAP, ModelSpec
from qlora_sweep.search_spaces.recurrent import is_stateful, needed_package
from qlora_sweep.search_spaces.trainers import GRPO, trainer_of
from qlora_sweep.search_spaces.vision import not_of_images

LIGER_MODEL_TYPES = types(
    """
    deepseek_v2 deepseek_v3 exaone4 falcon_h1 gemma gemma2 gemma3_text glm4 gpt_oss
    hunyuan_v1_dense hunyuan_v1_moe llama llama4_text ministral mistral mixtral nemotron olmo2 olmo3
    phi3 qwen2 qwen3 qwen3_5_text qwen3_moe smollm3
    """
)
"""Text decoders that liger-kernel 0.8.5 patches, fused loss included (its `monkey_patch` table)."""
_LIGER_LOSS_ALONE = types("qwen3_5_text")
"""Those of them for which it has no rotary embedding, so that its loss alone is used."""
WITHOUT_SDPA = types(
    """
    big_bird bloom codegen cpmant deepseek_v4 falcon_mamba git gpt_neo gpt_neox_japanese gpt_oss
    gptj granite_swa granitemoe_swa hy_v4 mamba mamba2 megatron-bert mimo_v2_flash mpt openai-gpt
    reformer rembert roformer rwkv trocr xglm xlm xlnet xlstm
    """
)
"""Decoders that transformers 5.17 runs with eager attention, and not with torch's."""
WITHOUT_FLASH = types(
    """
    axk2 big_bird bloom blt codegen cpmant deepseek_v32 deepseek_v4 doge falcon_mamba git
    glm_moe_dsa gpt_neox_japanese gpt_oss granite_swa granitemoe_swa hy_v4 inkling_text llama4_text
    mamba mamba2 megatron-bert mimo_v2_flash minimax_m3_vl_text mpt openai-gpt qwen4_exp_text
    reformer rembert roformer rwkv trocr xglm xlm xlnet xlstm
    """
)
"""Decoders that transformers 5.17 does not run with FlashAttention-2, or with another kernel in its
place, as it has no attention sinks."""
_SCORE_CAPS = dict.fromkeys(("gemma2", "vaultgemma"), 50.0)
"""The cap of attention's scores of types that have one where the config does not say."""
WITHOUT_CHECKPOINTING = types("cpmant ctrl gpt_neox_japanese jetmoe openai-gpt reformer xlm xlnet")
"""Decoders whose layers transformers 5.17 cannot checkpoint."""

_HANDS_ON_MORE = types("gemma3n_text zamba zamba2 zaya")
"""Decoders whose layers get a second tensor that needs a gradient, or share what they keep."""
_MORE_OF_A_LAYER = ("hidden_size_per_layer_input", "num_kv_shared_layers")
"""What gives Gemma 4's such."""

OVERFLOWS_FP16 = types("gemma2 gemma3_text")
"""Decoders whose activations pass the largest number of fp16 (65,504), so that a loss in fp16 is
often no number: Gemma 2 and 3 were trained in bf16 and have far larger ones."""

WITHOUT_8_BIT_COMPUTE = types("gemma3n_text")
"""Decoders whose own code changes a linear layer's output in place, which torch does not allow of a
product that has a gradient of its own."""

MISNAMED = "unknown-target-module"
"""The rule against what is not there under its name."""
STORED = "stored-quantization"
"""The rule against training quantized weights as others than they are stored."""
EIGHT_BIT_MULTIPLE = 16
"""Both widths of a matrix are multiples of it (cuBLASLt: 16 bytes)."""


CHANGES_LOGITS = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier",
)
"""What configs call what happens to logits behind the head."""


@dataclass(frozen=True)
class Violation:
    """A configuration that cannot be run as it says, and why."""

    rule: str
    """Name of the rule."""
    reason: str
    """One sentence for a person."""


@dataclass(frozen=True)
class Setting:
    """What a configuration would run on."""

    model: ModelSpec
    device: DeviceName
    compute_capability: tuple[int, int] | None
    """Of the GPU; None on a CPU, or where it is not known."""
    has_dataset: bool = False
    """Whether it would train on a dataset; on full-length random sequences elsewhere."""

    @property
    def is_on_gpu(self) -> bool:
        """Whether it is a GPU."""
        return DEVICES[self.device].is_gpu

    def older_than(self, capability: tuple[int, int]) -> bool:
        """Whether the GPU is known to be older than ``capability``."""
        return self.compute_capability is not None and self.compute_capability < capability

    def lacks(self, since: tuple[int, int] | None, what: str, instead: str) -> str | None:
        """Return that ``what`` needs a newer GPU, where this one is known to be older."""
        if since is None or self.compute_capability is None or not self.older_than(since):
            return None
        needed = ".".join(map(str, since))
        if since == AMPERE:
            needed += " (Ampere)"
        has = ".".join(map(str, self.compute_capability))
        return f"{what} needs compute capability {needed}, this GPU has {has}: use {instead}"


def torch_for(capability: tuple[int, int] | None) -> str | None:
    """Return which torch runs on a GPU that most of its builds have left behind; None elsewhere, or
    where the GPU is not known.

    Of torch 2.11 to 2.14 the builds for CUDA 12.6 alone have kernels for what is older than Turing,
    and 2.15 is to be without these builds (pytorch/pytorch, issues 172352, 178665 and 190385).
    """
    if capability is None or capability >= TURING:
        return None
    has = ".".join(map(str, capability))
    return (
        "of torch 2.11 to 2.14 only the builds for CUDA 12.6 (from pytorch.org) have kernels for "
        f"compute capability {has}, and 2.15 is to be without them"
    )


def fp16_caveat(config: TrialConfig, model: ModelSpec) -> str | None:
    """Return why a training in fp16 may come to nothing; None where nothing says so."""
    if config.compute_dtype != "fp16" or model.model_type not in OVERFLOWS_FP16:
        return None
    return (
        f"activations of {model.model_type} may pass the largest number of fp16, 65,504: "
        "a trial shows whether the loss stays a number"
    )


def score_cap(model: ModelSpec) -> float | None:
    """Return the number beyond which no attention score of a model goes; None where it caps none.

    Torch's attention takes no cap, and transformers 5.17 leaves it out there without a word; eager
    attention and FlashAttention-2 heed it.
    """
    cap: float | None = model.config.get(SCORE_CAP, _SCORE_CAPS.get(model.model_type))
    return cap


def without_sdpa(model: ModelSpec) -> str | None:
    """Return why torch's own attention is not the model's; None where it is."""
    if model.model_type in WITHOUT_SDPA:
        return f"transformers has no sdpa attention for model type '{model.model_type}'"
    cap = score_cap(model)
    if cap is None:
        return None
    return f"sdpa attention leaves out the cap of the model's scores ({SCORE_CAP} {cap:g})"


def attention_of(model: ModelSpec) -> Attention:
    """Return the attention that a model takes where none is named."""
    if without_sdpa(model) is None:
        return "sdpa"
    return "eager"


def attention_words(model: ModelSpec) -> str | None:
    """Return why a model takes another attention than torch's own; None where it takes that."""
    why = without_sdpa(model)
    if why is None:
        return None
    return f"attention is eager: {why}"


def own_settings(model: ModelSpec) -> Mapping[str, tuple[Any, str]]:
    """Return the settings that a model decides where they are not named: each one's value, and why
    it has that."""
    found: dict[str, tuple[Any, str]] = {}
    if (why := attention_words(model)) is not None:
        found["attention"] = attention_of(model), why
    stored = model.stored
    if stored is not None:
        why = f"the weights are trained as they are stored: {stored.words}"
        found |= {key: (value, why) for key, value in stored.settings.items()}
    return found


Asked = Iterator[tuple[str, str | None]]
"""Names of rules, each with why it forbids a configuration, or None."""


def violation(
    config: TrialConfig,
    *,
    model: ModelSpec,
    compute_capability: tuple[int, int] | None,
    device: DeviceName,
    has_dataset: bool = False,
) -> Violation | None:
    """Return the first rule that forbids ``config`` on this model and device, or None.

    Args:
        config: the candidate.
        model: what would be trained.
        compute_capability: of the GPU; None on a CPU, or where it is not known.
        device: where it would run.
        has_dataset: whether it would train on a dataset, and not on full-length random sequences.
    """
    setting = Setting(model, device, compute_capability, has_dataset)
    return next((Violation(*each) for each in broken_rules(config, setting)), None)


def broken_rules(config: TrialConfig, setting: Setting) -> Iterator[tuple[str, str]]:
    """Yield every rule that forbids ``config``, in the order in which they are told, and why."""
    for rules in (_of_types, _of_kernels, _of_model, _of_many_gpus):
        for name, why in rules(config, setting):
            if why is not None:
                yield name, why


def _of_types(config: TrialConfig, setting: Setting) -> Asked:
    compute = config.compute_dtype
    reason: str | None
    if config.compute_kind.bits == 16:
        since = config.compute_kind.since
        yield "bf16-needs-ampere", setting.lacks(since, compute, "compute_dtype fp16")
    yield "eight-bit", _eight_bit(config, setting)
    if config.compute_kind.needs_gpu and not setting.is_on_gpu:
        yield (
            "fp16-needs-cuda",
            f"{compute} training is not supported on a CPU: use compute_dtype bf16 or fp32",
        )
    if config.adapter_dtype == "bf16":
        # TRL has the adapters of a quantized base in bf16 alone.
        own = "adapter_dtype fp32"
        if config.method_kind.generates and config.is_quantized:
            own = "quantization none"
        reason = setting.lacks(AMPERE, "bf16", own)
        if config.compute_kind.scales_loss:
            scales = "fp16 scales the loss, and torch cannot unscale gradients in bf16"
            reason = f"{scales}: use {own} or compute_dtype bf16"
        yield "bf16-adapters", reason


def _eight_bit(config: TrialConfig, setting: Setting) -> str | None:
    """Return why 8-bit storage or compute is not to be had."""
    compute = config.compute_dtype
    base = config.quantization
    has_8bit_base = config.weight_bits == 8
    if not config.is_8bit_compute and not has_8bit_base:
        return None
    int8 = "int8 or "
    if setting.older_than(TURING):
        int8 = ""
    if config.is_8bit_compute:
        half = "bf16"
        if setting.older_than(AMPERE):
            half = "fp16"
        what = f"compute_dtype {compute}"
        reason = setting.lacks(config.compute_kind.since, what, f"{int8}{half}")
        if reason is not None:
            return reason
    reason = setting.lacks(config.base_kind.since, f"quantization {base}", f"{int8}nf4")
    if reason is not None:
        return reason
    if config.is_8bit_compute and setting.model.model_type in WITHOUT_8_BIT_COMPUTE:
        return (
            f"{setting.model.name} adds in place to what a product in {compute} returns: use bf16"
        )
    if config.is_8bit_compute and has_8bit_base and compute != base:
        return f"a base in {base} computes in {base} or in 16 bits: use compute_dtype {base}"
    if config.is_8bit_compute and not config.is_quantized:
        held = f"compute_dtype {compute} multiplies by weights that are held in 4 or 8 bits"
        return f"{held}: use quantization {compute} or nf4"
    if config.quantized_fraction < 1:
        return "every layer is in 8 bits or none is: use quantized_fraction 1"
    if not config.is_8bit_compute:
        return None
    for name, shape in (linear_shapes(setting.model) or {}).items():
        if any(width % EIGHT_BIT_MULTIPLE for width in shape):
            widths = f"'{name}' of {setting.model.name} is {shape[0]} x {shape[1]}"
            return f"8 bits need widths in multiples of {EIGHT_BIT_MULTIPLE}, {widths}: use bf16"
    too_few = config.compute_kind.too_few_rows
    if config.tokens_per_micro_batch <= too_few:
        few = f"{compute} products need more than {too_few} tokens in a micro-batch"
        return f"{few}: use a larger micro_batch_size"
    return None


def _of_kernels(config: TrialConfig, setting: Setting) -> Asked:
    kernels = config.kernels
    is_cpu = not setting.is_on_gpu
    kind = setting.model.model_type
    if config.kernels_kind.fuses_loss:
        reason = setting.lacks(VOLTA, "Triton", "kernels hf")
        if is_cpu:
            reason = f"kernels {kernels} are Triton kernels and need CUDA: use kernels hf"
        yield "kernels-need-triton", reason
        if kind not in LIGER_MODEL_TYPES:
            reason = f"Liger has no kernels for model type '{kind}': use kernels hf"
            yield "kernels-need-liger-model", reason
        elif config.kernels_kind.fuses_layers and kind in _LIGER_LOSS_ALONE:
            lacks = f"Liger has no kernel for the rotary embedding of model type '{kind}'"
            yield "kernels-need-liger-model", f"{lacks}: use kernels fused-loss or hf"
        elif config.kernels_kind.fuses_layers and has_experts(setting.model):
            keeps = f"what Liger's kernel for the experts of model type '{kind}' keeps and takes is"
            reason = f"{keeps} not known: use kernels fused-loss or hf"
            yield "kernels-need-liger-model", reason
    if config.compile:
        reason = setting.lacks(VOLTA, "Triton", "compile false")
        if is_cpu:
            reason = "compile is not supported on a CPU: it needs a C++ compiler on the machine"
        yield "compile-needs-triton", reason
        package = needed_package(setting.model)
        if package is not None:
            breaks = f"torch's compiler breaks on linear attention, as {package} asks it to"
            reason = f"{breaks}: use compile false"
            yield "compile-breaks-on-linear-attention", reason
        if config.kernels_kind.fuses_layers:
            breaks = (
                "torch's compiler breaks on Liger's layer kernels, so the layers would stay eager"
            )
            yield "compile-breaks-on-liger", f"{breaks}: use kernels fused-loss"
    if config.attention == "flash_attention_2":
        reason = setting.lacks(AMPERE, "FlashAttention-2", "attention sdpa")
        if is_cpu:
            reason = "FlashAttention-2 needs CUDA: use attention sdpa"
        elif reason is None and config.compute_kind.bits == 32:
            reason = (
                "FlashAttention-2 has no fp32 kernels: use compute_dtype bf16 or attention sdpa"
            )
        yield "flash-attention-2", reason
    if config.is_paged and is_cpu:
        pages = "a paged optimizer pages between CUDA and host memory"
        instead = config.optimizer_kind.unpaged
        yield "paged-optimizer-needs-cuda", f"{pages}: use {instead} on a CPU"
    if config.checkpoint_offload:
        yield "checkpoints-on-host", _not_on_host(config, is_cpu=is_cpu)
    if config.expandable_segments and is_cpu:
        reason = (
            "expandable_segments is of CUDA's allocator: use expandable_segments false on a CPU"
        )
        yield "expandable-segments-need-cuda", reason


def _not_on_host(config: TrialConfig, *, is_cpu: bool) -> str | None:
    """Return why the inputs of recomputed layers cannot wait on the host."""
    if is_cpu:
        return "a CPU has no other memory to wait in: use checkpoint_offload false"
    if config.data_parallel > 1:
        return "checkpoints on the host are tried with one GPU alone: use data_parallel 1"
    return None


def _of_model(config: TrialConfig, setting: Setting) -> Asked:
    model = setting.model
    kind = model.model_type
    length = config.seq_len
    positions = model.max_positions
    layers = model.hidden_layers
    if positions is not None and length > positions:
        beyond = f"seq_len {length} is beyond the {positions} positions of {model.name}"
        is_stated = positions == model.config["max_position_embeddings"]
        scaled = "" if is_stated else ", scaled by its rotary embeddings' factor"
        yield "seq-len-beyond-positions", f"{beyond} (max_position_embeddings{scaled})"
    if length < 2:
        reason = "seq_len 1 has no next token to predict, so no token carries a loss"
        yield "seq-len-without-loss", reason
    yield MISNAMED, misnamed_targets(config, model)
    yield STORED, not_as_stored(config, model)
    if config.is_quantized and (left := unquantized(model, config.weight_bits)) is not None:
        quantization = config.quantization
        most = f"quantization {quantization} would leave most of model type '{kind}' in 16 bits"
        cure = "Use quantization none"
        if model.stored is not None:
            cure = "Name the same model in 16 bits"
        elif config.weight_bits != 4 and unquantized(model) is None:
            cure = "Use quantization nf4 or none"
        yield "quantization-leaves-weights", f"{most}: {left}. {cure}"
    if has_experts(model):
        yield "experts", _not_of_experts(config, model)
    if config.offload_fraction > 0:
        yield "offload", _not_offloaded(config, model)
    if config.checkpoint_offload and hands_on_more(model):
        more = f"layers of model type '{kind}' hand on more than their hidden states"
        yield "checkpoints-on-host-not-in-model", f"{more}: use checkpoint_offload false"
    if config.image_size is not None:
        yield "images", not_of_images(config, model, has_dataset=setting.has_dataset)
    if config.is_quantized and not config.quantized_count(layers):
        held = f"holds none of {layers} layers in {config.weight_bits} bits: use quantization none"
        share = f"quantized_fraction {config.quantized_fraction:g}"
        yield "quantized-fraction-of-no-layer", f"{share} {held}"
    yield "attention-not-in-model", _attention_not_in(model, config.attention)
    if config.checkpoint_fraction > 0 and kind in WITHOUT_CHECKPOINTING:
        layers_of = f"transformers cannot checkpoint the layers of model type '{kind}'"
        yield "checkpointing-not-in-model", f"{layers_of}: use checkpoint_fraction 0"


def _not_of_experts(config: TrialConfig, model: ModelSpec) -> str | None:
    """Return why a model with experts does not train so."""
    kind = model.model_type
    if config.is_8bit_compute:
        return (
            f"experts of model type '{kind}' do not multiply in 8 bits: use compute_dtype bf16 or "
            "fp16"
        )
    is_adapted = has_adapted_experts(config, model)
    if is_adapted and config.lora_dropout > 0:
        return "PEFT has no dropout for adapters on experts: use lora_dropout 0"
    if is_adapted and config.compile and config.target_modules == "all-linear":
        # PEFT puts one on the router's parameter, too.
        return (
            f"adapters on all linear layers of model type '{kind}' do not compile: use compile "
            "false, or name the layers"
        )
    if config.is_quantized and config.is_sharded:
        return "packed experts cannot be shared out among GPUs: use sharding none"
    return None


def hands_on_more(model: ModelSpec) -> bool:
    """Return whether a model's layers hand each other more than their hidden states, by which
    gradients go back, so that they cannot be one node of the graph each."""
    if model.model_type.startswith("gemma4"):
        return any(model.config.get(key) for key in _MORE_OF_A_LAYER)
    return model.model_type in _HANDS_ON_MORE


def _not_offloaded(config: TrialConfig, model: ModelSpec) -> str | None:
    """Return why the weights of a model's experts cannot lie on the host."""
    if not has_experts(model):
        return (
            f"{model.name} has no experts of one tensor a layer, and nothing else goes to the "
            "host: use offload_fraction 0"
        )
    layers = expert_layers(model)
    if layers is not None and not config.offloaded_layers(layers):
        share = f"offload_fraction {config.offload_fraction:g}"
        return f"{share} takes none of {layers} layers to the host: use offload_fraction 0"
    if not config.is_4bit or config.quantized_fraction < 1:
        return "experts go to the host in 4 bits alone: use quantization nf4 of all layers"
    if config.data_parallel > 1:
        return "experts on the host are tried with one GPU alone: use data_parallel 1"
    return None


def _attention_not_in(model: ModelSpec, attention: Attention) -> str | None:
    """Return why a model does not run with an attention, or not as it is."""
    if attention == "flash_attention_2":
        why = None
        if model.model_type in WITHOUT_FLASH:
            why = f"transformers has no FlashAttention-2 for model type '{model.model_type}'"
        elif model.config.get("alibi"):
            why = f"{model.name} has position biases (alibi), which FlashAttention-2 does not add"
        return why and f"{why}: use attention {attention_of(model)}"
    if attention == "eager" and model.model_type == "falcon" and model.config.get("alibi"):
        twice = "transformers' eager attention of Falcon adds position biases (alibi) twice"
        return f"{twice}: use attention sdpa"
    why_not = without_sdpa(model)
    if attention != "sdpa" or why_not is None:
        return None
    is_capped = score_cap(model) is not None
    return f"{why_not}: use attention eager{' or flash_attention_2' if is_capped else ''}"


def not_as_stored(config: TrialConfig, model: ModelSpec) -> str | None:
    """Return why a configuration does not train a checkpoint's weights as they are stored; None
    where it does, or where they are in 16 bits."""
    stored = model.stored
    if stored is None:
        return None
    where = f"the weights of {model.name} are stored quantized ({stored.words})"
    base = "" if model.unquantized_base is None else f" ({model.unquantized_base})"
    instead = f"the same model in 16 bits{base}"
    if stored.kind is None:
        return f"{where}, which is not trained here: name {instead}"
    others = [
        f"{key} {as_typed(value)}"
        for key, value in stored.settings.items()
        if getattr(config, key) != value
    ]
    if others:
        return f"{where}: use {' and '.join(others)}, or name {instead}"
    if config.is_sharded:
        return f"{where}, and sharding fsdp cuts up 16-bit weights: use sharding none"
    return None


def misnamed_targets(config: TrialConfig, model: ModelSpec) -> str | None:
    """Return why adapters cannot go where the configuration names; None where they can."""
    wanted = config.target_modules
    kind = model.model_type
    sets = target_sets(model)
    modules = known_linear_modules(model)
    possible = f"target_modules can be {' or '.join(sets)}"
    if wanted == "all-linear" and wanted not in sets:
        return f"adapters cannot go on every linear layer of model type '{kind}': {possible}"
    missing = ""
    if isinstance(wanted, str):
        if wanted not in sets:
            missing = "q_proj"
    elif modules is not None:
        ends = {name.rpartition(".")[2] for name in modules}
        missing = next((name for name in wanted if name.rpartition(".")[2] not in ends), "")
    if not missing:
        return None
    meant = did_you_mean(missing, modules or sets["attention"])
    none = f"the decoder layers of model type '{kind}' have no linear module '{missing}'"
    return f"{none}{meant} ({possible} here)"


def _of_many_gpus(config: TrialConfig, setting: Setting) -> Asked:
    if config.packing != "none" and not setting.has_dataset:
        needs = f"packing {config.packing} needs a dataset, as random sequences are full already"
        yield "packing-needs-texts", f"{needs}: name yours with --data, or use packing none"
    if config.packing == "packed" and is_stateful(setting.model):
        carried = f"layers of model type '{setting.model.model_type}' carry a state over the row"
        reason = f"{carried}, so that packed examples would see each other: use packing grouped"
        yield "packing-leaks-state", reason
    if config.packing == "grouped" and config.micro_batch_size * config.data_parallel == 1:
        reason = "packing grouped orders nothing where micro_batch_size is 1: use packing none"
        yield "grouped-needs-rows", reason
    if config.is_sharded:
        yield "sharding", _unsharded(config)
    if config.is_on_pairs:
        yield "pairs", _not_of_pairs(config, setting.model)
    if config.method_kind.generates or config.trainer != "sweep":
        yield from _of_trainer(config, setting)


def _of_trainer(config: TrialConfig, setting: Setting) -> Asked:
    trainer = trainer_of(config)
    kind = setting.model.model_type
    lacking = _not_of_trainer(config, setting.model)
    if trainer is GRPO:
        yield "grpo", lacking and f"method grpo is for TRL: {lacking}"
    else:
        yield "trainer", lacking
    yield "not-predicted", trainer.unmeasured(config, kind, has_dataset=setting.has_dataset)


def _not_of_trainer(config: TrialConfig, model: ModelSpec) -> str | None:
    """Return what the trainer that is to train a configuration does not do."""
    trainer = trainer_of(config)
    lacks = [
        f"{key} {as_typed(getattr(config, key))}: {cure}"
        for key, cure in trainer.lacks(config, model)
    ]
    if not lacks:
        return None
    return f"{trainer.label} cannot run {'; '.join(lacks)}"


def _not_of_pairs(config: TrialConfig, model: ModelSpec) -> str | None:
    """Return what training on pairs does not go with."""
    for key in CHANGES_LOGITS:
        if model.config.get(key) not in (None, 1.0):
            return f"method dpo takes logits as the head makes them, and {model.name} has {key}"
    if config.packing == "packed":
        return "each completion of a pair has a row of its own: use packing none or grouped"
    if config.is_sharded:
        return "method dpo is tried with the whole model on each GPU alone: use sharding none"
    return None


def _unsharded(config: TrialConfig) -> str | None:
    """Return what FSDP does not go with."""
    if config.data_parallel == 1:
        return "sharding fsdp splits the model among GPUs: use data_parallel 2 or more, or none"
    if config.upcast_fp32:
        return "sharding fsdp moves a layer's weights together, in one type: use upcast_fp32 false"
    if not config.optimizer_kind.updates_shards:
        share = f"{config.optimizer} cannot update a share of a tensor"
        why = f"{config.optimizer_kind.library} has no operators for DTensor"
        return f"{share} ({why}): use optimizer {SHARDED_OPTIMIZER}"
    if config.compute_dtype != "bf16":
        return f"sharding fsdp is tried in bf16 alone, not {config.compute_dtype}: use bf16"
    if config.base_kind.sharded == "untried":
        return "sharding fsdp is tried with 4-bit and 16-bit bases alone: use quantization nf4"
    if config.quantized_fraction < 1 and config.is_quantized:
        return "sharding fsdp is tried with layers of one kind alone: use quantized_fraction 1"
    if config.adapter_dtype != "fp32" and config.is_quantized:
        return "FSDP gathers bf16 adapters with the 4-bit weights and damages those: use fp32"
    return None
