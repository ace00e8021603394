"""What a plan costs: user seconds beside those of its imports, and those of a file of many lines.

    python -m tests.bench.planning [--repeats 9] [--lines 5000] [-o OUT.jsonl]

A first plan finds no cache; what it has imported at its end is imported alone by the other process,
in turns with it. Of a file the second call counts, with the processes that it starts. Bytecode is
written before anything is measured.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.bench.harness import Row, asked, middle, sweep, write
from tests.golden.test_golden_plans import drawn

STRUCTURES = 60
_AND_NAMES = (
    "import atexit, sys; atexit.register(lambda: print(*sys.modules)); "
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


def took(*words: str, cache: Path, **program: str) -> Row:
    """Return what a process takes that finds a cache, and what it printed."""
    return sweep(words, home=cache, XDG_CACHE_HOME=str(cache), **program)


def main() -> None:
    """Print a row for each question."""
    typed = asked(__doc__, repeats=9, lines=5000)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    fresh = (Path(d) for d in iter(tempfile.mkdtemp, None))
    said = took("plan", "a10", cache=next(fresh), program=_AND_NAMES)["printed"].splitlines()[-1]
    names = [n for n in said.split() if n.replace(".", "").isidentifier() and n != "__main__"]
    imports = f"import {', '.join(names)}"
    plans = []
    alone = []
    for _ in range(typed.repeats):
        plans.append(took("plan", "a10", cache=next(fresh))["user_seconds"])
        alone.append(took(cache=next(fresh), program=imports)["user_seconds"])
    write(
        {
            "question": "a first plan, over its imports",
            "plan_user_seconds": middle(plans),
            "imports_user_seconds": middle(alone),
            "ratio": middle([plan / imported for plan, imported in zip(plans, alone, strict=True)]),
        },
        typed.output,
    )
    cache = next(fresh)
    file = cache / "lines.jsonl"
    file.write_text("\n".join(lines(typed.lines)))
    words = ("plan", "--gpu", "a10", "--model", "mistral-7b-v0.3", "--from-file", str(file))
    _, second = (took(*words, "--json", cache=cache) for _ in range(2))
    del second["printed"]
    question = f"{typed.lines} lines of {STRUCTURES} structures, the second call"
    write({"question": question, "cores": len(os.sched_getaffinity(0)), **second}, typed.output)


if __name__ == "__main__":
    main()
