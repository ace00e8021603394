"""Measures the walk of one configuration through the code, from a YAML file to its report.

    python -m tests.bench.walk [TREE]

Runs a real study of two trials on the CPU out of ``TREE`` (this checkout by default), and its
report, and notes in every process each function of ours that is entered with the followed
configuration in hand: as an argument, or inside one. What the configuration or its record tells of
itself is no room that it enters. Prints the rooms (modules) in the order they
are first entered, the distinct hops from one to the next, and how many of those climb back to a
room that was entered before.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FOLLOWED_RANK = 7
"""Tells the configuration that is followed from every other."""

SPACE = f"""
name: walk
gpu: cpu
model: demo
budget_gib: 4
trials: 2
steps: {{warmup_min: 2, warmup_max: 2, measured_min: 3, measured_max: 3}}
dimensions: {{lora_rank: [{FOLLOWED_RANK}]}}
fixed: {{seq_len: 32, micro_batch_size: 1, compute_dtype: bf16, attention: sdpa}}
baseline: {{lora_rank: 4}}
"""

# Imported by every Python process at its start, the worker's too.
NOTE_TAKER = """
import os, sys, threading, time
ROOT, OUT = os.environ["WALK_ROOT"] + os.sep, os.environ["WALK_OUT"]
OURS = tuple(ROOT + name + os.sep for name in ("search_spaces", "storage", "sweep", "reports"))
entered = open(f"{OUT}/{os.getpid()}", "a", buffering=1)

def is_followed(value, depth=2):
    if type(value).__name__ == "TrialConfig":
        return getattr(value, "lora_rank", None) == FOLLOWED
    if depth and type(value).__module__.partition(".")[0] in ("search_spaces", "storage", "sweep"):
        held = getattr(value, "__dict__", {})
        return any(is_followed(held.get(name), depth - 1) for name in ("config", "record", "trial"))
    return False

def note(frame, event, _):
    if event != "call" or not frame.f_code.co_filename.startswith(OURS):
        return
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if type(frame.f_locals.get("self")).__name__ in ("TrialConfig", "TrialRecord"):
        return
    if any(is_followed(frame.f_locals.get(name)) for name in names):
        entered.write(f"{time.monotonic_ns()} {code.co_filename[len(ROOT):]}\\n")

sys.setprofile(note)
threading.setprofile(note)
"""


def walk(tree: Path) -> list[list[tuple[int, str]]]:
    """Return when which module of ``tree`` was entered, by process."""
    with tempfile.TemporaryDirectory() as home:
        out = Path(home, "out")
        out.mkdir()
        taker = f"FOLLOWED = {FOLLOWED_RANK}\n{NOTE_TAKER}"
        Path(home, "sitecustomize.py").write_text(taker, encoding="utf-8")
        Path(home, "walk.yaml").write_text(SPACE, encoding="utf-8")
        environment = {
            **os.environ,
            "PYTHONPATH": f"{home}{os.pathsep}{tree}",
            "WALK_ROOT": str(tree),
            "WALK_OUT": str(out),
            "SWEEP_HOME": home,
            "OMP_NUM_THREADS": "1",
        }
        for arguments in (["run", "walk.yaml"], ["report", "walk"]):
            program = f"import sys; from sweep.cli import main; sys.exit(main({arguments!r}))"
            subprocess.run(
                [sys.executable, "-c", program],
                cwd=home,
                env=environment,
                check=True,
                stdout=subprocess.DEVNULL,
            )
        notes = [path.read_text(encoding="utf-8").splitlines() for path in out.iterdir()]
    return [[(int(at), name) for at, name in map(str.split, lines)] for lines in notes]


def main() -> None:
    """Print the walk as JSON."""
    tree = Path(sys.argv[1] if sys.argv[1:] else Path(__file__).parents[2]).resolve()
    entries = walk(tree)
    rooms = list(dict.fromkeys(name for _, name in sorted(itertools.chain.from_iterable(entries))))
    walks = [
        [name for name, _ in itertools.groupby(name for _, name in notes)] for notes in entries
    ]
    hops = {hop for names in walks for hop in itertools.pairwise(names)}
    back = [hop for hop in hops if rooms.index(hop[1]) < rooms.index(hop[0])]
    answer = {"rooms": len(rooms), "hops": len(hops), "back": len(back), "in_order": rooms}
    print(json.dumps(answer, indent=2))


if __name__ == "__main__":
    main()
