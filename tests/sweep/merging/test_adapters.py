"""Adapters of every kind that PEFT loads, merged: their logits after reloading are PEFT's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from qlora_sweep.search_spaces.errors import InputError
from tests.sweep.merging.made import make_base

pytestmark = pytest.mark.filterwarnings("ignore")
LLAMA = {
    "model_type": "llama",
    "vocab_size": 700,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
MODELS = """
tied: {model_type: llama, tie_word_embeddings: true}
gpt2: {tie_word_embeddings: true}
bloom: {tie_word_embeddings: true}
mpt: {tie_word_embeddings: true}
codegen: {rotary_dim: 4, n_positions: 128}
mixtral: {num_local_experts: 4, num_experts_per_tok: 2}
qwen3_moe: {num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16, head_dim: 8}
gpt_oss: {num_local_experts: 4, num_experts_per_tok: 2, head_dim: 8}
phi3: {pad_token_id: 0}
falcon: {alibi: false, new_decoder_architecture: true}
deepseek_v3:
  {n_routed_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16, q_lora_rank: 8,
   kv_lora_rank: 8, qk_rope_head_dim: 4, qk_nope_head_dim: 4, v_head_dim: 8, n_group: 1,
   topk_group: 1, first_k_dense_replace: 1}
"""
"""What a tiny model of a type has beside Llama's sizes."""

COMMON = r"""
plain: {}
rslora: {use_rslora: true, target_modules: all-linear}
patterns: {rank_pattern: {q_proj: 2}, alpha_pattern: {layers.1.self_attn.v_proj: 3}}
dora: {use_dora: true}
dora of conv1d: {model: gpt2, use_dora: true, target_modules: [c_attn], fan_in_fan_out: true}
lora bias: {model: qwen2, lora_bias: true}
conv1d: {model: gpt2, target_modules: [c_attn, c_proj], fan_in_fan_out: true}
whole head, tied: {model: tied, modules_to_save: [lm_head]}
whole embedding and head, tied: {model: tied, modules_to_save: [embed_tokens, lm_head]}
kept tied: {model: tied, modules_to_save: [embed_tokens], ensure_weight_tying: true}
whole norm: {modules_to_save: [input_layernorm]}
lora of a tied head: {model: tied, target_modules: [lm_head, q_proj]}
lora of an embedding: {target_modules: [embed_tokens, q_proj]}
lora of a tied embedding: {model: tied, target_modules: [embed_tokens, q_proj]}
lora of both, tied: {model: tied, target_modules: [embed_tokens, lm_head]}
tokens, tied: {model: tied, trainable_token_indices: [3, 5, 699]}
tokens of both: {trainable_token_indices: {embed_tokens: [3, 5], lm_head: [7]}}
pissa: {init_lora_weights: pissa}
larger: {rows: 706}
larger, not saved: {rows: 706, save: false}
larger, tied: {rows: 706, model: tied}
larger, trained, tied: {rows: 706, model: tied, modules_to_save: [embed_tokens, lm_head]}
larger, lora of both: {rows: 706, target_modules: [embed_tokens, lm_head]}
larger, tokens: {rows: 706, trainable_token_indices: [700, 701, 702, 703, 704, 705]}
mpt: {model: mpt, target_modules: [Wqkv, up_proj]}
gpt-oss, experts:
  {model: gpt_oss, target_modules: [q_proj],
   target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]}
qwen3-moe, experts:
  {model: qwen3_moe, target_modules: [q_proj], target_parameters: [mlp.experts.down_proj]}
ia3: {kind: IA3, target_modules: [k_proj, down_proj], feedforward_modules: [down_proj]}
loha: {kind: LoHa, r: 4}
vera: {kind: Vera, r: 4, target_modules: [q_proj, o_proj]}
"""
RARE = r"""
regex patterns: {rank_pattern: {'.*\.1\.self_attn\.q_proj': 2}}
dora of an embedding: {use_dora: true, target_modules: [embed_tokens, q_proj]}
all biases: {model: qwen2, bias: all}
biases of lora: {model: qwen2, bias: lora_only}
some layers: {target_modules: '.*layers\.0\..*_proj', exclude_modules: [down_proj]}
whole head: {modules_to_save: [lm_head]}
lora of a head: {target_modules: [lm_head, q_proj]}
lora of gpt2's embedding: {model: gpt2, target_modules: [wte, c_attn]}
tokens: {trainable_token_indices: [3, 5, 699]}
olora: {init_lora_weights: olora}
eva: {init_lora_weights: eva}
orthogonal: {init_lora_weights: orthogonal}
mica: {init_lora_weights: mica}
smaller: {rows: 690}
smaller, tied: {rows: 690, model: tied}
larger, trained: {rows: 706, modules_to_save: [embed_tokens, lm_head]}
larger, gpt2: {rows: 706, model: gpt2, target_modules: [c_attn]}
larger, bloom: {rows: 706, model: bloom, target_modules: [query_key_value]}
codegen: {model: codegen, target_modules: [qkv_proj]}
mixtral, experts:
  {model: mixtral, target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]}
phi3: {model: phi3, target_modules: [qkv_proj, gate_up_proj]}
falcon: {model: falcon, target_modules: [query_key_value]}
gpt-neox: {model: gpt_neox, target_modules: [query_key_value]}
deepseek:
  {model: deepseek_v3, target_modules: [kv_b_proj, down_proj],
   target_parameters: [mlp.experts.down_proj]}
adalora: {kind: AdaLora, total_step: 10, init_r: 4}
lokr: {kind: LoKr, r: 4}
hra: {kind: HRA, r: 4}
miss: {kind: Miss, r: 4}
shira: {kind: Shira, r: 4}
randlora: {kind: RandLora, r: 4}
delora: {kind: Delora, r: 4}
psoft: {kind: Psoft, r: 4}
hira: {kind: Hira, r: 4}
oft: {kind: OFT, oft_block_size: 8}
boft: {kind: BOFT, boft_block_size: 4}
vera, not saved:
  {kind: Vera, r: 4, target_modules: [q_proj, o_proj], save_projection: false}
layer norms: {kind: LNTuning, target_modules: [input_layernorm]}
only tokens: {kind: TrainableTokens, target_modules: [embed_tokens], token_indices: [14]}
fourier: {kind: FourierFT, n_frequency: 20}
road: {kind: Road, group_size: 8}
c3a: {kind: C3A, block_size: 4}
waveft: {kind: WaveFT, n_frequency: 20}
vblora: {kind: VBLoRA, r: 4, vector_length: 8, num_vectors: 16}
gralora: {kind: Gralora, r: 4, gralora_k: 2}
tinylora: {kind: TinyLora, r: 2}
"""
"""What goes the way of another adapter, which the fast tests have."""


