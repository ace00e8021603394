"""Train, verify and merge beside another commit: speed, peaks and seconds of each, in turns.

    python -m tests.bench.finishing_beside --against CHECKOUT --data DATASET [--space a10]
        [--base DIRECTORY] [--steps 60] [--rounds 2] [-o OUT.jsonl]

Each checkout runs a study of three trials first; then its winner is trained and verified, and with
a base the adapter is merged into it. Without ``--base`` weights are random and nothing is merged.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.bench.harness import Row, checkouts, stamp, sweep, write

FIGURES = ("tokens_per_second", "peak_allocated_bytes", "step_seconds", "merge_seconds")


def asked_of(asked: argparse.Namespace, home: Path, number: int) -> Iterator[list[str]]:
    """Yield the commands of a round."""
    steps, adapter = str(asked.steps), home / f"adapter-{number}"
    weights = ["--model", str(asked.base)] if asked.base else ["--set", "weights=random"]
    trained = ["--data", str(asked.data), "--output", str(adapter), "--max-steps", steps]
    yield ["train", "beside", *trained, *weights, "--json"]
    yield ["verify", "beside", "--steps", steps, "--json"]
    if asked.base:
        merged = str(home / f"merged-{number}")
        yield ["merge", str(adapter), "--output", merged, "--model", str(asked.base), "--json"]


def figures(took: Row) -> Row:
    """Return what a command says of speed and memory, beside what it took."""
    said = json.loads(took.pop("printed"))
    return took | {key: said[key] for key in FIGURES if said.get(key) is not None}


def main() -> None:
    """Print a row for each command, round and checkout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--space", default="a10")
    parser.add_argument("--base", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    write(stamp(), asked.output)
    trees = checkouts(asked.against)
    with tempfile.TemporaryDirectory() as directory:
        homes = {name: Path(directory, name) for name in trees}
        for name, checkout in trees.items():
            homes[name].mkdir()
            study = ["run", asked.space, "--study", "beside", "--data", str(asked.data)]
            study += ["--trials", "3", "--no-confirm"]
            sweep(study, home=homes[name], checkout=checkout)
        for number in range(asked.rounds):
            rounds = [asked_of(asked, homes[name], number) for name in trees]
            for commands in zip(*rounds, strict=True):
                for (name, checkout), words in zip(trees.items(), commands, strict=True):
                    row = figures(sweep(words, home=homes[name], checkout=checkout))
                    told = {"command": words[0], "code": name, "round": number}
                    write(told | row, asked.output)


if __name__ == "__main__":
    main()
