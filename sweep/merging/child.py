"""An adapter added to its base, one of the base's files after the other, and the proof of it: the
merged model's logits beside those of base and adapter, with one model in memory at a time.
"""

from __future__ import annotations

import gc
import json
import math
import re
import resource
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, get_peft_model, set_peft_model_state_dict
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers.modeling_utils import load_state_dict

from search_spaces.checkpoints import ADAPTER, ADAPTER_CONFIG, INDEX, SINGLE
from search_spaces.config import TrialConfig
from search_spaces.documents import read_json
from search_spaces.errors import EnvironmentFault, InputError, did_you_mean, words_of
from search_spaces.models import load_model_spec
from sweep.subprocess_jobs import Say
from sweep.training.model import DTYPES, load_pretrained

Added = Callable[[torch.Tensor], torch.Tensor]
_EMBEDDINGS = tuple(f"{n}.weight" for n in ("embed_tokens", "wte", "word_embeddings", "embed_in"))
_HEAD, _TIED, _PREFIX = "lm_head.weight", "tie_word_embeddings", "base_model.model."
_LORA = re.compile(r"(.+)\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(?:\.weight)?")
_NAMED = re.compile(r"(?:\.modules_to_save|(\.lora_\w+))\.default(?=\.|$)")
"""A model's own state dict has the adapter's name in its keys."""
_PLAIN = TrialConfig(quantization="none")
_ROW_TOKENS = 64
_CHEAP_BYTES = 2 * 10**9
"""Of 16-bit weights: up to here comparing with the quantized base takes seconds on a CPU too."""
_NEAR = 0.05
"""Of the logits' spread: what rounding weights and activations to 16 bits moves them by is a
hundredth or two; a wrong factor moves them by much more."""
_ROOM = 1.25
"""A model takes more than its weights: activations, logits, what is being copied."""


def _available_bytes() -> int:
    """Return what of the host's memory a new process may take without swapping."""
    with open("/proc/meminfo", encoding="ascii") as file:
        sizes = dict(line.split(":") for line in file)
    return int(sizes["MemAvailable"].split()[0]) * 1024


