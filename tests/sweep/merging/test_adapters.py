"""Adapters of every kind that PEFT loads, merged: their logits after reloading are PEFT's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.errors import InputError
from tests.sweep.merging.made import make_base

pytestmark = pytest.mark.filterwarnings("ignore")
VOCABULARY = 700
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
TIED = LLAMA | {"tie_word_embeddings": True}


def small(kind: str, **values: Any) -> dict[str, Any]:
    """Return the config of a tiny model of a kind that names sizes as Llama does."""
    return LLAMA | {"model_type": kind, **values}


GPT2 = {"model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}
BLOOM = {"model_type": "bloom", "vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2}
BLOOM |= {"n_head": 4}
MPT = {"model_type": "mpt", "vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4}
CODEGEN = GPT2 | {"model_type": "codegen", "rotary_dim": 4, "n_positions": 128}
CODEGEN |= {"tie_word_embeddings": False}
MIXTRAL = small("mixtral", num_local_experts=4, num_experts_per_tok=2)
QWEN_MOE = small(
    "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
)
GPT_OSS = small("gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=8)
Q_V = {"target_modules": ["q_proj", "v_proj"]}


@dataclass(frozen=True)
class Case:
    """An adapter to be made, by PEFT's name of its configuration."""

    config: dict[str, Any] = field(default_factory=lambda: LLAMA)
    kind: str = "LoraConfig"
    options: dict[str, Any] = field(default_factory=lambda: dict(Q_V))
    rows: int | None = None
    """Tokens after resizing."""
    save: dict[str, Any] = field(default_factory=dict)
    noise: float = 0.2
    """What is added to what is trained."""


def lora(config: dict[str, Any] = LLAMA, **options: Any) -> Case:
    options = {"r": 4, "lora_alpha": 12, **options}
    if "target_parameters" not in options:
        options.setdefault("target_modules", ["q_proj", "v_proj"])
    return Case(config=config, options=options)


def resized(
    rows: int, config: dict[str, Any] = LLAMA, *, save: Any = "auto", **options: Any
) -> Case:
    case = lora(config, **options)
    return Case(case.config, case.kind, case.options, rows, {"save_embedding_layers": save})


def other(kind: str, config: dict[str, Any] = LLAMA, **options: Any) -> Case:
    options.setdefault("target_modules", ["q_proj", "v_proj"])
    return Case(config=config, kind=kind, options=options)


