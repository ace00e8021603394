"""8-bit products on weights that have learned something: fitted to what goes into them, looked at
layer by layer, and kept in 16 bits where they are too far off.
"""

from __future__ import annotations

from typing import Any

import pytest

from qlora_sweep.search_spaces import rules
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.storage.records import Ineffective
from tests import families
from tests.lazy import lazily
from tests.sweep.training.tiny import (
    BRIEF,
    measured,
    outcome_of,
    saved_with_outliers,
    tiny_base,
    tiny_config,
    trial_on,
)

pytestmark = pytest.mark.usefixtures("few_compared")
torch = lazily("torch")
eight_bit = lazily("qlora_sweep.sweep.training.eight_bit")
fitting = lazily("qlora_sweep.sweep.training.fitting")
KINDS = [("fp8", "fp8"), ("int8", "int8"), ("nf4", "fp8"), ("nf4", "int8")]
INT8: dict[str, Any] = {"compute_dtype": "int8", "quantization": "int8"}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return saved_with_outliers(tmp_path_factory.mktemp("pretrained"))


def outcome(spec: ModelSpec, **settings: Any) -> Any:
    config = tiny_config(**{"upcast_fp32": False, "micro_batch_size": 8, **settings})
    with tiny_base(config, spec=spec, weights="pretrained") as base:
        return trial_on(base, config, steps=BRIEF).run()


def _layer(base: str, kind: str) -> Any:
    """Return a layer of 64 x 128 that multiplies in 8 bits, and inputs of which a feature is large
    and hardly varies, and another is large."""
    import bitsandbytes as bnb

    torch.manual_seed(0)
    wide = torch.nn.Linear(128, 64, bias=False).to(torch.bfloat16)
    layer: Any = torch.nn.Sequential(wide)
    if base == "nf4":
        packed = bnb.nn.Linear4bit(128, 64, bias=False, compute_dtype=torch.bfloat16)
        packed.weight = bnb.nn.Params4bit(
            wide.weight.data, requires_grad=False, quant_type="nf4"
        ).to("cpu")
        layer = torch.nn.Sequential(packed)
    else:
        eight_bit.to_8_bits(layer, base)
    eight_bit.compute_in_8_bits(layer, kind)
    x = torch.randn(256, 128)
    x[:, 5] += 25
    x[:, 9] *= 15
    return layer, x.to(torch.bfloat16)


@pytest.mark.parametrize(("base", "kind"), KINDS)
def test_a_fitted_product_is_nearer_and_so_is_its_gradient(base: str, kind: str) -> None:
    layer, x = _layer(base, kind)
    weight = layer[0].dequantized().float()
    exact = x.float() @ weight.t()
    before = torch.linalg.norm(layer(x).float() - exact)
    with torch.no_grad():
        eight_bit.adapt(layer, lambda: layer(x))
    after = torch.linalg.norm(layer(x).float() - exact)
    assert after < 0.75 * before
    fitted = layer[0].dequantized().float()
    torch.testing.assert_close(fitted, weight, rtol=0.05, atol=0.002)
    # In 16 bits it is the product by its weight, as before.
    with fitting.multiplying_in(layer, None):
        assert torch.linalg.norm(layer(x).float() - x.float() @ fitted.t()) < 0.02 * before + 1
    given = x.clone().requires_grad_()
    gradient = torch.randn(256, 64).to(torch.bfloat16)
    layer(given).backward(gradient)
    exact = gradient.float() @ fitted
    assert torch.linalg.norm(given.grad.float() - exact) < 0.06 * torch.linalg.norm(exact)


@pytest.mark.parametrize(("base", "kind"), [("fp8", "fp8"), ("nf4", "int8")])
def test_a_trial_on_real_weights_says_how_far_each_projection_is_off(
    pretrained: ModelSpec, base: str, kind: str
) -> None:
    settings = {"compute_dtype": kind, "quantization": base, "checkpoint_fraction": 0.5}
    found = measured(outcome(pretrained, **settings)).eight_bit
    assert found is not None
    assert {one.projection for one in found.errors} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    for one in found.errors:
        assert 0 < one.forward <= one.forward_worst
        assert 0 < one.forward_16_bit < one.forward
        assert 0 < one.gradient_16_bit < one.gradient
    assert not found.kept_in_16_bits
    assert found.loss_8_bit == pytest.approx(found.loss_16_bit, rel=0.01)


