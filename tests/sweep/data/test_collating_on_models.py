"""What tiny models of the shipped families make of padded and packed rows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.rules import WITHOUT_SDPA
from sweep.data.probing import are_apart, check_is_causal
from sweep.data.rows import IGNORED, Collator
from tests.families import spec_of

SHIPPED = (
    "gemma3_text",
    "gpt_oss",
    "llama",
    "mistral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
WINDOW = 16
WINDOWED = {"gemma3_text", "gpt_oss", "mistral"}
UNAWARE_OF_POSITIONS = {"gpt_oss", "falcon", "mpt", "opt", "bloom"}
"""Families whose masks transformers does not derive from the positions."""
STATEFUL = {"jamba", "qwen3_5_text", "recurrent_gemma"}
LENGTHS = (20, 31, 7)
"""One longer than the window."""


def tiny(family: str, attention: str = "sdpa", **changes: Any) -> Any:
    if family in WITHOUT_SDPA:
        attention = "eager"
    values = {**spec_of(family).config, **changes}
    if family in WINDOWED:
        values["sliding_window"] = WINDOW
    torch.manual_seed(0)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    model.config.use_cache = False
    return model.eval()


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(3, 500, (length,)).tolist() for length in LENGTHS]


def _collated(config: TrialConfig, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return Collator(config, pad_token_id=0)(rows)


@torch.no_grad()
def _alone(model: Any, texts: list[list[int]]) -> list[torch.Tensor]:
    return [model(input_ids=torch.tensor([text])).logits[0] for text in texts]


EAGER_TOO = [("sdpa", family) for family in SHIPPED] + [
    pytest.param("eager", family, marks=[] if family == "gemma3_text" else pytest.mark.slow)
    for family in SHIPPED
]
"""The two build their masks apart, and each builds the same ones for every family."""


@pytest.mark.parametrize(("attention", "family"), EAGER_TOO)
def test_right_padding_needs_no_mask(family: str, attention: str, texts: list[list[int]]) -> None:
    model = tiny(family, attention)
    batch = _collated(TrialConfig(seq_len=64), [{"input_ids": text} for text in texts])
    is_text = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]

    with torch.no_grad():
        bare = model(**batch)
        masked = model(**batch, attention_mask=is_text.long())

    torch.testing.assert_close(bare.logits[is_text], masked.logits[is_text], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bare.loss, masked.loss, rtol=1e-6, atol=1e-6)
    for row, said in enumerate(_alone(model, texts)):
        torch.testing.assert_close(bare.logits[row, : len(said)], said, rtol=1e-4, atol=1e-5)
    check_is_causal(model)


@pytest.mark.parametrize(
    ("attention", "family"),
    [
        ("sdpa", "gemma3_text"),
        ("eager", "gemma3_text"),
        ("sdpa", "llama"),
        ("sdpa", "phi3"),
        ("sdpa", "qwen3_moe"),
        ("sdpa", "smollm3"),
        *(
            pytest.param(attention, family, marks=pytest.mark.slow)
            for attention, family in (
                ("eager", "llama"),
                ("sdpa", "mistral"),
                ("eager", "mistral"),
                ("eager", "phi3"),
                ("sdpa", "qwen2"),
                ("eager", "qwen2"),
                ("sdpa", "qwen3"),
                ("eager", "qwen3"),
                ("eager", "qwen3_moe"),
                ("eager", "smollm3"),
            )
        ),
    ],
)
def test_packed_texts_are_what_they_are_alone(
    family: str, attention: str, texts: list[list[int]]
) -> None:
    model = tiny(family, attention)
    config = TrialConfig(packing="packed", seq_len=64, attention=attention)
    whole = {"input_ids": [*itertools.chain(*texts)], "seq_lengths": list(LENGTHS)}
    # Behind a full row the pads are texts of their own, beside one that is not full.
    other = {"input_ids": texts[1], "seq_lengths": [LENGTHS[1]]}

    batch = _collated(config, [whole, other])
    with torch.no_grad():
        packed = model(**batch)

    alone = _alone(model, texts)
    torch.testing.assert_close(packed.logits[0, :58], torch.cat(alone), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed.logits[1, :31], alone[1], rtol=1e-4, atol=1e-5)
    assert _loss([*alone, alone[1]], [*texts, texts[1]]) == pytest.approx(
        float(packed.loss), rel=1e-5
    )
    assert _are_apart(model, batch) is True


def _loss(logits: list[torch.Tensor], texts: list[list[int]]) -> float:
    """Return the mean loss over all tokens that have one before them in their text."""
    said = torch.cat([row[:-1] for row in logits])
    wanted = torch.cat([torch.tensor(text[1:]) for text in texts])
    return float(torch.nn.functional.cross_entropy(said, wanted, ignore_index=IGNORED))


def _are_apart(model: Any, batch: dict[str, Any]) -> bool | None:
    return are_apart(model, batch)


@pytest.mark.parametrize("family", sorted(UNAWARE_OF_POSITIONS | STATEFUL))
def test_where_packed_texts_see_one_another_that_is_said(
    family: str, texts: list[list[int]]
) -> None:
    row = {"input_ids": [*itertools.chain(*texts)], "seq_lengths": list(LENGTHS)}
    batch = _collated(TrialConfig(packing="packed", seq_len=64), [row])
    assert _are_apart(tiny(family), batch) is False


def rounding(model: Any, dtype: torch.dtype, scale: float) -> Any:
    """Make a model round as one does whose sums have another order each time: what a layer or an
    expert says is off by such a share, and near a tie another expert is chosen for it."""
    noise = torch.Generator().manual_seed(3)

    def off(_module: Any, _inputs: Any, said: Any) -> Any:
        if not isinstance(said, torch.Tensor):
            return said
        return said * (1 + scale * torch.randn(said.shape, generator=noise)).to(said.dtype)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) or name.endswith(("experts", "gate")):
            module.register_forward_hook(off)
    return model.to(dtype)


ROUNDED = (
    (torch.float32, 1e-6),
    (torch.bfloat16, 0.0),
    (torch.bfloat16, 2**-7),
    (torch.float16, 2**-10),
)
"""What it computes in, and the share by which its sums are off: of bf16 its last digit."""


@pytest.mark.parametrize(("dtype", "scale"), ROUNDED, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_rounding_is_not_taken_for_texts_that_see_one_another(
    family: str, dtype: torch.dtype, scale: float, texts: list[list[int]]
) -> None:
    model = rounding(tiny(family), dtype, scale)
    row = {"input_ids": [*itertools.chain(*texts)], "seq_lengths": list(LENGTHS)}
    batch = _collated(TrialConfig(packing="packed", seq_len=64), [row])
    assert _are_apart(model, batch) is True
    check_is_causal(model)
    # A cache, and transformers no longer looks at the positions.
    model.config.use_cache = True
    assert _are_apart(model, batch) is False


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_texts_of_which_a_part_is_seen_are_not_apart(share: float, texts: list[list[int]]) -> None:
    """As through a state or a convolution, where the attention keeps them apart."""
    model = tiny("llama")
    row = {"input_ids": [*itertools.chain(*texts)], "seq_lengths": list(LENGTHS)}
    batch = _collated(TrialConfig(packing="packed", seq_len=64), [row])

    def leak(_module: Any, _inputs: Any, said: torch.Tensor) -> torch.Tensor:
        return said + share * said.roll(1, dims=1)

    model.model.layers[0].mlp.register_forward_hook(leak)
    assert _are_apart(model, batch) is False


@pytest.mark.filterwarnings("ignore:.*is_decoder")
@pytest.mark.parametrize("scale", [0.0, 2**-7])
def test_a_model_that_looks_ahead_is_refused(scale: float) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    # With transformers' own the attention of so small a model hardly moves anything.
    config = AutoConfig.for_model("bert", **sizes, vocab_size=512, initializer_range=0.2)
    encoder = AutoModelForCausalLM.from_config(config).eval()
    both_ways = tiny("gemma3_text", use_bidirectional_attention=True)
    for model in (encoder, both_ways):
        with pytest.raises(InputError, match=f"type '{model.config.model_type}' looks ahead"):
            check_is_causal(rounding(model, torch.bfloat16 if scale else torch.float32, scale))


def test_flattened_rows_reach_a_model_with_their_boundaries(texts: list[list[int]]) -> None:
    config = TrialConfig(packing="packed", seq_len=64, attention="flash_attention_2")
    rows = [{"input_ids": text, "seq_lengths": [len(text)]} for text in texts]

    batch = _collated(config, rows)

    assert batch["input_ids"].tolist() == [[*itertools.chain(*texts)]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 20, 51, 58]
    # Only flash attention reads them; every other takes them and goes by the positions.
    model = tiny("llama")
    with torch.no_grad():
        said = model(**batch).logits[0]
    torch.testing.assert_close(said, torch.cat(_alone(model, texts)), rtol=1e-4, atol=1e-5)
