"""Files of others: which are refused, and what the rest teach of a GPU's speed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.gpus import GIB, find_gpu
from qlora_sweep.search_spaces.models import load_model_spec, shipped_models
from qlora_sweep.storage.contributions import (
    Contribution,
    parse_contribution,
    read_contribution,
)
from qlora_sweep.sweep.predict.contributions import check, fitted, sessions_of
from qlora_sweep.sweep.predict.speed.predictor import StepTimes
from tests.sweep.predict import contributed
from tests.sweep.predict.contributed import FILES, a_text, path_of
from tests.sweep.predict.rows import COMPILED, HELD_OUT, TABLE, Row
from tests.tables import cases

pytestmark = pytest.mark.usefixtures("home")
MISTRAL, A10 = load_model_spec("mistral-7b-v0.3"), find_gpu("a10")
CONFIGS = [
    TrialConfig(
        micro_batch_size=batch, checkpoint_fraction=share, lora_rank=rank, upcast_fp32=False
    )
    for batch in (4, 8)
    for share in (0.0, 1.0)
    for rank in (16, 64)
]
Lines = list[dict[str, Any]]


def simulated(
    *, slower: float = 1.0, seed: int = 0, configs: Sequence[TrialConfig] = CONFIGS
) -> Contribution:
    """A file of an A10 that is slower than its catalogue entry, with a session's usual noise."""
    random = np.random.default_rng(seed)
    times = StepTimes(configs, model=MISTRAL, gpu=A10, evidence=None)
    session = random.normal(0.0, 0.014)
    seconds = slower * times.seconds * np.exp(random.normal(session, 0.03, len(configs)))
    rows: list[Row] = [
        {
            "config": config.model_dump(mode="json"),
            "step_seconds": step,
            "step_seconds_ci95": [0.99 * step, 1.01 * step],
            "device_seconds": float(random.uniform(5, 20)),
            "peak_allocated_bytes": 10 * GIB,
            "peak_reserved_bytes": 11 * GIB,
        }
        for config, step in zip(configs, seconds.tolist(), strict=True)
    ]
    text = a_text("a10", MISTRAL.name, rows, versions={"torch": "2.11.0+cu130"})
    return parse_contribution(text, "a10.jsonl")


def changed(contribution: Contribution, change: Callable[[Lines], object]) -> str:
    lines = [json.loads(line) for line in contribution.text.splitlines()]
    change(lines)
    return "".join(json.dumps(line) + "\n" for line in lines)


def slower(row: dict[str, Any], times: float) -> None:
    """Change a row's speed as somebody would who keeps it consistent."""
    row["step_seconds"] *= times
    row["tokens_per_second"] /= times
    row["step_seconds_ci95"] = [times * end for end in row["step_seconds_ci95"]]


@pytest.mark.parametrize("name", FILES)
def test_the_committed_files_are_of_committed_recordings_and_pass(name: str) -> None:
    assert path_of(name).read_text() == FILES[name](), f"run: python -m {contributed.__name__}"
    assert 0.8 < check(read_contribution(path_of(name))) < 1.2


DOCTORED = """
# Line of the file, what is edited there, what is said.
0 | {host: mine} | unknown key 'host'
0 | {model_config: {hidden_size: 1234}} | no architecture that ships
0 | {versions: {torch: mine}} | versions.torch
0 | {date: "2026-11-21T12:00"} | date
0 | {contribution: 2} | contribution must be one of 1, got 2
0 | {gpu: voodoo, measured_on: voodoo} | unknown GPU
0 | {gpu: h200} | two GPUs
1 | {config: {target_modules: [mine]}} | has none such
1 | {step_seconds: 0.9} | tokens, and a step has 2,048
1 | {step_seconds_ci95: [1000.0, 2000.0]} | outside its own interval
1 | {peak_allocated_bytes: 1000000000000000} | do not go together
"""


