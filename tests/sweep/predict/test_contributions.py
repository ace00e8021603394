"""Files of others: which are refused or outvoted, and what the rest teach of a GPU's speed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.gpus import GIB, find_gpu
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.storage.contributions import (
    BYTES_MAX,
    Contribution,
    parse_contribution,
    read_contribution,
)
from qlora_sweep.sweep.predict.contributions import (
    Session,
    check,
    evidence_document,
    posterior,
    refuse_copy,
)
from qlora_sweep.sweep.predict.memory.prediction import MemoryPrediction
from qlora_sweep.sweep.predict.speed.contributed import Contributed
from qlora_sweep.sweep.predict.speed.predictor import StepTimes
from tests.sweep.imagined_memory import ImaginedMemory, ImaginedPredictor, imagined
from tests.sweep.predict import contributed
from tests.sweep.predict.contributed import FILES, a_text, path_of
from tests.sweep.predict.rows import COMPILED, HELD_OUT, TABLE, Row

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
TODAY = date(2027, 1, 1)


class Peaks(ImaginedPredictor):
    """Predicts of every configuration the peak that `simulated` gives it."""

    def predict(self, config: TrialConfig) -> ImaginedMemory:
        return imagined(10 * GIB, uncertainty=0.02)


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
    file = read_contribution(path_of(name))
    peaks = {row.config: row.peak_allocated_bytes for row in file.measured}

    class Recorded(ImaginedPredictor):
        def predict(self, config: TrialConfig) -> MemoryPrediction:  # type: ignore[override]
            return imagined(peaks[config] or 0, uncertainty=0.015)

    check(file, predictor=Recorded(), today=TODAY)


DOCTORED: dict[str, tuple[Callable[[Lines], object], str]] = {
    "unknown key": (lambda f: f[0].update(host="mine"), "unknown key 'host'"),
    "key in a trial": (lambda f: f[1].update(note="mine"), "unknown key 'note'"),
    "a text as model": (lambda f: f[0].update(model="/home/me"), "no shipped architecture has"),
    "a text in a config": (
        lambda f: f[0]["model_config"].update(_name_or_path="me"),
        "no shipped architecture has",
    ),
    "a text as version": (lambda f: f[0].update(versions={"torch": "mine"}), "versions.torch"),
    "another package": (lambda f: f[0].update(versions={"mine": "1.0"}), "mine"),
    "a minute": (lambda f: f[0].update(date="2026-11-21T12:00"), "date"),
    "no day": (lambda f: f[0].update(date="2026-02-30"), "line 1: date"),
    "a module": (lambda f: f[1]["config"].update(target_modules=["mine"]), "has none such"),
    "newer": (lambda f: f[0].update(contribution=2), "is of version 2, and this sweep reads 1"),
    "no contribution": (lambda f: f[0].pop("contribution"), "contribution is missing"),
    "unknown GPU": (lambda f: f[0].update(gpu="voodoo", measured_on="voodoo"), "unknown GPU"),
    "two GPUs": (lambda f: f[0].update(gpu="h200"), "two GPUs"),
    "edited seconds": (lambda f: f[1].update(step_seconds=0.9), "tokens, and a step has 2,048"),
    "edited tokens": (lambda f: f[1].update(tokens_per_second=9e3), "tokens, and a step has"),
    "outside": (lambda f: f[1].update(step_seconds_ci95=[1e-3, 2e-3]), "outside its own interval"),
    "faster than light": (lambda f: [slower(row, 1e-3) for row in f[1:]], "peak FLOP/s and bandw"),
    "beyond the GPU": (
        lambda f: f[1].update(peak_allocated_bytes=30 * GIB, peak_reserved_bytes=31 * GIB),
        "do not go together on a GPU",
    ),
    "reserved less": (lambda f: f[1].update(peak_reserved_bytes=GIB), "do not go together"),
    "other peaks": (
        lambda f: [row.update(peak_allocated_bytes=9 * GIB) for row in f[1:4]],
        "a peak of 9.00 GiB where 10.00 is predicted; 3 of 8",
    ),
    "contradicting": (
        lambda f: [slower(row, times) for row, times in zip(f[1:], (1, 4) * 4, strict=True)],
        "contradict each other",
    ),
    "every other three times slower": (
        lambda f: [slower(row, times) for row, times in zip(f[1:], (1, 3) * 4, strict=True)],
        "contradict each other",
    ),
    "half of them three times slower": (
        lambda f: [slower(row, 3) for row in f[1:5]],
        "contradict each other",
    ),
    "tomorrow": (lambda f: f[0].update(date="2027-01-02"), "in the future"),
    "no versions": (lambda f: f[0].update(versions={}), "versions do not name torch"),
    "memory of another GPU": (
        lambda f: f[0].update(gpu_memory_bytes=80 * GIB),
        "gpu_memory_bytes 85,899,345,920 is no NVIDIA A10's",
    ),
    "several GPUs": (lambda f: f[1]["config"].update(data_parallel=2), "several GPUs"),
}


@pytest.mark.parametrize("case", DOCTORED)
def test_a_doctored_file_is_refused_in_one_plain_sentence(case: str) -> None:
    change, words = DOCTORED[case]
    text = changed(simulated(), change)

    def read_and_check() -> None:
        check(parse_contribution(text, "f.jsonl"), predictor=Peaks(), today=TODAY)

    with pytest.raises(InputError) as caught:
        read_and_check()
    assert str(caught.value).startswith("f.jsonl: ")
    assert words in str(caught.value)


def test_what_is_no_contribution_is_refused() -> None:
    for text, words in (("{", "not valid JSON"), (" " * (BYTES_MAX + 1), "larger than")):
        with pytest.raises(InputError, match=words):
            parse_contribution(text, "f.jsonl")


def test_one_odd_trial_is_left_out_and_teaches_nothing() -> None:
    text = changed(simulated(), lambda f: slower(f[3], 4.0))
    odd = parse_contribution(text, "f.jsonl")
    check(odd, predictor=Peaks(), today=TODAY)
    assert [row for row, _ in Session(odd).outliers] == [2]


def test_the_same_measurements_count_once_and_an_edited_copy_not_at_all() -> None:
    whole = simulated()
    part = parse_contribution(changed(whole, lambda f: f.pop()), "part.jsonl")
    another = simulated(seed=1)
    assert refuse_copy(another, [whole]) is None
    # What ships is known to a machine, and counts anew where the catalogue's file is made again.
    ships = Contributed(evidence_document([whole], is_shipped=True)["gpus"]["a10"])
    with pytest.raises(InputError, match="is known already"):
        refuse_copy(whole, [], ships)
    assert refuse_copy(whole, []) is None
    # A study that went on takes its own place.
    assert refuse_copy(whole, [part]) is part
    edits: list[tuple[Callable[[Lines], object], str]] = [
        (lambda f: None, "is known already"),
        (lambda f: f.pop(), "7 of its trials are in"),
        (lambda f: slower(f[1], 1.2), "with other numbers: one of the files was edited"),
        (lambda f: [slower(row, 1.2) for row in f[1:]], "one of the files was edited"),
    ]
    for edit, words in edits:
        copy = parse_contribution(changed(whole, edit), "f.jsonl")
        with pytest.raises(InputError, match=words):
            refuse_copy(copy, [whole])


def test_a_file_that_contradicts_the_others_of_its_gpu_is_outvoted() -> None:
    honest = [simulated(slower=1.2, seed=seed) for seed in (1, 2)]
    wrong = simulated(slower=0.7, seed=3)
    assert outvoted(*honest, wrong) == outvoted(wrong, *honest) == {wrong.digest}
    entry = evidence_document([*honest, wrong])["gpus"]["a10"]
    assert Contributed(entry).files == 2
    assert entry["mean"] == evidence_document(honest)["gpus"]["a10"]["mean"]
    # Of two the one that is further from the catalogue, and so one alone that is as far as that.
    far = simulated(slower=0.5, seed=4)
    assert outvoted(honest[0], far) == outvoted(far) == {far.digest}
    assert outvoted(wrong) == set()
    # The catalogue is between two, so neither counts.
    slow = simulated(slower=2.2, seed=5)
    assert outvoted(slow, far) == {slow.digest, far.digest}
    assert evidence_document([slow, far])["gpus"]["a10"]["trials"] == 0
    # Two and two: the catalogue's vote decides.
    pair = [simulated(slower=4.0, seed=seed) for seed in (5, 6)]
    assert outvoted(*honest, *pair) == {one.digest for one in pair}


def outvoted(*files: Contribution) -> set[str]:
    found = evidence_document(files)["gpus"]["a10"]["files"]
    return {file["digest"] for file in found if file["is_outvoted"]}


@pytest.mark.parametrize("times", [0.85, 1.2])
def test_one_file_makes_a_gpus_interval_narrower_and_right(times: float) -> None:
    entry = evidence_document([simulated(slower=times)])["gpus"]["a10"]
    others = [
        config.model_copy(update={"seq_len": 1024, "kernels": kernels})
        for config in CONFIGS
        for kernels in ("liger", "hf")
    ]
    before, after = (
        StepTimes(others, model=MISTRAL, gpu=A10, evidence=evidence)
        for evidence in (None, Contributed(entry))
    )
    truth = times * before.seconds
    inside = np.abs(np.log(truth / after.seconds)) < 1.645 * after.log_spread
    assert inside.mean() >= 0.9
    assert (after.log_spread < 0.75 * before.log_spread).all()


def test_what_other_sessions_teach_of_an_h200_holds_for_one_that_was_not_seen() -> None:
    """Leave one recording out: nine in ten of its steps are to be in the stated interval."""
    files = [
        [a_text("h200", model, rows) for model, rows in by_model(recording).items()]
        for recording in (TABLE, HELD_OUT, COMPILED)
    ]
    files += [
        [contributed.of_surface(model, every=1)] for model in ("mistral-7b-v0.3", "tinyllama-1.1b")
    ]
    sessions = [[Session(parse_contribution(t, "f")) for t in of] for of in files]
    inside: list[bool] = []
    for at, held in enumerate(sessions):
        taught = [session for of in (*sessions[:at], *sessions[at + 1 :]) for session in of]
        mean, covariance = posterior(taught)
        evidence = Contributed({"mean": mean, "covariance": covariance, "trials": 0, "files": []})
        for surface in (session.contribution.surface for session in held):
            rows = [row for row in surface.rows if row.step_seconds]
            times = StepTimes(
                [r.config for r in rows], model=surface.model, gpu=surface.card, evidence=evidence
            )
            off = np.log([row.step_seconds for row in rows] / times.seconds)  # type: ignore[operator]
            inside += (np.abs(off) < 1.645 * times.log_spread).tolist()
    assert len(inside) > 550
    assert 0.88 < np.mean(inside) < 0.97


def by_model(rows: Sequence[Row]) -> dict[str, list[Row]]:
    shipped = (
        row
        for row in rows
        if (Path("search_spaces/architectures") / f"{row['model']}.json").exists()
    )
    found: dict[str, list[Row]] = {}
    for row in shipped:
        found.setdefault(row["model"], []).append(row)
    return found
