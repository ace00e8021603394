"""What a verification needs torch for, in a process of its own: random weights of an architecture,
or TRL's training on an exported file, with an exported script's options.

Run as ``python -P -m qlora_sweep.sweep.verifying FILE --model MODEL --output DIRECTORY ...``:
without ``--metrics`` FILE is a model's `ModelSpec.to_json`, and MODEL the directory of a tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
from importlib import import_module
from pathlib import Path
from typing import Any

from qlora_sweep.sweep.processes import bind_to_parent

_SHARD_BYTES_MAX = 3 * 10**9
_STD = 0.02
_WARMUP_STEPS = 3


def write_random_weights(spec: Any, directory: Path, *, tokenizer: Path) -> None:
    """Write bf16 weights with config and tokenizer, one shard in memory at a time.

    Speed and memory do not depend on what the weights are, and drawing billions of numbers takes a
    minute: matrices of one shape are equal.

    Args:
        spec: the architecture, a `ModelSpec`.
        directory: is made.
        tokenizer: whose files are put beside the weights.
    """
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    values = {key: value for key, value in spec.config.items() if key != "quantization_config"}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # Tied weights are one parameter, and are stored once.
    tensors: dict[str, Any] = dict(model.named_parameters())
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=_SHARD_BYTES_MAX)
    drawn: dict[tuple[int, ...], Any] = {}
    torch.manual_seed(0)
    for file, names in split.filename_to_tensors.items():
        shard = {}
        for name in names:
            shape = tuple(tensors[name].shape)
            if len(shape) < 2:
                shard[name] = torch.ones(shape, dtype=torch.bfloat16)
                if name.endswith("bias"):
                    shard[name].zero_()
                continue
            if shape not in drawn:
                drawn[shape] = torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, _STD)
            # Each has memory of its own: safetensors refuses those that share it.
            shard[name] = drawn[shape].clone()
        save_file(shard, directory / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index)
        (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    model.config.save_pretrained(directory)
    files = shutil.ignore_patterns("config.json")
    shutil.copytree(tokenizer, directory, ignore=files, dirs_exist_ok=True)


def train_with_trl(typed: argparse.Namespace) -> dict[str, Any]:
    """Train some steps as ``trl METHOD --config FILE`` does, and return what was reached."""
    import torch
    import trl
    import yaml

    from qlora_sweep.sweep.export.record import read_record
    from qlora_sweep.sweep.hugging_face import ThroughputCallback

    record, _ = read_record(typed.file)
    config = record.config
    if typed.budget_bytes is not None:
        # On a larger GPU the allocator has what the one has that the file is for.
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        share = min(1.0, typed.budget_bytes / total_bytes)
        torch.cuda.set_per_process_memory_fraction(share)
    method = import_module(f"trl.scripts.{config.method}")
    options = yaml.safe_load(Path(typed.file).read_text(encoding="utf-8"))
    options |= {
        "model_name_or_path": typed.model,
        "output_dir": typed.output,
        "max_steps": typed.max_steps,
        "save_strategy": "no",
        "use_cpu": not torch.cuda.is_available(),
    }
    if record.texts is None:
        columns = ["text"]
        if config.is_on_pairs:
            columns = ["prompt", "chosen", "rejected"]
        options["datasets"] = [{"path": "json", "data_files": typed.data, "columns": columns}]
    else:
        options["eval_strategy"] = "no"
    if "chat_template_path" in options:
        # It lies beside the file, whatever directory this runs in.
        options["chat_template_path"] = str(Path(typed.file).parent / options["chat_template_path"])
    path = Path(typed.output).with_suffix(".yaml")
    path.write_text(yaml.safe_dump(options, sort_keys=False), encoding="utf-8")
    name = f"{config.method.upper()}Trainer"
    trainer_class = getattr(trl, name)
    clock = ThroughputCallback(record, lambda _: None)
    trainers = []

    def with_clock(*args: Any, **kwargs: Any) -> Any:
        trainer = trainer_class(*args, **kwargs, callbacks=[clock])
        trainer.save_model = lambda *_, **__: None
        trainers.append(trainer)
        return trainer

    # TRL's script has no option for a callback: it takes the trainer's class from `trl`.
    setattr(trl, name, with_clock)
    method.main(
        *method.make_parser().parse_args_and_config(
            ["--config", str(path)], fail_with_unknown_args=True
        )
    )
    seconds = clock.seconds()
    rate = clock.tokens_per_second
    if record.texts is None:
        # Random examples are full, and each of their tokens is supervised.
        rate = config.tokens_per_step / statistics.median(seconds[_WARMUP_STEPS:] or seconds)
    dtypes = set()
    for parameter in trainers[0].model.parameters():
        if parameter.requires_grad:
            dtypes.add(str(parameter.dtype).removeprefix("torch."))
    return {
        "steps": len(seconds),
        "tokens_per_second": rate,
        "peak_allocated_bytes": clock.peak_allocated_bytes(),
        "adapter_dtypes": sorted(dtypes),
    }


def main() -> None:
    """Do what was typed."""
    bind_to_parent(os.getppid())
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    for name in ("--model", "--data", "--output", "--metrics"):
        parser.add_argument(name)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--budget-bytes", type=int)
    typed = parser.parse_args()
    if typed.metrics is not None:
        Path(typed.metrics).write_text(json.dumps(train_with_trl(typed)), encoding="utf-8")
        return
    from qlora_sweep.search_spaces.models import ModelSpec
    from qlora_sweep.sweep.training.libraries import OPTIONAL, lean_imports

    spec = ModelSpec.from_json(json.loads(Path(typed.file).read_text(encoding="utf-8")))
    with lean_imports(*OPTIONAL):
        write_random_weights(spec, Path(typed.output), tokenizer=Path(typed.model))


if __name__ == "__main__":
    main()
