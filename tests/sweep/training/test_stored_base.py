"""Checkpoints that bitsandbytes stored in 4 bits, trained as they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from qlora_sweep.search_spaces.rules import own_settings, violation
from qlora_sweep.storage.records import Measured
from tests.lazy import lazily
from tests.sweep.training.tiny import BRIEF, TINY, tiny_base, tiny_config, trial_on
from tests.sweep.vision_language import make_checkpoint

torch = lazily("torch")
transformers = lazily("transformers")
adapters = lazily("qlora_sweep.sweep.training.adapters")

LAYERS = 3
NF4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False}
LEFT = {
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    # As Unsloth stores what 4 bits would hurt: a part of a layer, and a whole one.
    "llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp", "model.layers.2."],
}
STORED: dict[str, dict[str, Any]] = {
    "nf4": {**NF4, "bnb_4bit_compute_dtype": "float16"},
    "nf4 of FSDP": {**NF4, "bnb_4bit_quant_storage": "bfloat16"},
    "part of it": LEFT,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain")
    values = {**TINY.config, "model_type": "llama", "num_hidden_layers": LAYERS}
    config = transformers.AutoConfig.for_model(**values, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    return directory


def stored(source: Path, directory: Path, **quantization: Any) -> ModelSpec:
    """Save a model as transformers and bitsandbytes do."""
    options = transformers.BitsAndBytesConfig(load_in_4bit=True, **quantization)
    loaded(source, quantization_config=options).save_pretrained(directory)
    return load_model_spec(str(directory))


def loaded(directory: Path, **options: Any) -> Any:
    """Load a model as transformers does."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, device_map={"": "cpu"}, **options
    )


def own_config(spec: ModelSpec, **settings: Any) -> Any:
    own = {key: value for key, (value, _) in own_settings(spec).items()}
    return tiny_config(**own, upcast_fp32=False, **settings)


def states_of(model: Any) -> dict[str, tuple[bytes, bytes, str]]:
    """Return of each 4-bit weight its bytes, those of its constants, and what they are."""
    found = {}
    for name, module in model.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            weight = module.weight.data.contiguous().view(torch.uint8).numpy().tobytes()
            constants = state.absmax.contiguous().view(torch.uint8).numpy().tobytes()
            found[name.replace(".base_layer", "")] = weight, constants, state.quant_type
    return found


@pytest.mark.parametrize("kind", STORED)
def test_weights_are_trained_as_they_are_stored(plain: Path, tmp_path: Path, kind: str) -> None:
    spec = stored(plain, tmp_path / "stored", **STORED[kind])
    config = own_config(spec)
    assert violation(config, model=spec, compute_capability=None, device="cpu") is None
    theirs = loaded(tmp_path / "stored")
    with tiny_base(config, spec=spec, weights="pretrained") as base:
        assert states_of(base.model) == states_of(theirs)
        kinds = {module.compute_dtype for module in base.model.modules() if is_4bit(module)}
        assert kinds == {torch.bfloat16}
        outcome = trial_on(base, config, steps=BRIEF).run()
    assert isinstance(outcome, Measured), outcome
    # From random weights the same modules are in 4 bits.
    with tiny_base(config, spec=spec) as random:
        assert states_of(random.model).keys() == states_of(theirs).keys()


def is_4bit(module: Any) -> bool:
    return type(module).__name__ == "Linear4bit"


def test_an_adapter_gives_the_logits_that_peft_makes_of_the_stored_base(
    plain: Path, tmp_path: Path
) -> None:
    import peft

    spec = stored(plain, tmp_path / "stored", **LEFT)
    config = own_config(spec, lora_rank=4)
    rows = torch.arange(3, 40)[None]
    with (
        tiny_base(config, spec=spec, weights="pretrained") as base,
        adapters.attached(base, config) as attached,
        torch.no_grad(),
    ):
        torch.manual_seed(1)
        for parameter in attached.trainable_parameters():
            parameter.normal_(0.0, 0.1)
        attached.model.save_pretrained(tmp_path / "adapter")
        ours = attached.model(input_ids=rows).logits
    theirs = loaded(tmp_path / "stored")
    for module in filter(is_4bit, theirs.modules()):
        module.compute_dtype = torch.bfloat16
    model = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(ours, model.train()(input_ids=rows).logits, rtol=0, atol=0)


def test_the_decoder_of_a_quantized_vision_language_checkpoint_is_trained_as_it_is_stored(
    tmp_path: Path,
) -> None:
    make_checkpoint(tmp_path / "plain", "gemma3")
    options = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        llm_int8_skip_modules=["lm_head", "vision_tower", "model.language_model.layers.0.mlp"],
    )
    whole = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "plain", quantization_config=options, dtype=torch.bfloat16
    )
    whole.save_pretrained(tmp_path / "stored")
    spec = load_model_spec(str(tmp_path / "stored"))
    config = own_config(spec)
    assert (config.quantization, config.double_quant) == ("nf4", False)
    inner = "model.language_model."
    expected = {
        name.replace(inner, "model."): state
        for name, state in states_of(whole).items()
        if name.startswith(inner)
    }
    assert "model.layers.0.mlp.up_proj" not in expected
    with tiny_base(config, spec=spec, weights="pretrained") as base:
        assert states_of(base.model) == expected
