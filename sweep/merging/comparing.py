"""The proof of a merge: the merged model's logits beside those of base and adapter, with one model
in memory at a time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.documents import read_json
from qlora_sweep.search_spaces.errors import InputError, words_of
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.sweep.json_child import Say
from qlora_sweep.sweep.merging.attached import Adapter, Form, forms_of, resize
from qlora_sweep.sweep.training.host_memory import available_bytes
from qlora_sweep.sweep.training.model import DTYPES, load_pretrained
from qlora_sweep.sweep.training.offload import WeightsOnHost

_ROW_TOKENS = 64
_CHEAP_BYTES = 2 * 10**9
"""Of 16-bit weights: up to here comparing with the quantized base takes seconds on a CPU too."""
_NEAR = 0.05
"""Of the logits' spread: what rounding weights and activations to 16 bits moves them by is a
hundredth or two; a wrong factor moves them by much more."""
_ROOM = 1.25
"""A model takes more than its weights: activations, logits, what is being copied."""


def compare_if_there_is_room(order: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Compare as `sweep.merging.job` asks: ``comparison``, or why not in ``not_compared``."""
    nbytes = order["weights_bytes"]
    has_gpu = torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > _ROOM * nbytes
    lacking = 1.1 * nbytes - available_bytes()
    if lacking > 0 and not has_gpu:
        short = f"this machine's memory lacks {lacking / 2**30:.1f} GiB for it"
        return {"comparison": None, "not_compared": short}
    models = Models(
        base=Path(order["base"]),
        adapter=Path(order["adapter"]),
        merged=Path(order["directory"]),
        dtype=order["dtype"],
        form=order["form"],
        device="cuda" if has_gpu else "cpu",
        is_cheap=has_gpu or nbytes <= _CHEAP_BYTES,
    )
    try:
        compared = compare(models, rows=order["rows"], say=say)
    except torch.OutOfMemoryError:
        return {"comparison": None, "not_compared": "the GPU's memory ran out"}
    except Exception as error:  # noqa: BLE001 - the merged model is there, whatever fails here
        return {"comparison": None, "not_compared": words_of(error)}
    return {"comparison": compared, "not_compared": None}


@dataclass(frozen=True)
class Models:
    """Where the models are that are compared, and how they are to be loaded."""

    base: Path
    adapter: Path
    merged: Path
    dtype: str
    form: int = 0
    """Which of the checkpoint's models it is, as `forms_of` counts."""
    device: str = "cpu"
    is_cheap: bool = True
    """Whether the base is looked at as it was quantized in training, too."""

    def form_of(self, checkpoint: Path) -> Form:
        """Return as what the base or the merged model is loaded."""
        return list(forms_of(checkpoint))[self.form]

    def of_merged(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the merged model's logits in fp32 on the host: (rows, tokens, vocabulary)."""
        return self._logits(self._loaded(self.merged), tokens)

    def of_base(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of the base alone, and of base and adapter."""
        return self._beside(self._loaded(self.base), tokens)

    def of_quantized(self, config: TrialConfig, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the adapter on the base as it was quantized in training."""
        spec = load_model_spec(str(self.base))
        has_sdpa = getattr(self.form_of(self.base).skeleton(), "_supports_sdpa", False)
        attention = "eager"
        if has_sdpa:
            attention = "sdpa"
        config = config.changed(compute_dtype=self.dtype, attention=attention)
        _free()
        device = torch.device(self.device)
        with contextlib.ExitStack() as undo:
            host: WeightsOnHost | None = None
            if config.offload_fraction > 0:
                host = undo.enter_context(contextlib.closing(WeightsOnHost(device)))
            model = load_pretrained(config, spec=spec, device=device, host=host)
            return self._beside(model, tokens)[1]

    def _loaded(self, checkpoint: Path) -> Any:
        _free()
        form = self.form_of(checkpoint)
        return form.load(checkpoint, dtype=DTYPES[self.dtype], device=self.device)

    def _beside(self, model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        adapter = Adapter(self.adapter)
        resize(model, adapter.vocabulary(model))
        peft = adapter.attach(model)
        with peft.disable_adapter():
            without = self._logits(peft, tokens)
        return without, self._logits(peft, tokens)

    @torch.no_grad()
    def _logits(self, model: Any, tokens: torch.Tensor) -> torch.Tensor:
        model.eval()
        logits = []
        for row in tokens.to(self.device):
            output = model(input_ids=row.unsqueeze(0))
            # A model without a head ends in its last layer's states.
            last = getattr(output, "logits", None)
            if last is None:
                last = output.last_hidden_state
            logits.append(last.float().cpu())
        return torch.cat(logits)


def _free() -> None:
    """Free the model before, which refers to itself."""
    gc.collect()
    torch.cuda.empty_cache()


def compare(models: Models, *, rows: int, say: Say = lambda _: None) -> dict[str, Any]:
    """Return how far the merged model is from base and adapter, on rows of random tokens.

    `say` is told how many models were looked at, of how many.
    """
    as_trained = _trained_as(models.adapter)
    # `sweep train` quantizes the first of a checkpoint's models.
    is_looked_at = models.is_cheap and as_trained.is_quantized and models.form == 0
    looks = 3 if is_looked_at else 2
    spec = load_model_spec(str(models.merged))
    length = min(_ROW_TOKENS, spec.max_positions or _ROW_TOKENS)
    tokens = _tokens(models, (rows, length))
    say({"compared": 0, "of": looks})
    without, reference = models.of_base(tokens)
    say({"compared": 1, "of": looks})
    found = models.of_merged(tokens)
    say({"compared": 2, "of": looks})
    # What a resized vocabulary has more is in no base.
    common = min(logits.shape[-1] for logits in (without, reference, found))
    without = without[..., :common]
    reference = reference[..., :common]
    found = found[..., :common]
    difference = _difference(found, reference)
    spread = float(reference.std())
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
                **_difference(found, models.of_quantized(as_trained, tokens)),
            }
        except Exception as error:  # noqa: BLE001 - the merge is proved without it
            compared["trained_failed"] = words_of(error)
    return compared


def _tokens(models: Models, shape: tuple[int, int]) -> torch.Tensor:
    """Return random tokens that base and merged model both have, none of which stands for an image
    or a sound."""
    sizes = []
    special: set[int] = set()
    for checkpoint in (models.base, models.merged):
        config = models.form_of(checkpoint).config
        sizes.append(config.get_text_config().vocab_size)
        for part in (config, config.get_text_config()):
            for key, value in part.to_dict().items():
                if key.endswith(("token_id", "token_index")) and isinstance(value, int):
                    special.add(value)
    plain = torch.tensor([token for token in range(min(sizes)) if token not in special])
    generator = torch.Generator().manual_seed(0)
    return plain[torch.randint(0, len(plain), shape, generator=generator)]


def _trained_as(adapter: Path) -> TrialConfig:
    """Return how the base was held in training, as `training.json` says, else as in QLoRA."""
    try:
        written = read_json(adapter / "training.json", label="training.json")["config"]
        return TrialConfig.model_validate(written)
    except (InputError, KeyError, ValueError):
        return TrialConfig()


def _difference(one: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    """Return how far logits are apart; agreement is the share of equal likeliest tokens, 0..1."""
    apart = (one - other).abs()
    same = (one.argmax(-1) == other.argmax(-1)).float().mean()
    values = {"max_abs": apart.max(), "mean_abs": apart.mean(), "argmax_agreement": same}
    return {name: float(value) for name, value in values.items()}
