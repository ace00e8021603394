"""Models whose attention caps its scores: trained as transformers' eager attention has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.search_spaces.rules import own_settings
from qlora_sweep.storage.records import Measured
from tests.lazy import lazily
from tests.sweep.training.tiny import BRIEF, tiny_base, tiny_config, trial_on

torch = lazily("torch")
transformers = lazily("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize("kind", ["gemma2", "vaultgemma"])
def test_scores_beyond_the_cap_come_out_as_in_eager_attention(kind: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(kind, **SIZES, attn_logit_softcapping=5.0)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(40)
            layer.self_attn.k_proj.weight.mul_(40)
    model.save_pretrained(tmp_path)
    rows = torch.arange(3, 60)[None]
    spec = load_model_spec(str(tmp_path))
    own = {key: value for key, (value, _) in own_settings(spec).items()}
    exact = {"quantization": "none", "compute_dtype": "fp32"}
    logits = {}
    for attention in (own["attention"], "sdpa"):
        asked = tiny_config(**exact, attention=attention)
        with tiny_base(asked, spec=spec, weights="pretrained") as base, torch.no_grad():
            logits[attention] = base.model.eval()(input_ids=rows).logits
    with torch.no_grad():
        expected = model.eval()(input_ids=rows).logits
    torch.testing.assert_close(logits["eager"], expected)
    assert float((logits["sdpa"] - expected).abs().max()) > 0.01
    with tiny_base(tiny_config(**own), spec=spec, weights="pretrained") as base:
        outcome = trial_on(base, tiny_config(**own), steps=BRIEF).run()
    assert isinstance(outcome, Measured), outcome