def refused(text: str, words: str) -> None:
    """Check that a file is refused in one plain sentence."""
    with pytest.raises(InputError) as caught:
        check(parse_contribution(text, "f.jsonl"))
    assert str(caught.value).startswith("f.jsonl: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(("line", "edits", "words"), cases(DOCTORED))
def test_an_edited_file_is_refused(line: int, edits: dict[str, Any], words: str) -> None:
    def edit(lines: Lines) -> None:
        for key, value in edits.items():
            if isinstance(value, dict):
                value = lines[line][key] | value
            lines[line][key] = value

    refused(changed(simulated(), edit), words)


@pytest.mark.parametrize(
    ("times", "words"), [([1e-3] * 8, "is less than the"), ([1, 3] * 4, "contradict each other")]
)
def test_speeds_that_cannot_be_are_refused_however_consistent(
    times: list[float], words: str
) -> None:
    def edit(lines: Lines) -> None:
        for row, each in zip(lines[1:], times, strict=True):
            slower(row, each)

    refused(changed(simulated(), edit), words)


def speed_of(*files: Contribution) -> float:
    """How many times as long as by the catalogue alone the fit has a usual step take."""
    evidence, _ = fitted(sessions_of(files))
    usual = CONFIGS[:1]
    before = StepTimes(usual, model=MISTRAL, gpu=A10, evidence=None)
    after = StepTimes(usual, model=MISTRAL, gpu=A10, evidence=evidence)
    return float(after.seconds[0] / before.seconds[0])


def test_one_odd_trial_has_next_to_no_weight() -> None:
    honest = simulated(slower=1.2)
    odd = parse_contribution(changed(honest, lambda f: slower(f[3], 4.0)), "f.jsonl")
    check(odd)
    _, (weights,) = fitted(sessions_of([odd]))
    assert weights[2] < 0.1 < 0.5 < weights[[0, 1, 3, 4, 5, 6, 7]].min()
    assert speed_of(odd) == pytest.approx(speed_of(honest), rel=0.05)


def test_the_same_measurements_count_once() -> None:
    whole = simulated()
    part = parse_contribution(changed(whole, lambda f: f.pop()), "part.jsonl")
    alone, _ = fitted(sessions_of([whole]))
    both, _ = fitted(sessions_of([part, whole]))
    assert (both.files, both.trials) == (alone.files, alone.trials) == (1, 8)
    assert np.array_equal(both.mean, alone.mean)
    another, _ = fitted(sessions_of([whole, simulated(seed=1)]))
    assert (another.files, another.trials) == (2, 16)


@pytest.mark.parametrize("wrong", [0.7, 0.3, 4.0])
def test_a_file_that_contradicts_the_others_of_its_gpu_hardly_counts(wrong: float) -> None:
    honest = [simulated(slower=1.2, seed=seed) for seed in (1, 2)]
    together = speed_of(*honest, simulated(slower=wrong, seed=3))
    assert together == pytest.approx(speed_of(*honest), rel=0.05)


def test_a_file_alone_that_is_far_off_the_catalogue_is_believed_once_a_second_agrees() -> None:
    assert speed_of(simulated(slower=4.0)) < 1.5
    assert speed_of(*(simulated(slower=4.0, seed=seed) for seed in range(3))) > 2.0


@pytest.mark.parametrize("times", [0.85, 1.2])
def test_one_file_makes_a_gpus_interval_narrower_and_right(times: float) -> None:
    evidence, _ = fitted(sessions_of([simulated(slower=times)]))
    others = [config.changed(seq_len=1024, kernels="liger") for config in CONFIGS]
    before = StepTimes(others, model=MISTRAL, gpu=A10, evidence=None)
    after = StepTimes(others, model=MISTRAL, gpu=A10, evidence=evidence)
    off = np.abs(np.log(times * before.seconds / after.seconds))
    assert (off < 1.645 * after.log_spread).mean() >= 0.9
    assert (after.log_spread < 0.75 * before.log_spread).all()


def test_what_other_sessions_teach_of_an_h200_holds_for_one_that_was_not_seen() -> None:
    """Leave one recording out: nine in ten of its steps are to be in the stated interval."""
    recordings = [shipped_of(rows) for rows in (TABLE, HELD_OUT, COMPILED)]
    for model in ("mistral-7b-v0.3", "tinyllama-1.1b"):
        recordings.append([parse_contribution(contributed.of_surface(model, every=1), "f")])
    inside: list[bool] = []
    for held in recordings:
        taught = [file for of in recordings if of is not held for file in of]
        evidence, _ = fitted(sessions_of(taught))
        for surface in (file.surface for file in held):
            rows = [row for row in surface.rows if row.step_seconds]
            configs = [row.config for row in rows]
            gpu = surface.measured_on
            times = StepTimes(configs, model=surface.model, gpu=gpu, evidence=evidence)
            off = np.log([row.step_seconds for row in rows] / times.seconds)  # type: ignore[operator]
            inside += (np.abs(off) < 1.645 * times.log_spread).tolist()
    assert len(inside) > 550
    assert 0.88 < np.mean(inside) < 0.97


def shipped_of(rows: Sequence[Row]) -> list[Contribution]:
    """What rows of shipped models would be as contributions."""
    found = []
    for model in shipped_models():
        own = [row for row in rows if row["model"] == model.name]
        if own:
            text = a_text("h200", model.name, own, versions={"torch": "2.11.0"})
            found.append(parse_contribution(text, "f"))
    return found