@dataclass(frozen=True)
class Case:
    """An adapter to be made, by PEFT's name of its kind."""

    model: str = "llama"
    kind: str = "Lora"
    rows: int | None = None
    """Tokens after resizing."""
    save: Any = "auto"
    """Whether embeddings are saved that were resized."""
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, **said: Any) -> Case:
        own = {key: said.pop(key) for key in ("model", "kind", "rows", "save") if key in said}
        case = cls(**own, options=said)
        if case.kind == "Lora":
            said |= {"r": 4, "lora_alpha": 12}
        if case.kind != "Lora" or "target_parameters" not in said:
            said.setdefault("target_modules", ["q_proj", "v_proj"])
        return case


def make(case: Case, directory: Path) -> tuple[Path, Path]:
    """Write a base in fp32 and an adapter on it."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    config = {**LLAMA, "model_type": case.model, **yaml.safe_load(MODELS).get(case.model, {})}
    base = make_base(directory / "base", config, shard="60KB")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if case.rows is not None:
        model.resize_token_embeddings(case.rows)
    torch.manual_seed(1)
    adapted = peft.get_peft_model(
        model, getattr(peft, f"{case.kind}Config")(task_type="CAUSAL_LM", **case.options)
    )
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    saved = {} if case.rows is None else {"save_embedding_layers": case.save}
    adapted.save_pretrained(directory / "adapter", **saved)
    return base, directory / "adapter"


def judged(case: Case, base: Path, adapter: Path) -> Any:
    """Return PEFT's logits of base and adapter, in fp32."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if case.rows is not None and case.save is not False:
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


def params() -> Iterator[Any]:
    for table, marks in ((COMMON, []), (RARE, [pytest.mark.integration])):
        for name, said in yaml.safe_load(table).items():
            yield pytest.param(Case.of(**said), id=name, marks=marks)


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

    case = Case.of(rows=706, save=False, modules_to_save=saved)
    base, adapter = make(case, tmp_path)
    (tmp_path / "merged").mkdir()
    merge = Merge(adapter, base)
    merge.write(tmp_path / "merged")
    assert [note.partition(":")[0] for note in merge.notes] == filled


def test_an_adapter_of_a_model_without_a_head_is_merged_into_the_whole(tmp_path: Path) -> None:
    import peft
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    base, _ = make(Case.of(), tmp_path)
    model = AutoModel.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(task_type="FEATURE_EXTRACTION", **Case.of().options)
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

    base, _ = make(Case.of(), tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    config = peft.LoraConfig(task_type="SEQ_CLS", **Case.of().options)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "labels")
    with pytest.raises(InputError, match="SEQ_CLS"):
        Merge(tmp_path / "labels", base)
