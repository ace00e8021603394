"""Try model families for real: the memory prediction, and a training on the CPU, of tiny models.

Each family is built by transformers from a small config with random weights, and each target set
is asked of it as `sweep` asks: the rules first, then the prediction by tracing, then a trial.
Writes the table of ``docs/models.md``.

    python tests/bench/try_models.py [--only llama,mixtral] > OUT.jsonl
    python tests/bench/try_models.py --table OUT.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# As the supervisor does for a worker on the CPU; torch reads it when it is imported.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch

from search_spaces.config import TARGET_SETS, TrialConfig
from search_spaces.errors import SweepError
from search_spaces.models import ModelSpec
from search_spaces.rules import WITHOUT_SDPA, violation
from search_spaces.space import StepBudget
from storage.records import Invalid, Measured
from sweep.predict.memory.predictor import TracingPredictor
from sweep.predict.memory.profile_store import TracingChildren
from sweep.training.device import CpuDevice
from sweep.training.meter import CardReader
from sweep.training.model import build_base
from sweep.training.trial import Trial

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
LINEAR_ATTENTION = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": LOCAL_EXPERTS,
    "ministral": {"head_dim": 32},
    "ministral3": {"head_dim": 32},
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {**EXPERTS, "head_dim": 32},
    "qwen3_next": {**EXPERTS, **LINEAR_ATTENTION, "shared_expert_intermediate_size": 64},
    "qwen3_5_text": LINEAR_ATTENTION,
    "qwen3_5_moe_text": {**EXPERTS, **LINEAR_ATTENTION, "shared_expert_intermediate_size": 64},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {**EXPERTS, "intermediate_size": 64},
    "gpt_oss": {**LOCAL_EXPERTS, "head_dim": 32, "intermediate_size": 64},
    "gpt_neox": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_heads": 4},
    "gpt2": {},
    "gpt_bigcode": {},
    "gptj": {"rotary_dim": 16},
    "codegen": {"rotary_dim": 16},
    "falcon": {},
    "mpt": {"d_model": 128, "n_heads": 4, "n_layers": 4},
    "phi": {},
    "phi3": {},
    "phimoe": LOCAL_EXPERTS,
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128},
    "bloom": {},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32},
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32},
    "gemma4_text": {
        "head_dim": 32,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 32,
        "num_kv_shared_layers": 0,
    },
    "granite": {},
    "granitemoe": LOCAL_EXPERTS,
    "granitemoehybrid": {
        **LOCAL_EXPERTS,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "shared_intermediate_size": 64,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
    },
    "starcoder2": {},
    "stablelm": {},
    "cohere": {},
    "cohere2": {"head_dim": 32},
    "smollm3": {},
    "glm": {"head_dim": 32},
    "glm4": {"head_dim": 32},
    "glm4_moe": {**EXPERTS, "head_dim": 32, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "exaone4": {"head_dim": 32},
    "nemotron": {},
    "ernie4_5": {"head_dim": 32},
    "seed_oss": {"head_dim": 32},
    "arcee": {},
    "apertus": {},
    "helium": {"head_dim": 32},
    "llama4_text": {**LOCAL_EXPERTS, "head_dim": 32, "intermediate_size_mlp": 256},
    "falcon_h1": {
        "head_dim": 32,
        "mamba_d_ssm": 256,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
    },
    "jamba": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        # Every eighth layer attends by default, and a tiny model has four.
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 32, "attn_layer_indices": [1, 3]},
    "recurrent_gemma": {"lru_width": 128, "head_dim": 32},
}
"""What each family's tiny config has beyond `SIZES`, by transformers' model type."""

_STEPS = StepBudget(warmup_min=1, warmup_max=2, measured_min=2, measured_max=2)


@dataclass(frozen=True)
class Try:
    """What came of one target set on one family."""

    family: str
    quantization: str
    targets: str
    rule: str
    """The rule that forbids it, with its reason; empty where none does."""
    prediction: str
    training: str
    share: float | None
    """Of the matrices that are meant to be in 4 bits, how many are; None without quantization."""


def spec_of(family: str) -> ModelSpec:
    """Return the family's tiny model."""
    return ModelSpec(family, "directory", {"model_type": family, **SIZES, **FAMILIES[family]})


def config_of(family: str, targets: str, quantization: str = "nf4") -> TrialConfig:
    """Return a small configuration, half of its layers checkpointed."""
    return TrialConfig(
        attention="eager" if family in WITHOUT_SDPA else "sdpa",
        target_modules=targets,
        quantization=quantization,
        micro_batch_size=2,
        seq_len=32,
        lora_rank=4,
        checkpoint_fraction=0.5,
    )


