"""Merging against PEFT's own, on the demo architecture saved in several shards."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.checkpoints import ADAPTER, ADAPTER_CONFIG, INDEX, identity_of
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.sweep.cli import main
from qlora_sweep.sweep.merging.job import merge
from qlora_sweep.sweep.subprocess_jobs import run_subprocess
from qlora_sweep.sweep.terminal import finishing
from tests import families
from tests.sweep.merging.made import make_adapter, make_base
from tests.sweep.vision_language import make_checkpoint
from tests.tables import cases

DEMO = dict(load_model_spec("demo").config)
GPT2 = dict.fromkeys(("n_embd", "n_positions"), 64) | dict.fromkeys(("n_layer", "n_head"), 2)
GPT2 |= {"model_type": "gpt2", "vocab_size": 128, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_base(tmp_path_factory.mktemp("base"), DEMO)
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory


@pytest.fixture(scope="module")
def shared_adapter(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter"), base)


@pytest.fixture
def adapter(shared_adapter: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared_adapter, tmp_path / "adapter"))


def rewrite(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(adapter: Path, model: Path | None, words: str) -> None:
    """Check that a merge is refused, and leaves nothing."""
    output = adapter.with_name("merged")
    with pytest.raises(InputError, match=words):
        merge(str(adapter), output=str(output), model=model and str(model))
    assert not output.exists()


def merged_here(adapter: Path, base: Path, directory: Path, **options: Any) -> Path:
    """Merge in this process."""
    from qlora_sweep.sweep.merging.merged import Merge

    directory.mkdir()
    Merge(adapter, base, **options).write(directory)
    return directory


def tensors_in(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {k: t for path in directory.glob("*.safetensors") for k, t in load_file(path).items()}


def rewritten(path: Path, change: Any) -> None:
    from safetensors.torch import load_file, save_file

    save_file(change(load_file(path)), path, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_the_decoders_adapter_is_merged_into_the_whole_vision_language_model(
    kind: str, tmp_path: Path
) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    from qlora_sweep.sweep.training.model import load_pretrained

    base, adapter = tmp_path / "base", tmp_path / "adapter"
    make_checkpoint(base, kind)
    exact = TrialConfig(quantization="none", compute_dtype="fp32")
    spec = load_model_spec(str(base))
    decoder = load_pretrained(exact, spec=spec, device=torch.device("cpu"))
    peft = get_peft_model(decoder, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    for parameter in peft.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    peft.save_pretrained(adapter, save_embedding_layers=False)
    merged = merged_here(adapter, base, tmp_path / "merged")
    before, after = tensors_in(base), tensors_in(merged)
    assert before.keys() == after.keys()
    changed = {n for n in before if not torch.equal(before[n].bfloat16(), after[n].bfloat16())}
    assert {name.rpartition("language_model.")[2] for name in changed} == {
        f"{'model.' * (kind == 'gemma3')}layers.{layer}.{module}.weight"
        for layer in range(2)
        for module in ("self_attn.q_proj", "mlp.down_proj")
    }


def test_a_32_bit_base_becomes_16_bit_and_a_16_bit_one_keeps_what_it_holds_wide(
    adapter: Path, base: Path, tmp_path: Path
) -> None:
    mixed, norm = Path(shutil.copytree(base, tmp_path / "mixed")), "model.norm.weight"
    file = mixed / json.loads((base / INDEX).read_text())["weight_map"][norm]
    rewritten(file, lambda held: held | {norm: held[norm].float()})
    found = tensors_in(merged_here(adapter, mixed, tmp_path / "one"))
    assert [name for name, tensor in found.items() if tensor.itemsize == 4] == [norm]

    for path in mixed.glob("*.safetensors"):
        rewritten(path, lambda held: {name: tensor.float() for name, tensor in held.items()})
    found = tensors_in(merged_here(adapter, mixed, tmp_path / "two"))
    assert {tensor.itemsize for tensor in found.values()} == {2}


def test_a_weight_that_fp16_cannot_hold_is_said(adapter: Path, base: Path, tmp_path: Path) -> None:
    rewritten(adapter / ADAPTER, lambda held: {name: t * 1e4 for name, t in held.items()})
    with pytest.raises(InputError, match="too large for fp16"):
        merged_here(adapter, base, tmp_path / "merged", dtype="fp16")


def test_a_merge_is_proved_by_its_logits_and_is_whole_under_its_name(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_base = Path(shutil.copytree(base, tmp_path / "base"))
    of_base = {"tekken.json", "vocab.txt", "tokenizer.model.v3", "preprocessor_config.json"}
    left_out = {"pytorch_model.bin", "model.gguf", ".gitattributes"}
    for name in (*of_base, *left_out, "tokenizer_config.json", "chat_template.jinja"):
        (own_base / name).write_text("{}")
    for name in ("additional_chat_templates", "original", ".git"):
        (own_base / name).mkdir()
        (own_base / name / "tool_use.jinja").write_text("{{ messages }}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (adapter / name).write_text('{"of": "adapter"}')
    rewritten(
        adapter / ADAPTER,
        lambda held: {k.replace(".weight", ".default.weight"): t for k, t in held.items()},
    )
    output = tmp_path / "below" / "merged"
    left = output.with_name(".merged.merging")
    left.mkdir(parents=True)
    (left / "model-00001-of-00009.safetensors").write_text("a merge that was killed left this")
    command = ["merge", str(adapter), "--output", str(output)]
    assert main([*command, "--model", str(own_base), "--rows", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["weights_merged"], report["tokenizer"]) == (8, "adapter")
    assert report["trained_on"] == str(base)
    compared = report["comparison"]
    assert compared["is_near"]
    # Rounding, where the adapter does something.
    assert 0 < compared["mean_abs"] < 0.05 * compared["adapter_mean_abs"]
    assert compared["argmax_agreement"] > 0.9
    assert compared["trained"]["quantization"] == "nf4"
    assert compared["trained"]["mean_abs"] > compared["mean_abs"]
    own = {"README.md", "tokenizer.json", "tokenizer_config.json", "additional_chat_templates"}
    of_base |= {path.name for path in base.iterdir()}
    assert {path.name for path in output.iterdir()} == of_base | own
    assert (output / "additional_chat_templates" / "tool_use.jinja").is_file()
    assert "adapter" in (output / "tokenizer_config.json").read_text()
    assert [path.name for path in output.parent.iterdir()] == ["merged"]
    assert next(output.glob("*.safetensors")).stat().st_mode & 0o044
    assert main(command) == 2
    assert "is not an empty directory" in capsys.readouterr().err


def test_two_merges_do_not_write_one_directory(adapter: Path, tmp_path: Path) -> None:
    held = tmp_path / ".merged.merging"
    held.mkdir()
    with ExitStack() as stack:
        stack.callback(os.close, descriptor := os.open(held, os.O_RDONLY))
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        refused(adapter, None, "another merge writes")
    assert held.is_dir()


def test_a_link_in_the_place_of_what_is_not_whole_is_not_followed(
    adapter: Path, tmp_path: Path
) -> None:
    (tmp_path / ".merged.merging").symlink_to(adapter)
    with pytest.raises(EnvironmentFault, match="nothing was kept"):
        merge(str(adapter), output=str(tmp_path / "merged"), rows=0)
    assert (adapter / ADAPTER).exists()


def test_a_disk_that_is_full_leaves_nothing_behind(adapter: Path, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, limits[1]))
    try:
        with pytest.raises(EnvironmentFault, match="cannot be written"):
            merge(str(adapter), output=str(tmp_path / "merged"), rows=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_disk_without_room_is_not_written_to(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**10))
    with pytest.raises(EnvironmentFault, match="nothing was written"):
        merged_here(adapter, base, tmp_path / "merged")


@pytest.mark.parametrize(
    ("values", "words"),
    cases(
        """
        {peft_type: null} | "peft_type: must name the kind of adapter"
        {layer_replication: [[0, 2]]} | "layer_replication: .* more layers than its base"
        {base_model_name_or_path: null} | "names no base: name it with --model"
        {base_model_name_or_path: demo} | an architecture without weights
        {base_model_name_or_path: /no/such} | with --model
        """
    ),
)
def test_what_cannot_be_merged_is_refused(
    values: dict[str, Any], words: str, adapter: Path
) -> None:
    rewrite(adapter / ADAPTER_CONFIG, **values)
    refused(adapter, None, words)


@pytest.mark.parametrize(
    ("values", "words"),
    cases(
        """
        {peft_type: PREFIX_TUNING} | not to its weights
        {peft_type: OF_TOMORROW} | PEFT cannot read the adapter
        {init_lora_weights: pissa_niter_4} | changed the base
        {alora_invocation_tokens: [1, 2]} | PEFT cannot merge
        """
    ),
)
@pytest.mark.filterwarnings("ignore")
def test_what_peft_cannot_merge_is_refused(
    values: dict[str, Any], words: str, adapter: Path, base: Path, tmp_path: Path
) -> None:
    rewrite(adapter / ADAPTER_CONFIG, **values)
    with pytest.raises(InputError, match=words):
        merged_here(adapter, base, tmp_path / "merged")


def test_a_comparison_that_fails_keeps_the_merged_model(
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def killed(command: Any, request: Any, **options: Any) -> Any:
        if request["task"] == "compare":
            raise EnvironmentFault("the child process ended with SIGKILL")
        return run_subprocess(command, request, **options)

    monkeypatch.setattr("qlora_sweep.sweep.merging.job.run_subprocess", killed)
    output = tmp_path / "merged"
    assert main(["merge", str(adapter), "--output", str(output), "--json"]) == 1
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert report["comparison"] is None
    assert "SIGKILL" in report["not_compared"]
    assert (output / INDEX).is_file()


def test_an_adapter_in_a_pickle_is_merged(adapter: Path, base: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    expected = tensors_in(merged_here(adapter, base, tmp_path / "one"))
    torch.save(load_file(adapter / ADAPTER), adapter / "adapter_model.bin")
    (adapter / ADAPTER).unlink()
    found = tensors_in(merged_here(adapter, base, tmp_path / "two"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("layers.0", "layers.9", r"changes 'model\.layers\.9\."),
        ("lora_B.weight", "lora_B.bias", r"lora_B\.bias.*does not hold"),
        ("lora_A", "lora_X", r"lora_X.*does not hold"),
    ],
)
def test_tensors_that_belong_to_nothing_are_named(
    old: str, new: str, words: str, adapter: Path, base: Path, tmp_path: Path
) -> None:
    rewritten(adapter / ADAPTER, lambda held: {k.replace(old, new): t for k, t in held.items()})
    with pytest.raises(InputError, match=words):
        merged_here(adapter, base, tmp_path / "merged")


def test_tensors_of_another_size_are_named(adapter: Path, base: Path, tmp_path: Path) -> None:
    rewritten(adapter / ADAPTER, lambda held: {k: t[:, :2].clone() for k, t in held.items()})
    with pytest.raises(InputError, match=r"size mismatch for .*lora_.*--model"):
        merged_here(adapter, base, tmp_path / "merged")


def test_a_base_that_the_adapter_was_not_trained_on_is_refused(
    adapter: Path, base: Path, tmp_path: Path
) -> None:
    def identity(model: Path) -> dict[str, Any]:
        return identity_of(load_model_spec(str(model)), is_loaded=True)

    refused(
        adapter, make_base(tmp_path / "other", GPT2), f"is a gpt2, and .* a {DEMO['model_type']}"
    )

    # Ours says which weights it was trained on, however they are split.
    (adapter / "training.json").write_text(json.dumps({"model": (own := identity(base))}))
    changed = make_base(tmp_path / "changed", DEMO, shard="1GB")
    assert identity(changed) == own
    rewritten(changed / "model.safetensors", lambda held: {n: t + 1 for n, t in held.items()})
    refused(adapter, changed, "not the one that the adapter was trained on")
    (adapter / "training.json").write_text("{")
    refused(adapter, changed, "training.json")


def test_a_base_that_is_quantized_pickled_or_cut_short_is_refused(
    adapter: Path, base: Path, tmp_path: Path
) -> None:
    own = Path(shutil.copytree(base, tmp_path / "base"))
    rewrite(own / "config.json", quantization_config={"quant_method": "bitsandbytes"})
    refused(adapter, own, r"stored quantized \(bitsandbytes\)")
    shutil.copy(base / "config.json", own / "config.json")
    shard = sorted(own.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    refused(adapter, own, f"{shard.name}: cut short")
    for path in own.glob("*.safetensors*"):
        path.unlink()
    (own / "pytorch_model.bin").write_bytes(b"")
    refused(adapter, own, r"weights in \.bin files are pickles")


def test_a_directory_without_an_adapter_says_where_one_is(adapter: Path, tmp_path: Path) -> None:
    refused(tmp_path / "none", None, "no such directory")
    shutil.copytree(adapter, tmp_path / "run" / "checkpoint-20")
    refused(tmp_path / "run", None, "checkpoint-20 below it holds one")


def test_one_model_is_in_memory_at_a_time_and_a_4_bit_one_that_fails_costs_no_proof(
    adapter: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    from qlora_sweep.sweep.merging.comparing import Models, compare

    loaded: list[weakref.ref[Any]] = []
    alive: list[int] = []
    load = AutoModelForCausalLM.from_pretrained

    def watched(*args: Any, **options: Any) -> Any:
        alive.append(sum(model() is not None for model in loaded))
        if options.get("quantization_config") is not None:
            raise RuntimeError("shape '[64, 1]' is invalid")
        model = load(*args, **options)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", watched)
    compared = compare(Models(base, adapter, base, dtype="bf16"), rows=1)
    assert alive == [0, 0, 0]
    assert compared["trained_failed"] == "shape '[64, 1]' is invalid"
    assert compared["trained_failed"] in [*finishing.comparison_lines(compared)][-1]


@pytest.mark.parametrize("kind", [pytest.param("fp8", marks=pytest.mark.integration), "int8"])
def test_an_adapter_of_an_8_bit_base_is_compared_on_that_base(
    kind: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    from qlora_sweep.sweep.merging.comparing import Models, compare

    models = Models(base, adapter, merged_here(adapter, base, tmp_path / "merged"), dtype="bf16")
    in_4_bits = compare(models, rows=1)["trained"]
    config = {"quantization": kind, "compute_dtype": kind}
    (adapter / "training.json").write_text(json.dumps({"config": config}))
    compared = compare(models, rows=1)
    assert compared["trained"]["quantization"] == kind
    errors = [one["mean_abs"] for one in (compared, compared["trained"], in_4_bits)]
    assert errors == sorted(errors)
    assert f"quantized base ({kind})" in [*finishing.comparison_lines(compared)][-1]


def test_an_adapter_that_was_trained_with_experts_on_the_host_is_compared(tmp_path: Path) -> None:
    from qlora_sweep.sweep.merging.comparing import Models, compare

    base = make_base(tmp_path / "base", families.spec_of("qwen3_moe").config)
    adapter = make_adapter(tmp_path / "adapter", base)
    models = Models(base, adapter, merged_here(adapter, base, tmp_path / "merged"), dtype="bf16")
    found = []
    for share in (0.0, 1.0):
        config = {"quantization": "nf4", "compute_dtype": "bf16", "offload_fraction": share}
        (adapter / "training.json").write_text(json.dumps({"config": config}))
        found.append(compare(models, rows=1)["trained"])
    assert found[0]["mean_abs"] == found[1]["mean_abs"] > 0
