"""What the programs here share: what stands beside a result, rows, and commands in turns.

Each program answers one question: ``python -m tests.bench.QUESTION``; its own text says how.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from qlora_sweep.sweep.running.device_info import read_gpu

ROOT = Path(__file__).parents[2]
LIBRARIES = (
    *("torch", "triton", "transformers", "peft", "bitsandbytes", "accelerate", "liger-kernel"),
    *("trl", "flash-attn", "flash-linear-attention"),
)
_SWEEP = "import sys; from qlora_sweep.sweep.cli import main; sys.exit(main())"
Row = dict[str, Any]


def asked(description: str | None, **options: Any) -> argparse.Namespace:
    """Return what was typed, with the file for rows as ``output``, and write the stamp.

    Args:
        description: what the program says of itself.
        options: the default of each, or its type where it has none.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("-o", "--output", type=Path)
    for name, value in options.items():
        if isinstance(value, type):
            parser.add_argument(f"--{name}", type=value)
        else:
            parser.add_argument(f"--{name}", type=type(value), default=value)
    typed = parser.parse_args()
    write(stamp(), typed.output)
    return typed


def stamp() -> Row:
    """Return where, when and with what a program of this directory ran."""
    gpu = read_gpu()
    words = (word.removeprefix(f"{ROOT}/") for word in sys.argv)
    return {
        "command": " ".join(["python", *words]),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "measured_on": None if gpu is None else gpu.product,
        "memory_bytes": None if gpu is None else gpu.memory_bytes,
        "driver": None if gpu is None else gpu.driver,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in LIBRARIES},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def with_part(page: str, part: str, *, begin: str, end: str) -> str:
    """Return a page with another part between two marks, which stay."""
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}{part}{end}{after}"


def word_tokenizer(words: int) -> Any:
    """Return a tokenizer of so many words, the special ones among them."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    known = ["<unk>", "<s>", "</s>", *(f"w{index}" for index in range(3, words))]
    numbers = {word: number for number, word in enumerate(known)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(numbers, unk_token="<unk>")),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
    )


def write(row: Row, output: Path | None = None) -> None:
    """Print a row, and add it to a file of JSON lines."""
    line = json.dumps(row)
    print(line, flush=True)
    if output is not None:
        with output.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def sweep(
    words: Sequence[str],
    *,
    home: Path,
    checkout: Path = ROOT,
    program: str = _SWEEP,
    **variables: str,
) -> Row:
    """Run a command of a checkout in a process of its own; return what it took and printed.

    Args:
        words: of the command.
        home: for studies.
        checkout: whose code is run.
        program: Python that reads the words.
        variables: of the environment.

    Raises:
        SystemExit: it ended with another status than 0 or 1.
    """
    environment = {**os.environ, "PYTHONPATH": str(checkout), "SWEEP_HOME": str(home)}
    environment |= variables
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", program, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=sys.stderr,
    )
    assert process.stdout is not None
    with process.stdout as stdout:
        printed = stdout.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1):
        raise SystemExit(f"sweep {' '.join(words)} of {checkout} ended with {process.returncode}")
    return {
        "wall_seconds": round(time.perf_counter() - began, 3),
        "user_seconds": round(usage.ru_utime, 3),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 3),
        "peak_mib": usage.ru_maxrss // 1024,
        "printed": printed,
    }


def checkouts(against: Path | None) -> Mapping[str, Path]:
    """Return this tree, and beside it another one that is asked the same in turns."""
    return {"here": ROOT} | ({"against": against.resolve()} if against else {})


def middle(values: Sequence[float]) -> float:
    """Return the median of some seconds, rounded."""
    return round(statistics.median(values), 4)
