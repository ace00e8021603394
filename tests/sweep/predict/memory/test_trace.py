"""Tracing real transformers and PEFT code without data, in the child that does it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TRL_TILE, TrialConfig, parse_config
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.linears import has_experts, parameters, unquantized
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from qlora_sweep.search_spaces.rules import (
    LIGER_MODEL_TYPES,
    attention_of,
    own_settings,
    violation,
)
from qlora_sweep.sweep.predict.memory.prediction import MemoryPrediction, WholeMemory
from qlora_sweep.sweep.predict.memory.predictor import TracingPredictor
from qlora_sweep.sweep.predict.memory.profile_store import TRACED_BY, TracingChildren, source_files
from qlora_sweep.sweep.predict.memory.profiles import Profile, Structure, Untraceable
from tests.families import tiny_config_of
from tests.search_spaces.shipped_types import one_of_each_type
from tests.sweep.predict.memory.imagined_profile import MODEL, ImaginedTracer
from tests.sweep.shared_tracing import trace
from tests.tables import cases, column

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
MODELS = {
    "falcon": FALCON,
    "qwen3": SMALL,
    "phi3": SMALL,
    "gemma2": {**SMALL, "sliding_window": 128},
    "granite": SMALL,
    "gpt_neox": SMALL,
    "gpt2": {"n_embd": 256, "n_layer": 6, "n_head": 8, "vocab_size": 5000, "pad_token_id": 0}
    | {"num_hidden_layers": 6, "hidden_size": 256},
}


LEFT = ["lm_head", "model.layers.5.mlp", "model.layers.7.", "model.layers.13.mlp"]
IN_16_BITS = TrialConfig(quantization="none")


def model(kind: str, **changes: Any) -> ModelSpec:
    return ModelSpec(kind, "directory", {"model_type": kind, **MODELS.get(kind, SMALL), **changes})


@pytest.mark.parametrize("kind", sorted(set(MODELS) - {"falcon"}))
def test_a_few_layers_tell_of_all(predictor: Any, kind: str) -> None:
    """A list with one value a layer makes each layer one of a kind, so that all are traced."""
    whole = model(kind, every_layer_is_its_own=list(range(6)))
    config = TrialConfig(
        micro_batch_size=3, seq_len=200, checkpoint_fraction=0.5, target_modules="all-linear"
    )
    extrapolated = predictor(model(kind)).predict(config)
    traced = predictor(whole).predict(config)
    assert len(set(traced.step.profile.positions)) == 6
    assert len(set(extrapolated.step.profile.positions)) < 6
    assert extrapolated.peak_allocated_bytes == traced.peak_allocated_bytes
    assert extrapolated.breakdown == traced.breakdown
    assert extrapolated.breakdown["adapters"] > 0


def test_beyond_its_window_a_model_needs_masks(predictor: Any) -> None:
    windowed, plain = model("mistral", sliding_window=256), model("mistral", sliding_window=None)
    for length, is_equal in ((255, True), (256, False)):
        config = TrialConfig(seq_len=length, checkpoint_fraction=0.0)
        peaks = [predictor(spec).predict(config).peak_allocated_bytes for spec in (windowed, plain)]
        assert (peaks[0] == peaks[1]) is is_equal


def test_without_flash_attention_grouped_heads_cost_the_scores(predictor: Any) -> None:
    config = TrialConfig(compute_dtype="fp16", seq_len=2048, checkpoint_fraction=0.0)
    old, new = (predictor(model("llama"), known).predict(config) for known in ((7, 5), (8, 6)))
    scores = 6 * 4 * 8 * 2048 * 2048 * 2  # layers, sequences, heads, rows, columns, fp16
    assert old.breakdown["activations"] - new.breakdown["activations"] >= scores


@pytest.mark.parametrize(
    ("spec", "keys", "names"),
    cases(
        r"""
        {model_type: llama} | {target_modules: [q_prj]} | no linear layer 'q_prj'.*'q_proj'
        {model_type: llama, num_key_value_heads: 3} | {} | self_attn
        {model_type: llama, num_attention_heads: many} | {} | cannot be built
        {model_type: gemma3} | {} | multimodal.*model_type 'gemma3_text'
        {model_type: t5} | {} | t5
        """
    ),
)
def test_bad_configs(
    predictor: Any, spec: dict[str, Any], keys: dict[str, Any], names: str
) -> None:
    with pytest.raises(InputError, match=names) as caught:
        predictor(model(spec["model_type"], **spec)).predict(parse_config(keys))
    assert not isinstance(caught.value, Untraceable)


@pytest.mark.parametrize(
    ("spec", "keys", "names"),
    [
        (model("llama4_text", **MOE), {}, r"only \d+(\.\d)? % .* in 4 bits.*use quantization none"),
        (model("falcon"), {}, r"only 0 % of its matrices' weights"),
        (model("rwkv"), {"attention": "eager"}, "loops over the tokens in plain PyTorch"),
        (
            model("bamba", mamba_n_heads=8, mamba_d_head=64, attn_layer_indices=[1, 3, 5]),
            {},
            "memory is not predicted: .* state-space layers .* have to be built from source",
        ),
        (
            model("minimax", **MOE),
            {"quantization": "none", "target_modules": "qv"},
            "works in chunks of the sequence",
        ),
    ],
)
def test_what_cannot_be_traced_says_why(
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


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_what_waits_on_the_host_is_not_kept(predictor: Any, fraction: float) -> None:
    saved: dict[int, int] = {}
    for layers in (12, 24):
        spec = model("llama", num_hidden_layers=layers)
        asked = TrialConfig(seq_len=512, checkpoint_fraction=fraction, upcast_fp32=False)
        kept, waiting = (
            predictor(spec).predict(asked.changed(checkpoint_offload=is_on_host))
            for is_on_host in (False, True)
        )
        saved[layers] = kept.peak_allocated_bytes - waiting.peak_allocated_bytes
    hidden_bytes = asked.tokens_per_micro_batch * SMALL["hidden_size"] * 2
    assert saved[24] - saved[12] == 12 * fraction * hidden_bytes


def test_a_few_layers_tell_of_all_whose_inputs_wait_on_the_host(predictor: Any) -> None:
    whole = model("llama", every_layer_is_its_own=list(range(6)))
    config = TrialConfig(
        micro_batch_size=3, seq_len=200, checkpoint_fraction=0.5, checkpoint_offload=True
    )
    extrapolated = predictor(model("llama")).predict(config)
    traced = predictor(whole).predict(config)
    assert extrapolated.peak_allocated_bytes == traced.peak_allocated_bytes
    assert extrapolated.breakdown == traced.breakdown


def test_experts_on_the_host_leave_two_layers_here(predictor: Any) -> None:
    tracing = predictor(model("mixtral", **MOE))
    shares = (0.0, 1 / 3, 0.5, 2 / 3, 1.0)
    found = [tracing.predict(TrialConfig(offload_fraction=share)) for share in shares]
    weights = 4 * 3 * 256 * 256  # experts, matrices, hidden, inner
    layer = weights // 2 + weights // 64  # in 4 bits, a byte for the scale of each block
    for prediction, gone in zip(found[1:], (0, 1, 2, 4), strict=True):
        assert found[0].peak_allocated_bytes - prediction.peak_allocated_bytes == gone * layer
        less = found[0].breakdown["weights"] - prediction.breakdown["weights"]
        assert less == gone * layer


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_experts_in_8_bits_take_a_byte_and_a_scale(predictor: Any, kind: str) -> None:
    tracing = predictor(model("mixtral", **MOE))
    wide = tracing.predict(IN_16_BITS)
    narrow = tracing.predict(TrialConfig(quantization=kind))
    assert narrow.quantized_share == 1.0
    weights = 6 * 4 * 3 * 256 * 256  # layers, experts, matrices, hidden, inner
    scales = 6 * 4 * 4 * (2 * 256 + 256)
    of_attention = 6 * (2 * 256 * 256 + 2 * 256 * 128)
    less = wide.breakdown["weights"] - narrow.breakdown["weights"]
    assert less == pytest.approx(weights - scales + of_attention, rel=0.01)


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


def test_a_norm_that_leaves_autocast_out_stays_in_16_bits(predictor: Any) -> None:
    """Of this configuration an H200 with torch 2.11 allocated 79,238,656 bytes (2026-11-30)."""
    nemotron = ModelSpec("nemotron", "directory", tiny_config_of("nemotron"))
    config = TrialConfig(
        lora_rank=4, micro_batch_size=3, seq_len=256, checkpoint_fraction=0.5, learning_rate=1e-4
    )
    found = predictor(nemotron).predict(config)
    assert found.peak_allocated_bytes == pytest.approx(79_238_656, rel=1e-4)


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3", "mixtral"])
def test_the_fused_loss_spares_the_logits_of_any_model(predictor: Any, kind: str) -> None:
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


def test_grpos_head_has_one_tile_of_logits_whatever_the_vocabulary(predictor: Any) -> None:
    config = TrialConfig(method="grpo", micro_batch_size=8, seq_len=1024, upcast_fp32=False)
    small, large = (
        predictor(model("qwen3", vocab_size=size)).predict(config).breakdown["loss"]
        for size in (50_000, 100_000)
    )
    assert math.prod(TRL_TILE) * 2 <= small == large


_FILES_THAT_RAN = """
import json, sys
from qlora_sweep.sweep.predict.memory.tracing.__main__ import answer