def test_nothing_is_said_of_random_weights_or_16_bits(pretrained: ModelSpec) -> None:
    assert measured(outcome_of(tiny_config(**INT8), steps=BRIEF)).eight_bit is None
    assert measured(outcome(pretrained, quantization="int8")).eight_bit is None


def test_what_is_too_far_off_stays_in_16_bits(
    pretrained: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = measured(outcome(pretrained, **INT8)).eight_bit
    assert usual is not None
    worst = sorted(one.forward_worst for one in usual.errors)
    monkeypatch.setattr(
        "qlora_sweep.sweep.training.fitting.MOST_ERROR", (worst[-1] + worst[-2]) / 2
    )
    # Two layers of seven projections: the widest is a quarter of the weights.
    monkeypatch.setattr("qlora_sweep.sweep.training.fitting.MOST_SHARE", 0.5)
    config = tiny_config(upcast_fp32=False, micro_batch_size=8, **INT8)
    with tiny_base(config, spec=pretrained, weights="pretrained") as base:
        found = measured(trial_on(base, config, steps=BRIEF).run()).eight_bit
        assert found is not None
        assert len(found.kept_in_16_bits) == 1
        assert 0 < found.share_in_16_bits < 0.25
        kinds = [getattr(m, "products", "") for m in base.model.modules() if hasattr(m, "kind")]
        assert kinds.count(None) == 1
        # The next trial on this base is fitted already.
        assert measured(trial_on(base, config, steps=BRIEF).run()).eight_bit == found


def test_too_many_in_16_bits_are_no_8_bit_training(
    pretrained: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qlora_sweep.sweep.training.fitting.MOST_ERROR", 1e-6)
    found = outcome(pretrained, compute_dtype="fp8", quantization="fp8")
    assert isinstance(found, Ineffective)
    assert found.setting == "compute_dtype"


def _rows(*lengths: int) -> list[Any]:
    return [torch.arange(2, length + 2) for length in lengths]


def _padded(rows: list[Any]) -> Any:
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens == 0, -100)}


def test_the_first_examples_are_as_many_as_a_micro_batch_has_tokens() -> None:
    rows = _rows(8, 9, 10, 20, 30, 30, 30, 30)
    for tokens, shape in ((8, (1, 8)), (80, (4, 20)), (10_000, (8, 30))):
        batch = fitting.first_examples(rows, _padded, tokens=tokens)
        assert batch["input_ids"].shape == shape


@pytest.mark.parametrize("kinds", [1, 2])
def test_of_a_long_example_the_beginning_is_shown(kinds: int) -> None:
    rows = _rows(*(100_000,) * (2 * kinds))
    batch = _padded(rows)
    batch["labels"][:, :50_000] = -100
    shown = fitting.beginning(batch, kinds)
    assert shown["input_ids"].shape == (kinds, 4096 // kinds)
    assert bool((shown["labels"] != -100).any()), "none of the beginning is supervised"
    batch = {key: value[:, :300] for key, value in _padded(rows).items()}
    batch["reference"] = torch.arange(2 * kinds)
    whole = fitting.beginning(batch, kinds)
    assert all(whole[key].equal(batch[key]) for key in batch)


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_layers_of_as_many_features_as_heads_stay_in_16_bits(base: str) -> None:
    config = families.config_of("olmo_hybrid", "attention", base).changed(compute_dtype="int8")
    with tiny_base(config, spec=families.spec_of("olmo_hybrid")) as found:
        layers = dict(found.model.named_modules())
        few = {name for name, layer in layers.items() if name.endswith(("a_proj", "b_proj"))}
        assert len(few) >= 2
        for name in few:
            assert layers[name].out_features == 4
            assert getattr(layers[name], "products", None) is None
        narrow = eight_bit.narrow_layers(found.model)
        assert narrow
        assert not few & narrow.keys()
        assert {layer.products for layer in narrow.values()} == {"int8"}


def test_the_rule_and_the_layers_agree_on_widths() -> None:
    assert eight_bit._WIDTH == rules.EIGHT_BIT_MULTIPLE