def merge_and_compare(order: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Merge as `sweep.merging.job` asks, and return what its report says of it."""
    adapter, base, merged = (Path(order[key]) for key in ("adapter", "base", "directory"))
    began = time.perf_counter()
    merge = Merge(adapter, base, dtype=order["dtype"])
    nbytes = merge.write(merged, say)
    found = {
        "dtype": merge.dtype,
        "weights_merged": len(merge.products),
        "weights_replaced": len(merge.whole),
        "shards": len(merge.files),
        "weights_bytes": nbytes,
        "merge_seconds": time.perf_counter() - began,
        "comparison": None,
        "not_compared": None,
    }
    has_gpu = torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > _ROOM * nbytes
    lacking = 0.0 if has_gpu else 1.1 * nbytes - _available_bytes()
    if not order["rows"]:
        found["not_compared"] = "it was not asked for"
    elif lacking > 0:
        found["not_compared"] = f"this machine's memory lacks {lacking / 2**30:.1f} GiB for it"
    else:
        device, is_cheap = "cuda" if has_gpu else "cpu", has_gpu or nbytes <= _CHEAP_BYTES
        models = Models(base, adapter, merged, merge.dtype, device, is_cheap)
        try:
            found["comparison"] = compare(models, rows=order["rows"], say=say)
        except torch.OutOfMemoryError:
            found["not_compared"] = "the GPU's memory ran out"
    return found | {"peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


# Merging.


def read_adapter(directory: Path) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors by the names that PEFT saves them by, without its prefix."""
    return {
        _NAMED.sub(r"\1", name.removeprefix(_PREFIX)): tensor
        for name, tensor in load_file(directory / ADAPTER).items()
        if ".original_module." not in name
    }


class Merge:
    """What an adapter makes of a base, tensor by tensor, in the base's own files.

    Attributes:
        dtype: of the merged model; the base's own 16-bit type where None is given.
        files: the tensors in each file, without data.
        products: what adds the adapter's product to a weight, in fp32, by the weight's name.
        whole: what stands in for tensors of the base.

    Raises:
        InputError: the two do not belong together.
    """

    def __init__(self, adapter: Path, base: Path, *, dtype: str | None = None) -> None:
        self._base = base
        self._config = read_json(base / "config.json", label=f"{base}/config.json")
        self._lora = read_json(adapter / ADAPTER_CONFIG, label=ADAPTER_CONFIG)
        index = base / INDEX
        shards = (
            read_json(index, label=INDEX)["weight_map"].values() if index.exists() else {SINGLE}
        )
        self.files = {
            file: load_state_dict(str(base / file), map_location="meta")
            for file in sorted(set(shards))
        }
        self._tensors = {name: t for tensors in self.files.values() for name, t in tensors.items()}
        kinds = [tensor.dtype for tensor in self._tensors.values() if tensor.ndim > 1]
        self._stored = max(set(kinds), key=kinds.count, default=torch.float32)
        self.dtype = dtype or ("fp16" if self._stored == torch.float16 else "bf16")
        self._match(read_adapter(adapter))

    def write(self, directory: Path, say: Say = lambda _: None) -> int:
        """Write the merged weights, their index and config; return the bytes of the weights.

        Raises:
            InputError: a weight is too large for the type.
            EnvironmentFault: the disk has no room.
        """
        total = sum(tensor.nbytes for tensor in self._tensors.values())
        # Merged, most tensors have two bytes a number.
        if shutil.disk_usage(directory).free < (needed := total * 2 // self._stored.itemsize):
            short = f"takes {needed / 2**30:.1f} GiB, and its disk has not as much free"
            raise EnvironmentFault(f"--output: the merged model {short}: nothing was written")
        done = written = 0
        for file, names in self.files.items():
            tensors = {}
            with safe_open(self._base / file, framework="pt") as weights:
                for name in names:
                    base = weights.get_tensor(self._shared.get(name, name))
                    tensors[name] = self._merged(name, base)
                    done, written = done + base.nbytes, written + tensors[name].nbytes
                    say({"merged": done, "of": total})
                try:
                    save_file(tensors, directory / file, metadata={"format": "pt"})
                except SafetensorError as error:
                    raise EnvironmentFault(
                        f"--output: {file} cannot be written: {error}"
                    ) from error
        documents: dict[str, Any] = {"config.json": self._merged_config()}
        if len(self.files) > 1:
            of_files = {name: file for file, names in self.files.items() for name in names}
            documents[INDEX] = {"metadata": {"total_size": written}, "weight_map": of_files}
        for document, values in documents.items():
            text = json.dumps(values, indent=2, sort_keys=True) + "\n"
            (directory / document).write_text(text, encoding="utf-8")
        return written

    def _merged_config(self) -> dict[str, Any]:
        config = self._config | {"dtype": str(DTYPES[self.dtype]).removeprefix("torch.")}
        config.pop("torch_dtype", None)
        if self._is_untied:
            config[_TIED] = False
        rows = [t.shape[0] for name, t in self.whole.items() if name.endswith(_EMBEDDINGS)]
        if rows and "vocab_size" in config:
            # An adapter that came with new tokens brings the larger embedding.
            config["vocab_size"] = rows[0]
        return config

    def _match(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Find what each of the adapter's tensors changes."""
        layers: dict[str, dict[str, torch.Tensor]] = {}
        whole = {}
        for name, tensor in tensors.items():
            if match := _LORA.fullmatch(name):
                layers.setdefault(match[1], {})[match[2]] = tensor
            elif "lora_" in name or "trainable_tokens" in name:
                raise InputError(f"the adapter's '{name}': this is no plain LoRA and is not merged")
            else:
                whole[name.replace(".base_layer.", ".")] = tensor
        changed = (*whole, *(f"{layer}.weight" for layer in layers))
        # A head that shares the embedding's weights gets its own, if the adapter parts them.
        ties = self._config.get(_TIED, _HEAD not in self._tensors)
        self._is_untied = bool(ties) and any(n.endswith((_HEAD, *_EMBEDDINGS)) for n in changed)
        self._shared: dict[str, str] = {}
        own = next((name for name in self._tensors if name.endswith(_EMBEDDINGS)), None)
        if self._is_untied and own and _HEAD not in self._tensors:
            file = next(tensors for tensors in self.files.values() if own in tensors)
            file[_HEAD] = self._tensors[_HEAD] = self._tensors[own]
            self._shared[_HEAD] = own
        self.whole = {self._found(name): tensor for name, tensor in whole.items()}
        self.products = {
            (name := self._found(f"{layer}.weight")): self._product(layer, parts, name)
            for layer, parts in layers.items()
        }

    def _found(self, target: str) -> str:
        """Return the base's name of a tensor; a decoder alone is stored without the outer name, one
        beside a vision tower with one more."""
        inner = target.partition(".")[2]
        beside = (f"language_model.{target}", f"model.language_model.{inner}")
        for name in (target, inner, *beside):
            if name in self._tensors:
                return name
        hint = did_you_mean(target, list(self._tensors))
        raise InputError(f"the adapter changes '{target}', which the base does not hold{hint}")

    def _product(self, layer: str, parts: Mapping[str, torch.Tensor], name: str) -> Added:
        magnitude, shape = parts.get("magnitude_vector"), self._tensors[name].shape
        has_inputs_first = bool(self._lora.get("fan_in_fan_out"))
        match parts:
            case {"A": down, "B": up}:
                pass
            case {"embedding_A": down, "embedding_B": up} if magnitude is None:
                has_inputs_first = True
            case _:
                down = up = torch.empty(0)
        straight = (*up.shape[:1], *down.shape[1:])
        # The shape tells, but for a square weight.
        is_turned = shape == straight[::-1] and (has_inputs_first or shape != straight)
        if down.shape[:1] != up.shape[1:] or (shape != straight and not is_turned):
            held = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in parts.items())
            of_base = f"the base's {list(shape)}: another base, or no plain LoRA"
            raise InputError(f"the adapter's '{layer}' ({held}) does not fit {of_base}")
        alphas, rank = self._lora.get("alpha_pattern") or {}, len(down)
        alpha = alphas.get(get_pattern_key(alphas, layer), self._lora.get("lora_alpha", 8))
        scaling = alpha / (math.sqrt(rank) if self._lora.get("use_rslora") else rank)

        def added(weight: torch.Tensor) -> torch.Tensor:
            straight = weight.float().T if is_turned else weight.float()
            total = torch.addmm(straight, up.float(), down.float(), alpha=scaling)
            if magnitude is not None:
                # DoRA's length of each row.
                length = torch.linalg.vector_norm(total, dim=1)
                total *= (magnitude.float() / length).unsqueeze(1)
            return total.T if is_turned else total

        return added

    def _merged(self, name: str, base: torch.Tensor) -> torch.Tensor:
        """Return one tensor of the merged model, worked out in fp32."""
        wide = self.whole.get(name, base)
        if product := self.products.get(name):
            wide = product(wide)
        # The few tensors that a 16-bit base keeps in fp32 stay so.
        is_kept = wide is base and wide.dtype == torch.float32 and self._stored != torch.float32
        if is_kept or not wide.is_floating_point():
            return wide
        narrow = wide.to(DTYPES[self.dtype]).contiguous()
        if self.dtype == "fp16" and not torch.isfinite(narrow).all() and wide.isfinite().all():
            raise InputError(f"'{name}' has weights too large for fp16: merge with --dtype bf16")
        return narrow


# Comparing.


@dataclass(frozen=True)
class Models:
    """Where the models are that are compared, and how they are to be loaded."""

    base: Path
    adapter: Path
    merged: Path
    dtype: str
    device: str = "cpu"
    is_cheap: bool = True
    """Whether the base is looked at as it was quantized in training, too."""

    def logits(self, tokens: torch.Tensor, base: TrialConfig | None = None) -> list[torch.Tensor]:
        """Return logits of the base, quantized so, and of base and adapter; of the merged model if
        no base is asked for. In fp32 on the host, of shape (rows, tokens, vocabulary).
        """
        config = (base or _PLAIN).changed(compute_dtype=self.dtype)
        spec = load_model_spec(str(self.base if base else self.merged))
        # What is left of the model before refers to itself.
        gc.collect()
        torch.cuda.empty_cache()
        model: Any = load_pretrained(config, spec=spec, device=torch.device(self.device))

        @torch.no_grad()
        def of(model: Any) -> torch.Tensor:
            rows = tokens.to(self.device).split(1)
            return torch.cat([model(input_ids=row).logits.float().cpu() for row in rows])

        if base is None:
            return [of(model.eval())]
        peft = get_peft_model(model, PeftConfig.from_pretrained(str(self.adapter))).eval()
        tensors = read_adapter(self.adapter)
        set_peft_model_state_dict(peft, {_PREFIX + name: t for name, t in tensors.items()})
        with peft.disable_adapter():
            without = of(peft)
        return [without, of(peft)]


def compare(models: Models, *, rows: int, say: Say = lambda _: None) -> dict[str, Any]:
    """Return how far the merged model is from base and adapter, on rows of random tokens.

    `say` is told how many models were looked at, of how many.
    """
    as_trained = _trained_as(models.adapter)
    is_looked_at = models.is_cheap and as_trained.is_quantized
    looks = 3 if is_looked_at else 2
    spec = load_model_spec(str(models.merged))
    length = min(_ROW_TOKENS, spec.max_positions or _ROW_TOKENS)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, spec.vocab_size, (rows, length), generator=generator)
    say({"compared": 0, "of": looks})
    without, reference = models.logits(tokens, _PLAIN)
    say({"compared": 1, "of": looks})
    (found,) = models.logits(tokens)
    say({"compared": 2, "of": looks})
    difference, spread = _difference(found, reference), float(reference.std())
    compared: dict[str, Any] = {
        "rows": rows,
        "tokens_per_row": length,
        "device": models.device,
        **difference,
        "logits_spread": spread,
        "adapter_mean_abs": float((reference - without).abs().mean()),
        "is_near": difference["mean_abs"] <= _NEAR * spread,
        "trained": None,
        "trained_failed": None,
    }
    if is_looked_at:
        try:
            compared["trained"] = {
                "quantization": as_trained.quantization,
                "double_quant": as_trained.is_4bit and as_trained.double_quant,
                **_difference(found, models.logits(tokens, as_trained)[1]),
            }
        except (RuntimeError, ValueError, NotImplementedError, ImportError) as error:
            # The merge is proved without it.
            compared["trained_failed"] = words_of(error)
    return compared


def _trained_as(adapter: Path) -> TrialConfig:
    """Return how the base was held in training, as `training.json` says, else as in QLoRA."""
    try:
        written = read_json(adapter / "training.json", label="training.json")["config"]
        config = TrialConfig.model_validate(written)
    except (InputError, KeyError, ValueError):
        config = TrialConfig()
    return config.changed(attention="sdpa")


def _difference(one: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    """Return how far logits are apart; agreement is the share of equal likeliest tokens, 0..1."""
    apart = (one - other).abs()
    same = (one.argmax(-1) == other.argmax(-1)).float().mean()
    values = {"max_abs": apart.max(), "mean_abs": apart.mean(), "argmax_agreement": same}
    return {name: float(value) for name, value in values.items()}
