"""What looking costs: processor seconds of `plan`, and of what is said of a study of many trials.

    python -m tests.bench.looking [--trials 1000] [--repeats 3] [--against CHECKOUT] [-o OUT.jsonl]

Every command is a process of its own, imports included; of several runs the least counts. `plan`
traces the space first, which is not counted. With another checkout its commands read the same study
in turns with these.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.bench.harness import Row, asked, checkouts, sweep, write
from tests.storage import long_studies

NAME = long_studies.NAME
COMMANDS = (
    ["plan", "a10"],
    ["status"],
    ["status", NAME],
    ["best", NAME],
    ["report", NAME, "-o", "-"],
)


def main() -> None:
    """Print a row for each command and checkout."""
    typed = asked(__doc__, trials=1000, repeats=3, against=Path)
    trees = checkouts(typed.against)
    with tempfile.TemporaryDirectory() as directory:
        home, runs, space = Path(directory), Path(directory, "runs"), long_studies.a_space()
        runs.mkdir()
        known = list(long_studies.records(space, typed.trials))
        long_studies.store(f"sqlite:///{runs}/sweep.db", runs, space, known)
        for checkout in trees.values():
            sweep(COMMANDS[0], home=home, checkout=checkout)
        for words in COMMANDS:
            took: dict[str, list[Row]] = {name: [] for name in trees}
            for _ in range(typed.repeats):
                for name, checkout in trees.items():
                    took[name].append(sweep(words, home=home, checkout=checkout))
            for name, rows in took.items():
                least = min(rows, key=lambda row: row["cpu_seconds"])
                del least["printed"]
                write(
                    {"command": " ".join(words), "code": name, "trials": typed.trials, **least},
                    typed.output,
                )


if __name__ == "__main__":
    main()
