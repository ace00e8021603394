"""What several GPUs of one machine are worth: trials a minute, and what busy neighbours cost.

Trials a minute are those of whole studies, from the command to its end, of as many trials for each
GPU, of one grid in one order. Trials differ in length, so what the same mean length would have
given stands beside it. Neighbours share power, host cores and the bus: a configuration is measured
on the first GPU in turns, while the others idle and while they train. Several models' studies
are one command on all GPUs, whose seconds are set against the sum of what each study took.

    python -m tests.bench.many_cards OUT.json [--space a10] [--trials 16] [--turns 4] [--model M ..]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from search_spaces.config import TrialConfig
from search_spaces.space import StepBudget
from storage.reading import read_study
from storage.records import Measured
from sweep.running.device_info import ChosenCard, choose_cards, read_cards
from sweep.running.runner import Runner
from sweep.running.wire import TrialRequest
from sweep.study.session import Prepared, prepare, supervised_runner
from tests.bench.stamp import stamp

STEPS = StepBudget(measured_min=20, measured_max=20)
FAST = {
    "kernels": "liger",
    "upcast_fp32": False,
    "checkpoint_fraction": 0.0,
    "micro_batch_size": 10,
}
CONFIGS = {"recipe": TrialConfig(micro_batch_size=8), "fast": TrialConfig(**FAST)}


def runner_on(prepared: Prepared, card: ChosenCard) -> Runner:
    found = supervised_runner(replace(prepared, name=f"GPU-{card.index}", cards=(card,)))
    return found.all[0]


def speed(runner: Runner, config: TrialConfig) -> float:
    outcome = runner.run(TrialRequest(config=config, steps=STEPS))
    assert isinstance(outcome, Measured), outcome
    return outcome.measurement.tokens_per_second


@contextmanager
def busy(runners: list[Runner], config: TrialConfig) -> Iterator[None]:
    """Have GPUs train one trial after another inside the ``with``."""
    over = threading.Event()

    def train(runner: Runner) -> None:
        while not over.is_set():
            runner.run(TrialRequest(config=config, steps=STEPS))

    threads = [threading.Thread(target=train, args=(runner,)) for runner in runners]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def neighbours(prepared: Prepared, cards: tuple[ChosenCard, ...], turns: int) -> dict[str, Any]:
    """Return the speed on the first GPU in turns, alone and beside busy neighbours."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        first, *others = (stack.enter_context(runner_on(prepared, card)) for card in cards)
        for name, config in CONFIGS.items():
            for runner in (first, *others):
                speed(runner, config)
            alone, beside = [], []
            for _ in range(turns):
                alone.append(speed(first, config))
                with busy(others, config):
                    beside.append(speed(first, config))
            ratio = statistics.median(beside) / statistics.median(alone)
            found[name] = {"alone": alone, "beside": beside, "ratio": round(ratio, 4)}
    return found


def timed(home: str, *words: str) -> float:
    """Run a command with nothing kept from another; return its seconds."""
    command = [sys.executable, "-P", "-m", "sweep", "run", *words, "--no-confirm", "--json"]
    environment = {**os.environ, "SWEEP_HOME": home, "XDG_CACHE_HOME": home}
    began = time.monotonic()
    subprocess.run(command, env=environment, check=False, stdout=sys.stderr)
    return time.monotonic() - began


def study(space: str, cards: str, trials: int) -> dict[str, Any]:
    """Run a study of so many trials on GPUs; return how long it took."""
    with tempfile.TemporaryDirectory() as home:
        options = ["--study", "bench", "--devices", cards, "--trials", str(trials)]
        seconds = timed(home, space, *options, "--sampler", "grid")
        url = f"sqlite:///{home}/runs/sweep.db"
        records = read_study("bench", url=url, home=Path(home) / "runs").records
    ran = [record for record in records if record.device_seconds]
    return {
        "cards": cards,
        "trials": len(ran),
        "seconds": round(seconds, 1),
        "device_seconds": round(sum(record.device_seconds for record in ran), 1),
        "trials_per_minute": round(60 * len(ran) / seconds, 2),
        "by_card": {
            place: sum(record.ran_on == place for record in ran)
            for place in sorted({record.ran_on or "" for record in ran})
        },
    }


def models(space: str, names: list[str], trials: int) -> dict[str, Any]:
    """Tune several models in one command on all GPUs; return what that took, and each alone."""
    with tempfile.TemporaryDirectory() as home:
        typed = [f"--model={name}" for name in names]
        options = ["--study", "bench", "--devices", "all", "--trials", str(trials)]
        seconds = timed(home, space, *typed, *options)
        url = f"sqlite:///{home}/runs/sweep.db"
        found = {
            name: read_study(f"bench-{name}", url=url, home=Path(home) / "runs") for name in names
        }
    each = {name: round(known.wall_seconds, 1) for name, known in found.items()}
    total = sum(each.values())
    return {
        "seconds": round(seconds, 1),
        "each": each,
        "trials": {name: len(known.records) for name, known in found.items()},
        "share_of_their_sum": round(seconds / total, 3) if total else None,
    }


def at_equal_length(one: dict[str, Any], many: dict[str, Any]) -> float:
    """Return how many times one GPU's trials a minute several have, were trials as long."""
    busy = [found["device_seconds"] / found["seconds"] for found in (one, many)]
    return round(busy[1] / busy[0], 3)


def main() -> None:
    """Measure, and write what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--space", default="a10")
    parser.add_argument("--trials", type=int, default=16, help="of each GPU")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--model-trials", type=int, default=4)
    asked = parser.parse_args()
    cards = choose_cards("all", read_cards())
    prepared = prepare(
        asked.space, overrides={}, held=None, study="bench", card=lambda: cards[0].card
    )
    found = stamp()

    def keep(name: str, value: Any) -> None:
        print(name, value, flush=True)
        found[name] = value
        asked.out.write_text(json.dumps(found, indent=2) + "\n")

    one = study(asked.space, "1", asked.trials)
    keep("one_card", one)
    many = study(asked.space, str(len(cards)), len(cards) * asked.trials)
    keep("all_cards", many)
    keep("times_one_card", round(many["trials_per_minute"] / one["trials_per_minute"], 3))
    keep("times_one_card_at_equal_length", at_equal_length(one, many))
    if asked.model:
        keep("models", models(asked.space, asked.model, asked.model_trials))
    if asked.turns:
        with tempfile.TemporaryDirectory() as home:
            os.environ["SWEEP_HOME"] = home
            keep("neighbours", neighbours(prepared, cards, asked.turns))


if __name__ == "__main__":
    main()