ran, asked = set(), json.loads(sys.argv[1])
# Once before, as imports run everything.
answer(asked[0])
sys.setprofile(lambda frame, *_: ran.add(frame.f_code.co_filename))
answers = list(map(answer, asked))
sys.setprofile(None)
assert all("profile" in each for each in answers), answers
print(json.dumps(list(ran)))
"""


def test_a_profile_is_of_no_use_once_any_code_that_traced_it_changes() -> None:
    """Every module of ours of which anything runs when the child answers is in the fingerprint."""
    settings: list[dict[str, Any]] = [
        {"kernels": "liger"},
        {"compute_dtype": "int8", "quantization": "int8", "compile": True, "lora_dropout": 0.1},
        {"compute_dtype": "fp8", "quantization": "nf4", "adapter_dtype": "bf16"},
        {"packing": "packed", "quantization": "none", "attention": "eager"},
    ]
    asked = [
        {"model": model("llama").to_json(), "structure": structure.to_json()}
        for one in settings
        for structure in [Structure.of(TrialConfig(**one), is_checkpointed=True)]
    ]
    command = (sys.executable, "-P", "-c", _FILES_THAT_RAN, json.dumps(asked))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ran = {Path(file).resolve() for file in json.loads(done.stdout)}
    ours = ran & set(source_files("search_spaces", "storage", "reports", "sweep"))
    assert len(ours) > 10
    assert ours <= set(source_files(*TRACED_BY))


def test_layers_that_are_stored_otherwise_are_not_taken_for_others(predictor: Any) -> None:
    """Of a checkpoint in 4 bits but for some modules, though few of its layers are traced."""
    weights = []
    for left in (["lm_head"], LEFT):
        said = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": left}
        spec = model("llama", num_hidden_layers=16, quantization_config=said)
        own = {key: value for key, (value, _) in own_settings(spec).items()}
        config = TrialConfig(**own, upcast_fp32=False, micro_batch_size=2, seq_len=64)
        predicted = predictor(spec).predict(config)
        assert predicted.quantized_share == 1.0
        weights.append(predicted.breakdown["weights"])
    mlp = 3 * 256 * 704
    attention = 2 * 256 * 256 + 2 * 256 * 128
    # Two bytes in place of a half, and of four for the constant of each 64.
    expected = (3 * mlp + attention) * (2 - 0.5 - 4 / 64)
    assert weights[1] - weights[0] == pytest.approx(expected, rel=0.02)


# Profiles of models part of whose layers are in 4 bits, put together from two that are traced

LAYERS = 6


@pytest.mark.parametrize(
    "settings",
    column(
        """
        {}
        {kernels: liger, checkpoint_fraction: 0.0, target_modules: all-linear}
        {compile: true, upcast_fp32: false, checkpoint_fraction: 0.0}
        {expandable_segments: true, upcast_fp32: false, checkpoint_fraction: 0.0}
        """
    ),
    ids=str,
)
def test_what_is_put_together_takes_what_is_traced_as_a_whole(
    predictor: Any, tracing_child: TracingChildren, settings: dict[str, Any]
) -> None:
    shape = {"micro_batch_size": 3, "seq_len": 200, "lora_rank": 64, "effective_batch_size": 9}
    config = TrialConfig(quantized_fraction=0.5, **settings, **shape)
    put_together = predictor(model("llama")).predict(config)
    is_checkpointed = config.checkpoint_fraction > 0
    whole = model("llama", every_layer_is_its_own=list(range(LAYERS)))
    structure = Structure.of(config, is_checkpointed=is_checkpointed)
    traced = Profile.from_json(trace(tracing_child, whole, structure))
    assert put_together.step is not None
    step = replace(put_together.step, profiles={is_checkpointed: traced})
    expected = WholeMemory([config], [step]).prediction(0)
    # The base of equal layers has other remainders, of less than a MiB each, than one of both.
    slack = 2**20 * LAYERS
    parts = put_together.breakdown
    assert parts["weights"] == pytest.approx(expected.breakdown["weights"], abs=slack)
    for part in ("adapters", "gradients", "optimizer", "loss"):
        assert parts[part] == expected.breakdown[part]
    activations = expected.breakdown["activations"]
    assert parts["activations"] == pytest.approx(activations, rel=0.01)
    assert put_together.moment == expected.moment
    reserved = expected.peak_reserved_bytes
    assert put_together.peak_reserved_bytes == pytest.approx(reserved, rel=0.05)


# What each of several GPUs needs, beside one alone

TINYLLAMA = load_model_spec("tinyllama-1.1b")
LEAN = {"upcast_fp32": False, "optimizer": "adamw_torch_fused", "micro_batch_size": 2}
SHARED = {**LEAN, "sharding": "fsdp"}


@pytest.fixture
def tiny(predictor: Any) -> TracingPredictor:
    return predictor(TINYLLAMA)


def predict(predictor: TracingPredictor, **settings: Any) -> MemoryPrediction:
    return predictor.predict(parse_config({**LEAN, **settings}))


def test_gradients_are_there_once_in_buckets(tiny: TracingPredictor) -> None:
    batches = {"effective_batch_size": 16}
    alone, together = predict(tiny), predict(tiny, data_parallel=2)
    accumulated = predict(tiny, **batches)
    both = predict(tiny, data_parallel=2, **batches)
    adapters = alone.breakdown["adapters"]
    assert together.breakdown["gradients"] >= adapters
    assert together.peak_allocated_bytes == accumulated.peak_allocated_bytes
    assert both.peak_allocated_bytes == together.peak_allocated_bytes + adapters
    assert predict(tiny, data_parallel=4).breakdown == together.breakdown


def test_the_more_gpus_share_a_model_the_less_each_of_them_holds(tiny: TracingPredictor) -> None:
    whole = predict(tiny).breakdown
    two, four = (predict(tiny, **SHARED, data_parallel=n).breakdown for n in (2, 4))
    for part in ("weights", "adapters", "optimizer"):
        assert four[part] < two[part] < whole[part], part
    assert two["adapters"] == pytest.approx(whole["adapters"] / 2, rel=0.01)
    # Half of what can be shared, and all constants.
    assert two["weights"] > whole["weights"] / 2


TIED = ModelSpec(
    MODEL.name,
    MODEL.source,
    # The dimensions of a model whose layers are known, and a profile by hand.
    {**TINYLLAMA.config, **MODEL.config, "model_type": "llama", "tie_word_embeddings": True},
)


def test_a_head_that_is_the_embedding_is_there_throughout(tmp_path: Path) -> None:
    apart = ModelSpec(MODEL.name, MODEL.source, {**TIED.config, "tie_word_embeddings": False})
    weights = []
    for spec in (apart, TIED):
        predictor = TracingPredictor(spec, cache_dir=tmp_path, tracer=ImaginedTracer())
        shared = predict(predictor, **SHARED, data_parallel=2)
        weights.append(shared.breakdown["weights"])
    head = MODEL.config["vocab_size"] * MODEL.config["hidden_size"] * 2
    # It is whole beside its share. Of a base of one size, more is no parameter where one is less.
    assert weights[1] - weights[0] == head + head // 2


def test_what_was_never_measured_is_less_sure(tiny: TracingPredictor) -> None:
    measured = predict(tiny, **SHARED, data_parallel=2).uncertainty
    assert predict(tiny, **SHARED, data_parallel=4).uncertainty > measured


def test_what_nobody_knows_the_layers_of_has_no_prediction_for_its_shares(tmp_path: Path) -> None:
    unknown = ModelSpec(MODEL.name, MODEL.source, {**MODEL.config, "model_type": "brand_new"})
    predictor = TracingPredictor(unknown, cache_dir=tmp_path, tracer=ImaginedTracer())
    with pytest.raises(InputError, match="what each GPU holds of them is not predicted"):
        predict(predictor, **SHARED, data_parallel=2)


# What is predicted of every shipped architecture before anything runs, or why it is refused

HOPPER = (9, 0)


def refused(spec: ModelSpec, config: TrialConfig) -> str | None:
    found = violation(config, model=spec, compute_capability=HOPPER, device="cuda")
    return None if found is None else f"{found.rule}: {found.reason}"


@pytest.mark.parametrize("spec", one_of_each_type(), ids=lambda spec: spec.name)
def test_the_memory_of_every_shipped_type_is_predicted(predictor: Any, spec: ModelSpec) -> None:
    is_mixture = unquantized(spec) is not None
    config = TrialConfig(
        micro_batch_size=2,
        quantization="none" if is_mixture else "nf4",
        attention=attention_of(spec),
    )
    size = parameters(spec)
    assert refused(spec, config) is None
    prediction = predictor(spec).predict(config)
    # Half a byte for a weight in 4 bits, two in 16, four for an embedding that the upcast widens.
    least, most = (2.0, 3.0) if is_mixture else (0.5, 4.0)
    assert least * size < prediction.breakdown["weights"] < most * size
    assert prediction.breakdown["adapters"] > 0
    assert prediction.quantized_share == (None if is_mixture else 1.0)
    fused = config.changed(kernels="fused-loss")
    if spec.model_type not in LIGER_MODEL_TYPES:
        assert str(refused(spec, fused)).startswith("kernels-need-liger-model")
        return
    # Without written logits it takes less, but where the decoded experts of a layer decide.
    assert refused(spec, fused) is None
    peak = predictor(spec).predict(fused).peak_allocated_bytes
    assert peak < prediction.peak_allocated_bytes or has_experts(spec)
    assert peak <= prediction.peak_allocated_bytes
