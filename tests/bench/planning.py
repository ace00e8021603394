"""What a plan costs: user seconds beside those of its imports, and those of a file of many lines.

    python -m tests.bench.planning [--repeats 9] [--lines 5000] [-o OUT.jsonl]

A first plan finds no cache; what it has imported at its end is imported alone by the other process,
in turns with it. Of a file the second call counts, with the processes that it starts. Bytecode is
written before anything is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.harness import Row, middle, stamp, write
from tests.golden.test_golden_plans import drawn

STRUCTURES = 60
_SWEEP = "import sys; from qlora_sweep.sweep.entry_point import main; sys.exit(main())"
_AND_NAMES = (
    "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
    "from qlora_sweep.sweep.entry_point import main; sys.exit(main())"
)


def lines(count: int) -> Iterator[str]:
    """Yield configurations of so many structures, of random sizes and ranks. In segments that do
    not expand each step is replayed."""
    kinds, draw = list(itertools.islice(drawn(), STRUCTURES)), random.Random(0)
    for kind in itertools.islice(itertools.cycle(kinds), count):
        size = {"micro_batch_size": draw.randint(1, 32), "seq_len": 256 * draw.randint(1, 16)}
        rank = {"lora_rank": draw.choice((4, 8, 16, 32, 64, 128)), "effective_batch_size": None}
        yield json.dumps(kind | size | rank | {"expandable_segments": False})


def took(*words: str, cache: Path, code: str = _SWEEP) -> Row:
    """Return the seconds of a process, and what it wrote to standard error."""
    variables = {**os.environ, "XDG_CACHE_HOME": str(cache), "SWEEP_HOME": str(cache)}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.perf_counter()
    command = [sys.executable, "-P", "-c", code, *words]
    process = subprocess.Popen(
        command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    with process.stderr as stderr:
        said = stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1):
        raise SystemExit(said)
    wall = time.perf_counter() - began
    return {"user": usage.ru_utime, "system": usage.ru_stime, "wall": wall, "said": said}


def main() -> None:
    """Print a row for each question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--lines", type=int, default=5000)
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    write(stamp(), asked.output)
    fresh = (Path(d) for d in iter(tempfile.mkdtemp, None))
    said = took("plan", "a10", cache=next(fresh), code=_AND_NAMES)["said"].splitlines()[-1]
    names = [n for n in said.split() if n.replace(".", "").isidentifier() and n != "__main__"]
    imports = f"import {', '.join(names)}"
    pairs = [
        (took("plan", "a10", cache=next(fresh)), took(cache=next(fresh), code=imports))
        for _ in range(asked.repeats)
    ]
    write(
        {
            "question": "a first plan, over its imports",
            "plan_user_seconds": middle([plan["user"] for plan, _ in pairs]),
            "imports_user_seconds": middle([alone["user"] for _, alone in pairs]),
            "ratio": middle([plan["user"] / alone["user"] for plan, alone in pairs]),
        },
        asked.output,
    )
    cache = next(fresh)
    file = cache / "lines.jsonl"
    file.write_text("\n".join(lines(asked.lines)))
    words = ("plan", "--gpu", "a10", "--model", "mistral-7b-v0.3", "--from-file", str(file))
    _, second = (took(*words, "--json", cache=cache) for _ in range(2))
    seconds = {f"{key}_seconds": round(second[key], 2) for key in ("user", "system", "wall")}
    question = f"{asked.lines} lines of {STRUCTURES} structures, the second call"
    write({"question": question, "cores": len(os.sched_getaffinity(0)), **seconds}, asked.output)


if __name__ == "__main__":
    main()