CASES = {
    "plain": lora(),
    "rslora": lora(use_rslora=True, target_modules="all-linear"),
    "patterns": lora(rank_pattern={"q_proj": 2}, alpha_pattern={"layers.1.self_attn.v_proj": 3}),
    "regex patterns": lora(rank_pattern={r".*\.1\.self_attn\.q_proj": 2}),
    "dora": lora(use_dora=True),
    "dora of conv1d": lora(GPT2, use_dora=True, target_modules=["c_attn"], fan_in_fan_out=True),
    "dora of an embedding": lora(use_dora=True, target_modules=["embed_tokens", "q_proj"]),
    "lora bias": lora(small("qwen2"), lora_bias=True),
    "all biases": lora(small("qwen2"), bias="all"),
    "biases of lora": lora(small("qwen2"), bias="lora_only"),
    "conv1d": lora(GPT2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
    "some layers": lora(target_modules=r".*layers\.0\..*_proj", exclude_modules=["down_proj"]),
    "whole head": lora(modules_to_save=["lm_head"]),
    "whole head, tied": lora(TIED, modules_to_save=["lm_head"]),
    "whole embedding and head, tied": lora(TIED, modules_to_save=["embed_tokens", "lm_head"]),
    "kept tied": lora(TIED, modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "whole norm": lora(modules_to_save=["input_layernorm"]),
    "lora of a head": lora(target_modules=["lm_head", "q_proj"]),
    "lora of a tied head": lora(TIED, target_modules=["lm_head", "q_proj"]),
    "lora of an embedding": lora(target_modules=["embed_tokens", "q_proj"]),
    "lora of a tied embedding": lora(TIED, target_modules=["embed_tokens", "q_proj"]),
    "lora of both, tied": lora(TIED, target_modules=["embed_tokens", "lm_head"]),
    "lora of gpt2's embedding": lora(GPT2, target_modules=["wte", "c_attn"]),
    "tokens": lora(trainable_token_indices=[3, 5, 699]),
    "tokens, tied": lora(TIED, trainable_token_indices=[3, 5, 699]),
    "tokens of both": lora(trainable_token_indices={"embed_tokens": [3, 5], "lm_head": [7]}),
    "pissa": lora(init_lora_weights="pissa"),
    "olora": lora(init_lora_weights="olora"),
    "eva": lora(init_lora_weights="eva"),
    "orthogonal": lora(init_lora_weights="orthogonal"),
    "mica": lora(init_lora_weights="mica"),
    "larger, auto": resized(706),
    "smaller": resized(690),
    "larger, not saved": resized(706, save=False),
    "larger, tied": resized(706, TIED),
    "smaller, tied": resized(690, TIED),
    "larger, trained": resized(706, modules_to_save=["embed_tokens", "lm_head"]),
    "larger, trained, tied": resized(706, TIED, modules_to_save=["embed_tokens", "lm_head"]),
    "larger, lora of both": resized(706, target_modules=["embed_tokens", "lm_head"]),
    "larger, tokens": resized(706, trainable_token_indices=[700, 701, 702, 703, 704, 705]),
    "larger, gpt2": resized(706, GPT2, target_modules=["c_attn"]),
    "larger, bloom": resized(706, BLOOM, target_modules=["query_key_value"]),
    "mpt": lora(MPT, target_modules=["Wqkv", "up_proj"]),
    "codegen": lora(CODEGEN, target_modules=["qkv_proj"]),
    "gpt-oss, experts": lora(
        GPT_OSS,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    ),
    "mixtral, experts": lora(
        MIXTRAL, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    ),
    "qwen3-moe, experts": lora(
        QWEN_MOE, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"]
    ),
    "phi3": lora(small("phi3", pad_token_id=0), target_modules=["qkv_proj", "gate_up_proj"]),
    "falcon": lora(
        small("falcon", alibi=False, new_decoder_architecture=True),
        target_modules=["query_key_value"],
    ),
    "gpt-neox": lora(small("gpt_neox"), target_modules=["query_key_value"]),
    "deepseek": lora(
        small(
            "deepseek_v3",
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
        ),
        target_modules=["kv_b_proj", "down_proj"],
        target_parameters=["mlp.experts.down_proj"],
    ),
    "adalora": other("AdaLoraConfig", total_step=10, init_r=4),
    "ia3": other(
        "IA3Config", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    **{
        kind.lower(): other(f"{kind}Config", r=4)
        for kind in ("LoHa", "LoKr", "HRA", "Miss", "Shira", "RandLora", "Delora", "Psoft", "Hira")
    },
    "oft": other("OFTConfig", oft_block_size=8),
    "boft": other("BOFTConfig", boft_block_size=4),
    "vera": other("VeraConfig", r=4, target_modules=["q_proj", "o_proj"]),
    "vera, not saved": other(
        "VeraConfig", r=4, target_modules=["q_proj", "o_proj"], save_projection=False
    ),
    "layer norms": other("LNTuningConfig", target_modules=["input_layernorm"]),
    "only tokens": other(
        "TrainableTokensConfig", target_modules=["embed_tokens"], token_indices=[14]
    ),
    "fourier": other("FourierFTConfig", n_frequency=20),
    "road": other("RoadConfig", group_size=8),
    "c3a": other("C3AConfig", block_size=4),
    "waveft": other("WaveFTConfig", n_frequency=20),
    "vblora": other("VBLoRAConfig", r=4, vector_length=8, num_vectors=16),
    "gralora": other("GraloraConfig", r=4, gralora_k=2),
    "tinylora": other("TinyLoraConfig", r=2),
}


def make(case: Case, directory: Path) -> tuple[Path, Path]:
    """Write a base in fp32 and an adapter on it."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    base = make_base(directory / "base", case.config, shard="60KB")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if case.rows is not None:
        model.resize_token_embeddings(case.rows)
    torch.manual_seed(1)
    adapted = peft.get_peft_model(
        model, getattr(peft, case.kind)(task_type="CAUSAL_LM", **case.options)
    )
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += case.noise * torch.randn_like(parameter)
    adapted.save_pretrained(directory / "adapter", **case.save)
    return base, directory / "adapter"


def judged(case: Case, base: Path, adapter: Path) -> Any:
    """Return PEFT's logits of base and adapter, in fp32."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if case.rows is not None and case.save.get("save_embedding_layers") is not False:
        model.resize_token_embeddings(case.rows)
    return peft.PeftModel.from_pretrained(model, adapter).eval()


def logits(model: Any, count: int = 690) -> Any:
    import torch

    tokens = torch.arange(3, count, 11).reshape(1, -1)
    with torch.no_grad():
        return model(input_ids=tokens).logits.float()


def merged_model(base: Path, adapter: Path, directory: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from qlora_sweep.sweep.merging.merged import Merge

    directory.mkdir()
    Merge(adapter, base).write(directory)
    model, found = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def apart(found: Any, expected: Any) -> float:
    """Return how far logits are apart, as a share of their spread."""
    assert found.shape == expected.shape
    return float((found - expected).abs().mean() / expected.std())


RARE = """
adalora | all biases | biases of lora | boft | c3a | codegen | deepseek | delora |
dora of an embedding | eva | falcon | fourier | gpt-neox | gralora | hira | hra |
larger, bloom | larger, gpt2 | larger, trained | layer norms | lokr | lora of a head |
lora of gpt2's embedding | mica | miss | mixtral, experts | oft | olora | only tokens |
orthogonal | phi3 | psoft | randlora | regex patterns | road | shira | smaller |
smaller, tied | some layers | tinylora | tokens | vblora | vera, not saved | waveft | whole head
"""
"""What goes the way of another adapter, which the fast tests have."""


def params() -> Iterator[Any]:
    rare = set(" ".join(RARE.split("\n")).strip().split(" | "))
    assert CASES.keys() >= rare
    for name, case in CASES.items():
        marks = []
        if name in rare:
            marks.append(pytest.mark.integration)
        yield pytest.param(case, id=name, marks=marks)


@pytest.mark.parametrize("case", list(params()))
def test_the_logits_after_reloading_are_pefts(case: Case, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base, adapter = make(case, tmp_path)
    expected = logits(judged(case, base, adapter))
    found = logits(merged_model(base, adapter, tmp_path / "merged"))
    plain = logits(AutoModelForCausalLM.from_pretrained(base).float().eval())
    width = min(plain.shape[-1], expected.shape[-1])
    effect = apart(plain[..., :width], expected[..., :width])
    assert effect > 0.005
    assert apart(found, expected) < 0.002 + 0.05 * effect


@pytest.mark.parametrize(
    ("saved", "filled"),
    [
        (["embed_tokens", "lm_head"], []),
        (["embed_tokens"], ["lm_head.weight"]),
    ],
)
def test_added_tokens_that_nothing_holds_are_said(
    saved: list[str], filled: list[str], tmp_path: Path
) -> None:
    from qlora_sweep.sweep.merging.merged import Merge

    case = resized(706, save=False, modules_to_save=saved)
    base, adapter = make(case, tmp_path)
    (tmp_path / "merged").mkdir()
    merge = Merge(adapter, base)
    merge.write(tmp_path / "merged")
    assert [note.partition(":")[0] for note in merge.notes] == filled


def test_an_adapter_of_a_model_without_a_head_is_merged_into_the_whole(tmp_path: Path) -> None:
    import peft
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    base, _ = make(CASES["plain"], tmp_path)
    model = AutoModel.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(task_type="FEATURE_EXTRACTION", **CASES["plain"].options)
    adapted = peft.get_peft_model(model, config)
    for parameter in adapted.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter) * parameter.requires_grad
    adapted.save_pretrained(tmp_path / "headless")
    head = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).lm_head
    tokens = torch.arange(3, 690, 11).reshape(1, -1)
    with torch.no_grad():
        expected = head(adapted.eval()(input_ids=tokens).last_hidden_state)
    found = logits(merged_model(base, tmp_path / "headless", tmp_path / "merged"))
    assert apart(found, expected) < 0.05


def test_an_adapter_that_classifies_is_refused(tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForSequenceClassification

    from qlora_sweep.sweep.merging.merged import Merge

    base, _ = make(CASES["plain"], tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    config = peft.LoraConfig(task_type="SEQ_CLS", **CASES["plain"].options)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "labels")
    with pytest.raises(InputError, match="SEQ_CLS"):
        Merge(tmp_path / "labels", base)
