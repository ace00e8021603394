"""Models whose attention caps its scores: trained as transformers' eager attention has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.search_spaces.rules import own_settings
from tests.lazy import lazily
from tests.sweep.training.tiny import BRIEF, TINY, measured, outcome_of, tiny_base, tiny_config

torch = lazily("torch")
transformers = lazily("transformers")

SIZES: dict[str, Any] = {
    **{key: value for key, value in TINY.config.items() if key != "model_type"},
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
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
    attention, _ = own_settings(spec)["attention"]
    assert attention == "eager"

    def logits(attention: str) -> Any:
        asked = tiny_config(quantization="none", compute_dtype="fp32", attention=attention)
        with tiny_base(asked, spec=spec, weights="pretrained") as base, torch.no_grad():
            return base.model.eval()(input_ids=rows).logits

    with torch.no_grad():
        expected = model.eval()(input_ids=rows).logits
    torch.testing.assert_close(logits("eager"), expected)
    assert float((logits("sdpa") - expected).abs().max()) > 0.01
    measured(outcome_of(tiny_config(attention="eager"), spec=spec, steps=BRIEF))
