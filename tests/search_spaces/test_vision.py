"""What an image becomes in a model, and what does not go with images."""

from __future__ import annotations

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.loading import load_space, with_fixed, with_room_for_images
from qlora_sweep.search_spaces.models import ModelSpec, checked_config, load_model_spec
from qlora_sweep.search_spaces.rules import violation
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.search_spaces.vision import seen_image, tower_flops, whole_config
from tests.seeing import CONFIGS


def image_in(name: str, side: int) -> tuple[int, int, int]:
    config = TrialConfig(image_size=side, seq_len=4096)
    image = seen_image(config, load_model_spec(name))
    assert image is not None
    return image.side, image.patches, image.tokens


@pytest.mark.parametrize(
    ("side", "seen"),
    [
        (1024, (1024, 4096, 1024)),
        (1200, (1216, 5776, 1444)),
        # Smaller than its processor takes, and larger.
        (64, (256, 256, 64)),
        (239, (288, 324, 81)),
        (9000, (4096, 65_536, 16_384)),
    ],
)
def test_an_image_of_qwen_is_cut_into_patches(side: int, seen: tuple[int, int, int]) -> None:
    assert image_in("qwen3-vl-8b", side) == seen


@pytest.mark.parametrize("side", [224, 896, 1200])
def test_an_image_of_gemma_3_is_resized(side: int) -> None:
    assert image_in("gemma-3-4b", side) == (896, 4096, 256)


def test_without_an_image_there_is_nothing_to_see() -> None:
    model = load_model_spec("qwen3-vl-8b")
    assert seen_image(TrialConfig(), model) is None
    assert tower_flops(TrialConfig(), model) == 0
    assert tower_flops(TrialConfig(image_size=1024), model) > 1e12


def test_the_decoder_of_a_model_that_sees_is_what_it_was() -> None:
    seeing, text = load_model_spec("qwen3-vl-8b"), load_model_spec("qwen3-8b")
    sizes = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
    assert [seeing.config[key] for key in sizes] == [text.config[key] for key in sizes]
    assert seeing.model_type == text.model_type == "qwen3"
    assert whole_config(seeing)["text_config"]["model_type"] == "qwen3_vl_text"
    again = ModelSpec.from_json(seeing.to_json())
    assert whole_config(again) == whole_config(seeing)


def refused(model: str, **settings: object) -> str | None:
    config = TrialConfig(**{"image_size": 1024, "seq_len": 2048, **settings})
    found = violation(
        config, model=load_model_spec(model), compute_capability=(8, 6), device="cuda"
    )
    return None if found is None else found.reason


def test_what_goes_with_images_is_allowed() -> None:
    assert refused("qwen3-vl-8b") is None
    assert refused("gemma-3-4b", seq_len=1024, kernels="fused-loss", upcast_fp32=False) is None


@pytest.mark.parametrize(
    ("model", "settings", "said"),
    [
        ("mistral-7b-v0.3", {}, "has no vision tower that is known here"),
        ("qwen3-vl-8b", {"seq_len": 1024}, "is 1,024 tokens of qwen3-vl-8b, which do not go into"),
        ("qwen3-vl-8b", {"method": "dpo"}, "images are trained on with method sft alone"),
        ("qwen3-vl-8b", {"trainer": "trl"}, "images are trained on with trainer sweep alone"),
        ("qwen3-vl-8b", {"data_parallel": 2}, "with data_parallel 1 alone"),
    ],
)
def test_what_does_not_is_refused_in_a_sentence(
    model: str, settings: dict[str, object], said: str
) -> None:
    assert said in str(refused(model, **settings))