@contextlib.contextmanager
def predictors() -> Iterator[Any]:
    """Give a predictor for a model; every prediction is traced anew."""
    child = TracingChildren(1, outlive=True)
    with tempfile.TemporaryDirectory() as cache:
        yield lambda spec: TracingPredictor(spec, cache_dir=Path(cache), tracer=child)
    child.close()


def tries(family: str, quantization: str, *, predictor: TracingPredictor) -> Iterator[Try]:
    """Ask every target set of a family."""
    spec = spec_of(family)
    for targets in TARGET_SETS:
        config = config_of(family, targets, quantization)
        broken = violation(config, model=spec, compute_capability=None, device="cpu")
        if broken is not None:
            yield Try(
                family, quantization, targets, f"{broken.rule}: {broken.reason}", "", "", None
            )
            continue
        training, share = train(spec, config)
        yield Try(family, quantization, targets, "", predict(predictor, config), training, share)


def predict(predictor: TracingPredictor, config: TrialConfig) -> str:
    """Return ``yes``, or why memory is not predicted."""
    try:
        predictor.predict(config)
    except SweepError as error:
        return str(error)
    return "yes"


def train(spec: ModelSpec, config: TrialConfig) -> tuple[str, float | None]:
    """Return ``yes`` or how the trial ended, and the share that was in 4 bits."""
    try:
        base = build_base(config, spec=spec, weights="random", device=torch.device("cpu"), seed=0)
    except Exception as error:  # noqa: BLE001 - whatever it is, the table says it
        return f"build: {type(error).__name__}: {error}", None
    trial = Trial(base=base, config=config, steps=_STEPS, device=CpuDevice(), card=CardReader(None))
    try:
        outcome = trial.run()
    except Exception as error:  # noqa: BLE001 - whatever it is, the table says it
        return f"{type(error).__name__}: {str(error).splitlines()[0]}", None
    finally:
        base.close()
        gc.collect()
    match outcome:
        case Measured(measurement=measurement):
            return "yes", getattr(measurement, "quantized_share", None)
        case Invalid(detail=detail):
            return f"invalid: {detail}", None
    return (
        f"{outcome.verdict}: {getattr(outcome, 'knob', '')} {getattr(outcome, 'detail', '')}",
        None,
    )


def table(path: Path) -> str:
    """Return the Markdown table of what was tried; families with equal outcomes share a row."""
    tried: dict[tuple[str, ...], list[str]] = {}
    for line in path.read_text().splitlines():
        result = Try(**json.loads(line))
        rule = result.rule.partition(":")[0]
        outcome = (
            f"refused: `{rule}` | "
            if rule
            else (f"{_brief(result.prediction)} | {_brief(result.training)}")
        )
        tried.setdefault((result.family, result.quantization, outcome), []).append(result.targets)
    rows: dict[tuple[str, ...], list[str]] = {}
    for (family, quantization, outcome), targets in tried.items():
        rows.setdefault((quantization, ", ".join(targets), outcome), []).append(family)
    return "\n".join(
        [
            "| model type | quantization | targets | memory predicted | trained |",
            "|---|---|---|---|---|",
            *(f"| {', '.join(families)} | {' | '.join(row)} |" for row, families in rows.items()),
        ]
    )


def _brief(outcome: str) -> str:
    """Return an outcome without the model's name, and of a loop only what it is."""
    for sign in ("chunks of the sequence", "loops over the tokens"):
        if sign in outcome:
            return f"no: {sign}"
    return outcome.partition("memory is not predicted: ")[2] or outcome


def main() -> None:
    """Try what was asked for, a JSON document a line, or print the table of what was tried."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="families, separated by commas")
    parser.add_argument("--table", type=Path, help="print the table of a file of tries")
    asked = parser.parse_args()
    if asked.table is not None:
        print(table(asked.table))
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    families = asked.only.split(",") if asked.only else list(FAMILIES)
    results: list[Try] = []
    with predictors() as predictor_of:
        for family in families:
            predictor = predictor_of(spec_of(family))
            for quantization in ("nf4", "none"):
                if quantization == "none" and all(r.training == "yes" for r in results[-3:]):
                    continue
                for result in tries(family, quantization, predictor=predictor):
                    results.append(result)
                    print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main()
