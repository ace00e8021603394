"""Tracing real transformers and PEFT code without data, in the child that does it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from search_spaces.config import TrialConfig, parse_config
from search_spaces.errors import InputError
from search_spaces.models import ModelSpec, load_model_spec
from sweep.predict.memory.predictor import TracingPredictor
from sweep.predict.memory.profile_store import TRACED_BY, TracingChildren, source_files
from sweep.predict.memory.profiles import Structure, Untraceable
from tests.sweep.shared_tracing import trace

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 5000,
    "head_dim": 32,
    "pad_token_id": 0,
}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256}
FALCON = {key: value for key, value in SMALL.items() if key != "head_dim"}
GPT2 = {"n_embd": 256, "n_layer": 6, "n_head": 8, "vocab_size": 5000, "pad_token_id": 0}
MODELS = {
    "llama": SMALL,
    "qwen2": SMALL,
    "qwen3": SMALL,
    "phi3": SMALL,
    "gemma2": {**SMALL, "sliding_window": 128},
    "granite": SMALL,
    "gpt_neox": SMALL,
    "gpt2": {**GPT2, "num_hidden_layers": 6, "hidden_size": 256},
    "opt": {**SMALL, "ffn_dim": 704, "word_embed_proj_dim": 256},
    "phi": {**SMALL, "num_key_value_heads": 8},
    "falcon": FALCON,
}


IN_16_BITS = TrialConfig(quantization="none")


def model(kind: str, **changes: Any) -> ModelSpec:
    return ModelSpec(kind, "directory", {"model_type": kind, **MODELS.get(kind, SMALL), **changes})


@pytest.fixture
def predictor(tracing_child: TracingChildren, profile_cache: Path) -> Any:
    def of(spec: ModelSpec) -> TracingPredictor:
        return TracingPredictor(spec, cache_dir=profile_cache, tracer=tracing_child)

    return of


@pytest.mark.parametrize("kind", sorted(set(MODELS) - {"falcon"}))
@pytest.mark.parametrize("fraction", [1.0, 0.0, 0.5])
def test_a_few_layers_tell_what_all_of_them_take(
    predictor: Any, kind: str, fraction: float
) -> None:
    """A list with one value a layer makes each layer one of a kind, so that all are traced."""
    whole = model(kind, every_layer_is_its_own=list(range(6)))
    for batch, length in ((1, 96), (3, 200)):
        config = parse_config(
            {
                "micro_batch_size": batch,
                "seq_len": length,
                "checkpoint_fraction": fraction,
                "target_modules": "all-linear",
            }
        )
        extrapolated = predictor(model(kind)).predict(config)
        traced = predictor(whole).predict(config)
        assert len(set(traced.step.profile.positions)) == 6
        assert len(set(extrapolated.step.profile.positions)) < 6
        assert extrapolated.peak_allocated_bytes == traced.peak_allocated_bytes
        assert extrapolated.breakdown == traced.breakdown
        assert extrapolated.breakdown["adapters"] > 0


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        ({}, {"micro_batch_size": 8}),
        ({}, {"seq_len": 1024}),
        ({}, {"lora_rank": 64}),
        ({"target_modules": "qv"}, {}),
        ({}, {"target_modules": "all-linear"}),
        ({}, {"checkpoint_fraction": 0.5}),
        ({"checkpoint_fraction": 0.5}, {"checkpoint_fraction": 0.0}),
        ({"upcast_fp32": False}, {}),
        ({"kernels": "fused-loss"}, {}),
        ({"kernels": "liger"}, {"kernels": "fused-loss"}),
        ({}, {"attention": "eager", "checkpoint_fraction": 0.0}),
        ({}, {"quantization": "none"}),
        ({}, {"double_quant": False}),
        ({"adapter_dtype": "bf16"}, {}),
        (
            {"adapter_dtype": "bf16", "optimizer": "adamw_torch_fused"},
            {"optimizer": "adamw_torch_fused"},
        ),
        ({"checkpoint_fraction": 0.0}, {"checkpoint_fraction": 0.0, "lora_dropout": 0.1}),
        ({}, {"optimizer": "adamw_torch_fused"}),
        ({}, {"compute_dtype": "fp32", "checkpoint_fraction": 0.0}),
        ({}, {"effective_batch_size": 8}),
    ],
)
def test_every_knob_moves_memory_the_way_it_should(
    predictor: Any, smaller: dict[str, Any], larger: dict[str, Any]
) -> None:
    tiny = predictor(load_model_spec("tinyllama-1.1b"))
    peaks = [tiny.predict(parse_config(keys)).peak_allocated_bytes for keys in (smaller, larger)]
    assert peaks[0] < peaks[1]


def test_peak_memory_is_linear_in_the_tokens(predictor: Any) -> None:
    tiny = predictor(load_model_spec("tinyllama-1.1b"))
    peaks = [
        tiny.predict(TrialConfig(micro_batch_size=batch)).peak_allocated_bytes
        for batch in (8, 16, 24, 32)
    ]
    steps = {b - a for a, b in itertools.pairwise(peaks)}
    assert max(steps) - min(steps) <= 8 * 2**20  # the allocator's remainders


def test_what_is_half_as_wide_takes_half_and_fp4_what_nf4_takes(predictor: Any) -> None:
    tiny = predictor(load_model_spec("tinyllama-1.1b"))

    def parts(**keys: Any) -> Any:
        return tiny.predict(TrialConfig(**keys)).breakdown

    shape = {"optimizer": "adamw_torch_fused", "effective_batch_size": 8}
    wide, half = (parts(adapter_dtype=dtype, **shape) for dtype in ("fp32", "bf16"))
    assert wide["adapters"] == 2 * half["adapters"]
    assert wide["gradients"] == 2 * half["gradients"]
    assert wide["optimizer"] == pytest.approx(2 * half["optimizer"], rel=0.01)
    assert parts(quantization="nf4") == parts(quantization="fp4")


def test_beyond_its_window_a_model_needs_masks(predictor: Any) -> None:
    windowed, plain = model("mistral", sliding_window=256), model("mistral", sliding_window=None)
    for length, is_equal in ((255, True), (256, False)):
        config = TrialConfig(seq_len=length, checkpoint_fraction=0.0)
        peaks = [predictor(spec).predict(config).peak_allocated_bytes for spec in (windowed, plain)]
        assert (peaks[0] == peaks[1]) is is_equal


def test_without_flash_attention_grouped_heads_cost_the_scores(
    tracing_child: TracingChildren, profile_cache: Path
) -> None:
    config = TrialConfig(compute_dtype="fp16", seq_len=2048, checkpoint_fraction=0.0)
    kept = {"cache_dir": profile_cache, "tracer": tracing_child}
    old, new = (
        TracingPredictor(model("llama"), compute_capability=capability, **kept).predict(config)
        for capability in ((7, 5), (8, 6))
    )
    scores = 6 * 4 * 8 * 2048 * 2048 * 2  # layers, sequences, heads, rows, columns, fp16
    assert old.breakdown["activations"] - new.breakdown["activations"] >= scores


@pytest.mark.parametrize(
    ("spec", "keys", "names"),
    [
        (model("llama"), {"target_modules": ["q_prj"]}, r"no linear layer 'q_prj'.*'q_proj'"),
        (model("llama", num_key_value_heads=3), {}, "self_attn"),
        (model("llama", hidden_size=0), {}, "cannot be built"),
        (model("llama", num_attention_heads="many"), {}, "cannot be built"),
        (model("gemma3"), {}, r"multimodal.*model_type 'gemma3_text'"),
        (model("t5"), {}, "T5Config"),
    ],
)
def test_a_config_that_contradicts_itself_is_bad_input(
    predictor: Any, spec: ModelSpec, keys: dict[str, Any], names: str
) -> None:
    with pytest.raises(InputError, match=names) as caught:
        predictor(spec).predict(parse_config(keys))
    assert not isinstance(caught.value, Untraceable)


@pytest.mark.parametrize(
    ("spec", "keys", "names"),
    [
        (model("mixtral", **MOE), {}, r"only \d+(\.\d)? % .* in 4 bits.*use quantization none"),
        (model("falcon"), {}, r"only 0 % of its matrices' weights"),
        (model("rwkv"), {"attention": "eager"}, "loops over the tokens in plain PyTorch"),
        (
            model("bamba", mamba_n_heads=8, mamba_d_head=64, attn_layer_indices=[1, 3, 5]),
            {},
            "memory is not predicted: module .* works in chunks of the sequence",
        ),
    ],
)
def test_code_that_cannot_be_predicted_gives_the_reason(
    predictor: Any, spec: ModelSpec, keys: dict[str, Any], names: str
) -> None:
    with pytest.raises(Untraceable, match=names):
        predictor(spec).predict(parse_config({"target_modules": "all-linear", **keys}))


def test_experts_in_16_bits_are_predicted_and_count_twice_their_number(predictor: Any) -> None:
    few, many = (
        predictor(model("mixtral", **{**MOE, "num_local_experts": n})).predict(IN_16_BITS)
        for n in (4, 8)
    )
    experts = 6 * 4 * 3 * 256 * 256 * 2  # layers, experts, matrices, hidden, inner, 16 bits
    grown = many.breakdown["weights"] - few.breakdown["weights"]
    assert grown == pytest.approx(experts, rel=0.01)
    assert few.quantized_share is None
    assert predictor(model("llama")).predict(TrialConfig()).quantized_share == 1.0


def test_layers_that_differ_by_their_index_are_all_traced(predictor: Any) -> None:
    """The first two layers are dense: an excerpt of three could not tell."""
    spec = model(
        "qwen2_moe",
        num_experts=4,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        mlp_only_layers=[0, 1],
    )
    prediction = predictor(spec).predict(IN_16_BITS)
    assert prediction.step.profile.positions == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3", "smollm3", "phi3", "mixtral"])
def test_the_fused_loss_spares_the_logits_whatever_the_model_hands_it(
    predictor: Any, kind: str
) -> None:
    """Gemma 3 and Mixtral hand the size of the vocabulary in by position, others by name."""
    changes = MOE if kind == "mixtral" else {"num_attention_heads": 8}
    spec = model(kind, **changes, vocab_size=50_000)
    written, fused = (
        predictor(spec).predict(TrialConfig(kernels=kernels, quantization="none"))
        for kernels in ("hf", "fused-loss")
    )
    logits = 4 * 512 * 50_000 * 4
    assert written.peak_allocated_bytes - fused.peak_allocated_bytes > logits
    assert fused.breakdown["loss"] < logits


def test_the_child_goes_on_after_what_it_could_not_trace(tracing_child: TracingChildren) -> None:
    structure = Structure.of(TrialConfig(), is_checkpointed=True)
    with pytest.raises(InputError):
        trace(tracing_child, model("no_such_architecture"), structure)
    assert trace(tracing_child, model("llama"), structure)["positions"] == [0, 1, 1, 1, 1, 2]


_MODULES_OF_OURS = """
import json, sys
from sweep.predict.memory.tracing.__main__ import answer

asked = json.loads(sys.argv[1])
assert "profile" in answer(asked), answer(asked)
rooms = ("search_spaces", "storage", "sweep", "reports")
ours = (module for name, module in sys.modules.items() if name.partition(".")[0] in rooms)
print(json.dumps([module.__file__ for module in ours]))
"""


def test_a_profile_is_of_no_use_once_any_code_that_traced_it_changes() -> None:
    """Every module of ours that the child has imported when it answers is in the fingerprint."""
    structure = Structure.of(TrialConfig(kernels="liger"), is_checkpointed=True)
    asked = {"model": model("llama").to_json(), "structure": structure.to_json()}
    command = (sys.executable, "-P", "-c", _MODULES_OF_OURS, json.dumps(asked))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {Path(file) for file in json.loads(done.stdout)}
    assert len(imported) > 10
    outside = {path.name for path in imported - set(source_files(*TRACED_BY))}
    # Packages around them hold a docstring; whose names they are, how a result is kept and with
    # whom the child ends decides no number.
    assert outside <= {"__init__.py", "namesakes.py", "records.py", "processes.py"}
