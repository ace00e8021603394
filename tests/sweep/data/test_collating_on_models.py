"""What tiny models of the shipped families make of padded and packed rows."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.rules import WITHOUT_SDPA
from qlora_sweep.sweep.data.collation import IGNORED, Collator
from tests.lazy import lazily

if TYPE_CHECKING:
    import torch

probing = lazily("qlora_sweep.sweep.data.probing")

SHIPPED = ("gemma3_text", "gpt_oss", "llama", "mistral", "phi3", "qwen3_moe", "smollm3")
WINDOW = 16
WINDOWED = {"gemma3_text", "gpt_oss", "mistral"}
UNAWARE_OF_POSITIONS = {"gpt_oss", "falcon", "mpt", "opt", "bloom"}
"""Families whose masks transformers does not derive from the positions."""
STATEFUL = {"jamba", "qwen3_5_text", "recurrent_gemma"}
LENGTHS = (20, 31, 7)
"""One longer than the window."""
PACKED = TrialConfig(packing="packed", seq_len=64)


def tiny(family: str, attention: str = "sdpa", **changes: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.families import spec_of

    attention = "eager" if family in WITHOUT_SDPA else attention
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
def dataset() -> list[list[int]]:
    import torch

    torch.manual_seed(1)
    return [torch.randint(3, 500, (length,)).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def packed(dataset: list[list[int]]) -> dict[str, Any]:
    """All texts in one row, as a micro-batch."""
    row = {"input_ids": [*itertools.chain(*dataset)], "seq_lengths": list(LENGTHS)}
    return Collator(PACKED)([row])


def said_by(model: Any, **batch: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(**batch)


def alone(model: Any, dataset: list[list[int]]) -> list[torch.Tensor]:
    import torch

    return [said_by(model, input_ids=torch.tensor([text])).logits[0] for text in dataset]


@pytest.mark.parametrize(
    ("attention", "family"), [*(("sdpa", family) for family in SHIPPED), ("eager", "gemma3_text")]
)
def test_right_padding_needs_no_mask(family: str, attention: str, dataset: list[list[int]]) -> None:
    import torch

    model = tiny(family, attention)
    batch = Collator(TrialConfig(seq_len=64))([{"input_ids": text} for text in dataset])
    is_text = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    bare = said_by(model, **batch)
    masked = said_by(model, **batch, attention_mask=is_text.long())
    torch.testing.assert_close(bare.logits[is_text], masked.logits[is_text], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bare.loss, masked.loss, rtol=1e-6, atol=1e-6)
    for row, said in enumerate(alone(model, dataset)):
        torch.testing.assert_close(bare.logits[row, : len(said)], said, rtol=1e-4, atol=1e-5)
    probing.check_is_causal(model)


@pytest.mark.parametrize(
    ("attention", "family"),
    [
        *(("sdpa", family) for family in ("gemma3_text", "llama", "phi3", "qwen3_moe", "smollm3")),
        ("eager", "gemma3_text"),
        pytest.param("sdpa", "mistral", marks=pytest.mark.slow),
        pytest.param("eager", "qwen3", marks=pytest.mark.slow),
    ],
)
def test_packed_texts_are_what_they_are_alone(
    family: str, attention: str, dataset: list[list[int]]
) -> None:
    import torch

    model = tiny(family, attention)
    whole = {"input_ids": [*itertools.chain(*dataset)], "seq_lengths": list(LENGTHS)}
    # Behind a full row the pads are texts of their own, beside one that is not full.
    other = {"input_ids": dataset[1], "seq_lengths": [LENGTHS[1]]}
    batch = Collator(PACKED.model_copy(update={"attention": attention}))([whole, other])
    found, single = said_by(model, **batch), alone(model, dataset)
    torch.testing.assert_close(found.logits[0, :58], torch.cat(single), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.logits[1, :31], single[1], rtol=1e-4, atol=1e-5)
    # The mean over all tokens that have one before them in their text.
    said = torch.cat([row[:-1] for row in (*single, single[1])])
    wanted = torch.cat([torch.tensor(text[1:]) for text in (*dataset, dataset[1])])
    loss = torch.nn.functional.cross_entropy(said, wanted, ignore_index=IGNORED)
    assert float(loss) == pytest.approx(float(found.loss), rel=1e-5)
    assert probing.are_apart(model, batch) is True


@pytest.mark.parametrize("family", sorted(UNAWARE_OF_POSITIONS | STATEFUL))
def test_where_packed_texts_see_one_another_that_is_said(
    family: str, packed: dict[str, Any]
) -> None:
    assert probing.are_apart(tiny(family), packed) is False


def rounding(model: Any, dtype: str, scale: float) -> Any:
    """Make a model round as one does whose sums have another order each time: what a layer or an
    expert says is off by such a share, and near a tie another expert is chosen for it."""
    import torch

    noise = torch.Generator().manual_seed(3)

    def off(_module: Any, _inputs: Any, said: Any) -> Any:
        if not isinstance(said, torch.Tensor):
            return said
        return said * (1 + scale * torch.randn(said.shape, generator=noise)).to(said.dtype)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) or name.endswith(("experts", "gate")):
            module.register_forward_hook(off)
    return model.to(getattr(torch, dtype))


@pytest.mark.parametrize(
    ("dtype", "scale"),
    # The share by which its sums are off: of bf16 its last digit.
    [("float32", 1e-6), ("bfloat16", 2**-7), ("float16", 2**-10)],
)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_rounding_is_not_taken_for_texts_that_see_one_another(
    family: str, dtype: str, scale: float, packed: dict[str, Any]
) -> None:
    model = rounding(tiny(family), dtype, scale)
    assert probing.are_apart(model, packed) is True
    probing.check_is_causal(model)
    # A cache, and transformers no longer looks at the positions.
    model.config.use_cache = True
    assert probing.are_apart(model, packed) is False


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_texts_of_which_a_part_is_seen_are_not_apart(share: float, packed: dict[str, Any]) -> None:
    """As through a state or a convolution, where the attention keeps them apart."""
    model = tiny("llama")

    def leak(_module: Any, _inputs: Any, said: torch.Tensor) -> torch.Tensor:
        return said + share * said.roll(1, dims=1)

    model.model.layers[0].mlp.register_forward_hook(leak)
    assert probing.are_apart(model, packed) is False


@pytest.mark.filterwarnings("ignore:.*is_decoder")
@pytest.mark.parametrize(("dtype", "scale"), [("float32", 0.0), ("bfloat16", 2**-7)])
def test_a_model_that_looks_ahead_is_refused(dtype: str, scale: float) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    # With transformers' own the attention of so small a model hardly moves anything.
    encoders = []
    # RoBERTa numbers positions by the pads before them.
    for kind in ("bert", "roberta"):
        config = AutoConfig.for_model(kind, **sizes, vocab_size=512, initializer_range=0.2)
        encoders.append(AutoModelForCausalLM.from_config(config).eval())
    for model in (*encoders, tiny("gemma3_text", use_bidirectional_attention=True)):
        with pytest.raises(InputError, match=f"type '{model.config.model_type}' looks ahead"):
            probing.check_is_causal(rounding(model, dtype, scale))


def test_flattened_rows_reach_a_model_with_their_boundaries(dataset: list[list[int]]) -> None:
    import torch

    config = PACKED.model_copy(update={"attention": "flash_attention_2"})
    batch = Collator(config)([{"input_ids": text, "seq_lengths": [len(text)]} for text in dataset])
    assert batch["input_ids"].tolist() == [[*itertools.chain(*dataset)]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 20, 51, 58]
    # Only flash attention reads them; every other takes them and goes by the positions.
    model = tiny("llama")
    said = said_by(model, **batch).logits[0]
    torch.testing.assert_close(said, torch.cat(alone(model, dataset)), rtol=1e-4, atol=1e-5)