WRONG: list[tuple[str, dict[str, object], dict[str, object], str]] = [
    ("qwen3_vl", {"patch_size": -16}, {}, "vision_config: patch_size must be a whole number"),
    ("qwen3_vl", {"patch_size": "16"}, {}, "patch_size must be a whole number"),
    ("qwen3_vl", {"spatial_merge_size": 0}, {}, "spatial_merge_size must be a whole number"),
    ("qwen3_vl", {"spatial_merge_size": 1000}, {}, "must be 4,096 pixels or less, got 16,000"),
    ("qwen3_vl", {"num_heads": 3}, {}, "hidden_size 64 is not a multiple of num_heads 3"),
    ("qwen3_vl", {"out_hidden_size": 64}, {}, "out_hidden_size must be the decoder's 128"),
    ("qwen3_vl", {"deepstack_visual_indexes": None}, {}, "must be a list of numbers of blocks"),
    ("qwen3_vl", {"deepstack_visual_indexes": [1, 99]}, {}, "from 0 to 3, got 99"),
    ("qwen3_vl", {"deepstack_visual_indexes": [0] * 7}, {}, "must be 6 or fewer"),
    ("qwen3_vl", {}, {"image_token_id": 5000}, "image_token_id, one of its vocabulary"),
    ("gemma3", {"image_size": "big"}, {}, "image_size must be a whole number"),
    ("gemma3", {}, {"mm_tokens_per_image": 9}, "must be a square that divides 16 x 16, got 9"),
    ("gemma4", {"pooling_kernel_size": 0}, {}, "pooling_kernel_size must be a whole number"),
]


@pytest.mark.parametrize("sections", [[24, 40], [24, 20, "20"], 64, [16, 16, 16, 16]])
def test_a_tokens_place_has_three_axes(sections: object) -> None:
    text = CONFIGS["qwen3_vl"]["text_config"]
    rope = {**text["rope_parameters"], "mrope_section": sections}
    config = {**CONFIGS["qwen3_vl"], "text_config": {**text, "rope_parameters": rope}}
    model = ModelSpec("mine", "directory", checked_config(config, label="mine"))
    assert "mrope_section must list 3 whole numbers" in str(model.vision_fault)


@pytest.mark.parametrize(("kind", "vision", "beside", "said"), WRONG)
def test_a_tower_that_cannot_be_built_is_refused_with_images_alone(
    kind: str, vision: dict[str, object], beside: dict[str, object], said: str
) -> None:
    whole = CONFIGS[kind]
    changed = {**whole, **beside, "vision_config": {**whole["vision_config"], **vision}}
    model = ModelSpec("tiny", "directory", checked_config(changed, label="tiny"))
    for image_size, words in ((256, said), (None, "None")):
        config = TrialConfig(image_size=image_size)
        found = violation(config, model=model, compute_capability=(8, 6), device="cuda")
        assert words in str(found and found.reason)
        assert tower_flops(config, model) == 0


def test_a_dataset_with_images_is_not_read_yet() -> None:
    found = violation(
        TrialConfig(image_size=1024, seq_len=2048),
        model=load_model_spec("qwen3-vl-8b"),
        compute_capability=(8, 6),
        device="cuda",
        has_dataset=True,
    )
    assert found is not None
    assert "a dataset's images are not read yet" in found.reason


@pytest.mark.parametrize(
    ("fixed", "size"),
    [
        # The shortest of the preset's lengths that an image goes into, of about as many tokens.
        ({"image_size": 1024}, (2, 2048)),
        ({"image_size": 256}, (8, 512)),
        ({"image_size": 1024, "seq_len": 1088}, (3, 1088)),
        ({"image_size": 1536}, (1, 4096)),
    ],
)
def test_the_baseline_has_room_for_its_image(fixed: dict[str, int], size: tuple[int, int]) -> None:
    model = load_model_spec("qwen3-vl-4b")
    space = with_fixed(load_space("a10"), fixed)
    assert isinstance(space, SearchSpace)
    baseline = with_room_for_images(space, model).baseline_config()
    assert (baseline.micro_batch_size, baseline.seq_len) == size
    found = violation(baseline, model=model, compute_capability=(8, 6), device="cuda")
    assert found is None


def test_a_baseline_of_texts_stays_as_it_is() -> None:
    space = load_space("a10")
    assert with_room_for_images(space, load_model_spec("qwen3-vl-4b")) is space


def test_where_no_length_of_a_space_is_long_enough_the_baseline_has_one_of_its_own() -> None:
    """The next multiple of 64: the search then says that nothing of it is valid."""
    model = load_model_spec("qwen3-vl-4b")
    space = with_fixed(load_space("cpu-demo"), {"image_size": 1024})
    assert isinstance(space, SearchSpace)
    assert with_room_for_images(space, model).baseline_config().seq_len == 1088
