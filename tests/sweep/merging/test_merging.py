"""Merging against PEFT's own, on the demo architecture saved in several shards."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from search_spaces.errors import EnvironmentFault, InputError
from search_spaces.models import load_model_spec
from sweep.merging.adapter import WEIGHTS, read_adapter
from sweep.merging.comparing import Models, compare
from sweep.merging.job import MergeRequest, _base_tensors, merge
from sweep.merging.plan import natural_dtype, plan_merge
from sweep.merging.streaming import Sources, write_merged
from sweep.terminal.finishing import comparison_lines
from tests.sweep.merging.made import make_adapter, make_base

GPT2 = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 128,
    "n_positions": 64,
    "tie_word_embeddings": False,
}


def rewrite(path: Path, **values: Any) -> None:
    document = json.loads(path.read_text()) | values
    path.write_text(json.dumps(document))


@pytest.fixture(scope="module")
def demo() -> dict[str, Any]:
    return dict(load_model_spec("demo").config)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, demo: dict[str, Any]) -> Path:
    directory = make_base(tmp_path_factory.mktemp("base"), demo)
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter"), base)


@pytest.fixture
def own_adapter(adapter: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(adapter, tmp_path / "adapter"))


def merged_here(adapter: Path, base: Path, directory: Path, **options: Any) -> Path:
    """Merge in this process, in files of a quarter of a megabyte."""
    tensors = _base_tensors(base, label=str(base))
    config = json.loads((base / "config.json").read_text())
    dtype = options.get("dtype") or natural_dtype(tensors)
    plan = plan_merge(read_adapter(str(adapter)), tensors, config, dtype=dtype)
    directory.mkdir()
    write_merged(
        list(plan.pieces), Sources(base, adapter / WEIGHTS), directory, shard_bytes_max=2**18
    )
    (directory / "config.json").write_text(json.dumps(plan.config))
    return directory


def merged_by_peft(adapter: Path, base: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft = PeftModel.from_pretrained(model, adapter)
    return {name: t.detach().clone() for name, t in peft.merge_and_unload().state_dict().items()}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"use_rslora": True, "target_modules": "all-linear"}, id="rslora"),
        pytest.param(
            {
                "rank_pattern": {"q_proj": 4, "layers.1.self_attn.v_proj": 2},
                "alpha_pattern": {"layers.0.self_attn.v_proj": 3},
            },
            id="patterns",
        ),
        pytest.param({"use_dora": True}, id="dora"),
        pytest.param({"modules_to_save": ["lm_head"]}, id="whole head"),
        pytest.param({"target_modules": ["embed_tokens", "q_proj"]}, id="embedding"),
        pytest.param({"bias": "all"}, id="biases"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_tensor_is_what_peft_would_make_of_it(
    options: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "adapter", base, **options)
    directory = merged_here(adapter, base, tmp_path / "merged")

    assert len(list(directory.glob("*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    assert model.dtype == torch.bfloat16
    expected, found = merged_by_peft(adapter, base), model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].float(), tensor, rtol=2**-7, atol=1e-6, msg=name)


def test_a_weight_with_its_inputs_first_is_merged_the_right_way_round(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", GPT2, shard="20KB")
    with pytest.warns(UserWarning, match="fan_in_fan_out"):
        adapter = make_adapter(tmp_path / "adapter", base, target_modules=["c_attn", "c_proj"])
    directory = merged_here(adapter, base, tmp_path / "merged")

    found = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    for name, tensor in merged_by_peft(adapter, base).items():
        torch.testing.assert_close(found[name].float(), tensor, rtol=2**-7, atol=1e-6, msg=name)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_head_that_shared_the_embedding_gets_weights_of_its_own(
    demo: dict[str, Any], tmp_path: Path
) -> None:
    base = make_base(tmp_path / "base", {**demo, "tie_word_embeddings": True})
    adapter = make_adapter(tmp_path / "adapter", base, target_modules=["lm_head"])
    directory = merged_here(adapter, base, tmp_path / "merged")

    model = AutoModelForCausalLM.from_pretrained(directory)
    before = AutoModelForCausalLM.from_pretrained(base).get_input_embeddings().weight
    assert not model.config.tie_word_embeddings
    assert torch.equal(model.get_input_embeddings().weight, before)
    expected = merged_by_peft(adapter, base)["lm_head.weight"]
    torch.testing.assert_close(
        model.get_output_embeddings().weight.float(), expected, rtol=2**-7, atol=1e-6
    )


def test_a_32_bit_base_becomes_16_bit_and_a_16_bit_one_keeps_what_it_holds_wide(
    demo: dict[str, Any], adapter: Path, base: Path, tmp_path: Path
) -> None:
    shutil.copytree(base, tmp_path / "mixed")
    norm = "model.norm.weight"
    index = json.loads((base / "model.safetensors.index.json").read_text())
    file = tmp_path / "mixed" / index["weight_map"][norm]
    tensors = load_file(file)
    save_file(tensors | {norm: tensors[norm].float()}, file, metadata={"format": "pt"})

    mixed = _base_tensors(merged_here(adapter, tmp_path / "mixed", tmp_path / "one"), label="one")
    assert {name for name, info in mixed.items() if info.dtype != "BF16"} == {norm}

    for path in (tmp_path / "mixed").glob("*.safetensors"):
        wide = {name: tensor.float() for name, tensor in load_file(path).items()}
        save_file(wide, path, metadata={"format": "pt"})
    narrow = _base_tensors(merged_here(adapter, tmp_path / "mixed", tmp_path / "two"), label="two")
    assert {info.dtype for info in narrow.values()} == {"BF16"}


def test_a_weight_that_fp16_cannot_hold_is_said(
    own_adapter: Path, base: Path, tmp_path: Path
) -> None:
    weights = load_file(own_adapter / WEIGHTS)
    save_file({name: tensor * 1e4 for name, tensor in weights.items()}, own_adapter / WEIGHTS)
    with pytest.raises(InputError, match="too large for fp16: merge with --dtype bf16"):
        merged_here(own_adapter, base, tmp_path / "merged", dtype="fp16")


def test_a_merge_is_proved_by_its_logits_and_lies_whole_under_its_name(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    (adapter / "tokenizer.json").write_text("{}")
    news: list[Any] = []
    output = tmp_path / "below" / "merged"
    left = output.with_name(".merged.merging")
    left.mkdir(parents=True)
    (left / "model-00001-of-00009.safetensors").write_text("a merge that was killed left this")
    report = merge(MergeRequest(str(adapter), str(output), rows=2), on_news=news.append)

    assert report.weights_merged == 8
    assert report.tokenizer == "adapter"
    compared = report.comparison
    assert compared is not None
    assert compared.is_near
    # Rounding, where the adapter does something.
    assert 0 < compared.mean_abs < 0.05 * compared.adapter_mean_abs
    assert compared.argmax_agreement > 0.9
    assert compared.trained is not None
    assert compared.trained.quantization == "nf4"
    assert compared.trained.mean_abs > compared.mean_abs
    assert news[-1] == {"compared": 2, "of": 3}
    assert {path.name for path in output.iterdir()} >= {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert not (output / "model-00001-of-00009.safetensors").exists()
    assert [path.name for path in output.parent.iterdir()] == ["merged"]
    assert (output / "model.safetensors").stat().st_mode & 0o044
    with pytest.raises(InputError, match="is not empty: name a new directory"):
        merge(MergeRequest(str(adapter), str(output)))


def test_two_merges_do_not_write_one_directory(adapter: Path, tmp_path: Path) -> None:
    held = tmp_path / ".merged.merging"
    held.mkdir()
    descriptor = os.open(held, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another merge writes"):
            merge(MergeRequest(str(adapter), str(tmp_path / "merged"), rows=0))
    finally:
        os.close(descriptor)
    assert held.is_dir()


def test_a_disk_that_is_full_leaves_nothing_behind(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(EnvironmentFault, match="cannot be written"):
            merge(MergeRequest(str(adapter), str(tmp_path / "merged"), rows=0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_what_the_disk_cannot_hold_is_refused_beforehand(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**20))
    with pytest.raises(EnvironmentFault, match=r"0\.0 GiB free: nothing was written"):
        merge(MergeRequest(str(adapter), str(tmp_path / "merged")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA to be merged, got 'IA3'"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed the base before the training"),
        ({"layer_replication": [[0, 2]]}, "replicated layers"),
        ({"target_parameters": ["experts"]}, "experts' parameters"),
        ({"lora_alpha": None}, "lora_alpha must be a number, got null"),
        ({"alpha_pattern": [1]}, "alpha_pattern must be an object"),
        ({"base_model_name_or_path": None}, "names no base: name it with --model"),
        ({"base_model_name_or_path": "demo"}, "an architecture without weights"),
        ({"base_model_name_or_path": "/no/such"}, r"say where it is with --model"),
    ],
)
def test_what_cannot_be_merged_is_refused(
    values: dict[str, Any], words: str, own_adapter: Path, tmp_path: Path
) -> None:
    rewrite(own_adapter / "adapter_config.json", **values)
    with pytest.raises(InputError, match=words):
        merge(MergeRequest(str(own_adapter), str(tmp_path / "merged")))
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda name: name.replace("layers.0", "layers.9"), r"changes 'model\.layers\.9\."),
        (lambda name: name.replace("lora_B.weight", "lora_B.bias"), r"lora_bias.* is not merged"),
        (lambda name: name.replace("lora_A", "lora_X"), "no plain LoRA"),
        (lambda name: name.replace("layers.1.self_attn.q_proj.lora_A", "y.lora_A"), "has no [AB]"),
    ],
)
def test_tensors_that_belong_to_nothing_are_named(
    change: Any, words: str, own_adapter: Path, tmp_path: Path
) -> None:
    weights = load_file(own_adapter / WEIGHTS)
    save_file({change(name): tensor for name, tensor in weights.items()}, own_adapter / WEIGHTS)
    with pytest.raises(InputError, match=words):
        merge(MergeRequest(str(own_adapter), str(tmp_path / "merged")))


def test_another_base_is_told_by_its_shapes(
    adapter: Path, demo: dict[str, Any], tmp_path: Path
) -> None:
    heads = {"hidden_size": 2 * demo["hidden_size"], "head_dim": None}
    base = make_base(tmp_path / "base", {**demo, **heads})
    with pytest.raises(InputError, match="another base"):
        merge(MergeRequest(str(adapter), str(tmp_path / "merged"), model=str(base)))


def test_a_base_that_is_quantized_pickled_or_cut_short_is_refused(
    adapter: Path, base: Path, tmp_path: Path
) -> None:
    own = Path(shutil.copytree(base, tmp_path / "base"))
    request = MergeRequest(str(adapter), str(tmp_path / "merged"), model=str(own))
    rewrite(own / "config.json", quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(InputError, match=r"stored quantized \(bitsandbytes\)"):
        merge(request)
    shutil.copy(base / "config.json", own / "config.json")
    shard = sorted(own.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(InputError, match=f"{shard.name}: cut short"):
        merge(request)
    for path in own.glob("*.safetensors*"):
        path.unlink()
    (own / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"weights in \.bin files are pickles"):
        merge(request)


def test_a_directory_without_an_adapter_says_where_one_is(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such directory"):
        merge(MergeRequest(str(tmp_path / "none"), str(tmp_path / "merged")))
    shutil.copytree(adapter, tmp_path / "run" / "checkpoint-20")
    with pytest.raises(InputError, match="checkpoint-20 below it holds one"):
        merge(MergeRequest(str(tmp_path / "run"), str(tmp_path / "merged")))


def test_one_model_is_in_memory_at_a_time_as_they_are_compared(
    adapter: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[weakref.ref[Any]] = []
    alive: list[int] = []
    load = AutoModelForCausalLM.from_pretrained

    def watched(*args: Any, **options: Any) -> Any:
        alive.append(sum(model() is not None for model in loaded))
        model = load(*args, **options)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", watched)
    models = Models(base, adapter, base, dtype=torch.bfloat16, nbytes=1)
    compare(models, rows=1)
    assert alive == [0, 0, 0]


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_an_adapter_of_an_8_bit_base_is_compared_on_that_base(
    kind: str, base: Path, own_adapter: Path, tmp_path: Path
) -> None:
    merged = merged_here(own_adapter, base, tmp_path / "merged")
    models = Models(base, own_adapter, merged, dtype=torch.bfloat16, nbytes=1)
    in_4_bits = compare(models, rows=1).trained
    (own_adapter / "training.json").write_text(json.dumps({"config": {"quantization": kind}}))
    compared = compare(models, rows=1)
    assert compared.trained is not None
    assert in_4_bits is not None
    assert compared.trained.quantization == kind
    assert compared.mean_abs < compared.trained.mean_abs < in_4_bits.mean_abs
    assert f"quantized base ({kind})" in [*comparison_lines(compared)][-1]


def test_a_4_bit_base_that_cannot_be_looked_at_costs_no_proof(
    base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = AutoModelForCausalLM.from_pretrained

    def without_kernels(*args: Any, **options: Any) -> Any:
        if "quantization_config" in options:
            raise RuntimeError("shape '[64, 1]' is invalid for input of size 96")
        return load(*args, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", without_kernels)
    compared = compare(Models(base, adapter, base, dtype=torch.bfloat16, nbytes=1), rows=1)
    assert compared.trained is None
    assert compared.trained_failed == "shape '[64, 1]' is invalid for input of size 96"
    assert "could not be looked at: shape '[64, 1]'" in [*comparison_lines(compared)][-1]
