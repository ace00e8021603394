"""A merge from the parent's side: what is typed checked, a child that merges, and a directory that
is there whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from qlora_sweep.search_spaces.checkpoints import (
    ADAPTER,
    ADAPTER_CONFIG,
    check_weights,
    tensors_of,
    weights_fingerprint,
)
from qlora_sweep.search_spaces.documents import exists, home_expanded, is_directory, read_json
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, SweepError, words_of
from qlora_sweep.search_spaces.models import ModelSpec, fetch_weights, is_hub_id, load_model_spec
from qlora_sweep.storage import files
from qlora_sweep.sweep.child_environment import child_environment
from qlora_sweep.sweep.data.tokenizers import TokenizerFiles
from qlora_sweep.sweep.subprocess_jobs import run_subprocess

ADAPTER_PICKLED = "adapter_model.bin"
_COMMAND = (sys.executable, "-P", "-m", "qlora_sweep.sweep.merging")
_WEIGHTS = (
    ".safetensors",
    ".index.json",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".gguf",
    ".ggml",
    ".onnx",
    ".onnx_data",
    ".ot",
    ".npz",
    ".pkl",
    ".tflite",
    ".nemo",
    ".zip",
    ".gz",
)
"""Endings of files that hold weights."""


def merge(
    adapter: str,
    *,
    output: str,
    model: str | None = None,
    dtype: str | None = None,
    rows: int = 4,
    on_news: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Merge an adapter into its base, and return what ``--json`` prints of it.

    Args:
        adapter: directory that PEFT saved.
        output: a new directory.
        model: the base, a directory or hub id; None for the one that the adapter names.
        dtype: bf16 or fp16; None for what the base is stored in.
        rows: to compare logits on; 0 for none.
        on_news: called with ``{"merged", "of"}`` in bytes, and ``{"compared", "of"}`` in models.

    Raises:
        InputError: no such adapter or base, or they cannot be merged; nothing was written.
        EnvironmentFault: no room on the disk, or no memory; nothing is left of it. A comparison
            that fails is none of these: the merged model is kept, and ``not_compared`` says why.
    """
    began = time.monotonic()
    target = home_expanded(output)
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"--output: {output} is not an empty directory: name a new one")
    files.require_parent(target)
    source = Path(adapter).absolute()
    lora = _read_adapter(adapter)
    named = lora.get("base_model_name_or_path") or None
    base, label = _base(source, named, typed=model)
    is_named = label == named or base == home_expanded(named or "").resolve()
    models = {"base": str(base), "adapter": str(source)}
    with _written_whole(target.absolute()) as directory:
        tokenizer = _copy_beside(source, base, directory)
        order = {"task": "merge", "dtype": dtype, "directory": str(directory), **models}
        merged = _run(order, on_news)
        text = _gpu(label, source.name, merged["dtype"])
        (directory / "README.md").write_text(text, encoding="utf-8")
        merged["notes"] += _tokens_without_rows(directory)
    # From here on the merged model is there, whatever becomes of the comparison.
    compared = _compared({**merged, **models, "directory": str(target.absolute())}, rows, on_news)
    peak = max(merged["peak_host_bytes"], compared.get("peak_host_bytes", 0))
    merged.pop("form")
    return {
        "output": str(target.absolute()),
        "adapter": adapter,
        "base": label,
        "trained_on": None if is_named else named,
        "seconds": time.monotonic() - began,
        "tokenizer": tokenizer,
        **merged,
        **compared,
        "peak_host_bytes": peak,
    }


def _tokens_without_rows(directory: Path) -> list[str]:
    """Return a note where a tokenizer has added tokens that its model has no row for."""
    try:
        added = read_json(directory / "tokenizer.json", label="tokenizer.json")["added_tokens"]
        highest = max(int(token["id"]) for token in added)
        rows = int(load_model_spec(str(directory)).config["vocab_size"])
    except (InputError, KeyError, TypeError, ValueError):
        return []
    if highest < rows:
        return []
    return [
        f"the tokenizer has a token {highest:,}, and the model {rows:,} rows: the adapter was "
        "saved without the embedding of its training (save_embedding_layers=True holds it)"
    ]


def _run(order: Mapping[str, Any], on_news: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    return run_subprocess(_COMMAND, order, on_news=on_news, environment=child_environment())


def _compared(
    order: Mapping[str, Any], rows: int, on_news: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    """Return how near the merged model is, or why that is not known."""
    if rows == 0:
        return {"comparison": None, "not_compared": "it was not asked for"}
    try:
        return _run({**order, "task": "compare", "rows": rows}, on_news)
    except (InputError, EnvironmentFault, OSError) as error:
        return {"comparison": None, "not_compared": words_of(error)}


def _read_adapter(name: str) -> dict[str, Any]:
    """Return an adapter's config.

    Raises:
        InputError: there is none, or it is not one that can be merged; the message says why.
        EnvironmentFault: its files are there and cannot be read.
    """
    directory = Path(name)
    label = f"{name}/{ADAPTER_CONFIG}"
    if not name or not is_directory(directory, label=f"adapter '{name}'"):
        raise InputError(f"adapter '{name}': no such directory")
    for file in (ADAPTER_CONFIG, ADAPTER):
        pickled = directory / ADAPTER_PICKLED
        if file == ADAPTER and exists(pickled, label=f"{name}/{ADAPTER_PICKLED}"):
            continue
        if not exists(directory / file, label=f"{name}/{file}"):
            below = sorted(path.parent.name for path in directory.glob(f"*/{file}"))
            hint = ""
            if below:
                hint = f"; {below[-1]} below it holds one"
            raise InputError(f"adapter '{name}': no {file} in it{hint}")
    if exists(directory / ADAPTER, label=f"{name}/{ADAPTER}"):
        tensors_of(directory / ADAPTER, label=f"{name}/{ADAPTER}")
    config = read_json(directory / ADAPTER_CONFIG, label=label)
    if not isinstance(config.get("peft_type"), str):
        raise InputError(f"{label}: peft_type: must name the kind of adapter")
    if config.get("layer_replication"):
        raise InputError(
            f"{label}: layer_replication: the adapter's model has more layers than its base, and "
            "is not merged; load base and adapter with PEFT"
        )
    return config


def _base(adapter: Path, named: str | None, *, typed: str | None) -> tuple[Path, str]:
    """Return the directory of the base's weights, and what a person calls the base.

    Raises:
        InputError: there is no such model, it has no 16-bit weights in safetensors, or is not the
            one that the adapter was trained on, as far as that is known.
        EnvironmentFault: the hub cannot be reached.
    """
    name = typed or named
    if name is None:
        raise InputError(f"adapter '{adapter.name}' names no base: name it with --model")
    try:
        spec = load_model_spec(name)
    except InputError as error:
        if typed is not None:
            raise
        hint = "the adapter names it; say where it is with --model"
        raise InputError(f"{error} ({hint})") from error
    if spec.source == "shipped":
        without = "is an architecture without weights: there is nothing to merge into"
        raise InputError(f"base '{name}' {without}; name the trained one with --model")
    if stored := spec.config.get("quantization_config"):
        method = f"{stored.get('quant_method', 'quantization_config')}"
        raise InputError(f"the base is stored quantized ({method}): name the 16-bit one, --model")
    trained_on = _trained_on(adapter)
    if typed and named and not trained_on:
        with suppress(SweepError):
            trained_on = {"model_type": load_model_spec(named).model_type}
    kind = trained_on.get("model_type")
    digest = trained_on.get("weights_fingerprint")
    if kind and _decoder(kind) != _decoder(spec.model_type):
        of_adapter = f"and the adapter was trained on a {kind}: name that one with --model"
        raise InputError(f"base '{name}' is a {spec.model_type}, {of_adapter}")
    path = spec.path
    if spec.source == "hub":
        path = fetch_weights(name)
    assert path is not None, "a directory has a path"
    check_weights(ModelSpec(name, "directory", spec.config, path))
    if digest and digest != weights_fingerprint(path):
        raise InputError(
            f"base '{name}' is not the one that the adapter was trained on, whose weights' "
            "fingerprint its training.json has: name that one with --model"
        )
    return path, name


def _trained_on(adapter: Path) -> Mapping[str, Any]:
    """Return what our training wrote of the base; nothing where another one made the adapter."""
    if exists(adapter / "training.json", label="training.json"):
        label = f"{adapter.name}/training.json"
        written = read_json(adapter / "training.json", label=label).get("model")
        if isinstance(written, dict) and "model_type" in written:
            return written
    return {}


def _decoder(model_type: str) -> str:
    """Return the name of a decoder's type, alone or in a model that sees as well."""
    return model_type.removesuffix("_model").removesuffix("_text")


@contextmanager
def _written_whole(output: Path) -> Iterator[Path]:
    """Yield a directory beside ``output`` that takes its name once it is whole, or is removed.

    What a merge that was killed has left of one is removed; no other merge writes there meanwhile.
    """
    temporary = output.with_name(f".{output.name}.merging")
    with ExitStack() as undo:
        try:
            temporary.mkdir(exist_ok=True)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(temporary, flags)
            undo.callback(os.close, descriptor)
            files.lock(descriptor)
            undo.callback(shutil.rmtree, temporary, ignore_errors=True)
            for path in temporary.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            yield temporary
            mode = (temporary / "config.json").stat().st_mode
            for path in temporary.rglob("*"):
                if path.is_file():
                    # safetensors makes its files for their owner alone; these are to be shared.
                    path.chmod(mode)
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
            temporary.rename(output)
        except BlockingIOError as error:
            raise InputError(f"--output: another merge writes {output} now") from error
        except OSError as error:
            raise EnvironmentFault(f"--output: {words_of(error)}: nothing was kept") from error


def _copy_beside(adapter: Path, base: Path, directory: Path) -> str | None:
    """Copy all of the base that is not weights, and the adapter's tokenizer over it; return whose
    tokenizer it is.
    """
    left_out = list(_WEIGHTS)
    if (adapter / "tokenizer_config.json").is_file():
        # Older ones of these beside it would win over it.
        left_out += ["special_tokens_map.json", "added_tokens.json"]
        left_out += ["chat_template.jinja", "chat_template.json"]
    # Other directories hold weights in another format, caches or samples.
    for path in chain(base.iterdir(), base.glob("additional_chat_templates/*.jinja")):
        is_kept = not path.name.startswith((".", "adapter_"))
        if path.is_file() and is_kept and not path.name.endswith(tuple(left_out)):
            _copy(path, source=base, directory=directory)
    tokenizer_files = TokenizerFiles("adapter", adapter).files
    for path in tokenizer_files:
        _copy(path, source=adapter, directory=directory)
    if tokenizer_files:
        return "adapter"
    if TokenizerFiles("base", base).files:
        return "base"
    return None


def _copy(path: Path, *, source: Path, directory: Path) -> None:
    target = directory / path.relative_to(source)
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(path, target)


def _gpu(base: str, adapter: str, dtype: str) -> str:
    """Return a model card of what was merged."""
    of_base = ""
    if is_hub_id(base):
        of_base = f"base_model: {base}\n"
    return f"""---
{of_base}library_name: transformers
tags:
- merge
---

# {base} with the adapter {adapter} merged into it

Weights in {dtype}, worked out in fp32 from the 16-bit base. The adapter was perhaps trained on that
base in 4 or 8 bits: this model is then near what was trained, and not the same.
"""
