"""The commands that make the committed data, as far as they need no GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from search_spaces.config import TrialConfig, parse_config
from search_spaces.gpus import GIB, find_gpu
from storage.reading import read_study
from storage.study import open_study
from sweep.predict.forecast import Forecaster
from sweep.predict.memory.predictor import Fit
from sweep.sampling.samplers import make_sampler
from tests.bench import eight_bit_evidence, long_study, study_steps, unsloth_beside
from tests.bench.edge_candidates import edge_candidates
from tests.sweep.imagined_memory import ImaginedPredictor
from tests.sweep.imagined_study import MISTRAL, TRIALS, a_snapshot

COMMITTED = Path(__file__).parents[1]


def test_a_studys_steps_are_the_trials_that_were_measured_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    url = f"sqlite:///{tmp_path}/sweep.db"
    definition = a_snapshot().definition
    with open_study(
        "mine",
        url=url,
        definition=definition,
        sampler=make_sampler("random", definition.space, seed=0),
        environment={},
        home=tmp_path,
    ) as study:
        for record in TRIALS[:2]:
            handle = study.ask({})
            begun = study.begin(handle, record.config, "2026-11-21T00:00:00.000+00:00")
            told = {"number": handle.number, "attempt_id": begun.id}
            study.tell(handle, record.model_copy(update=told))
    out = tmp_path / "steps.jsonl"
    monkeypatch.setattr(sys, "argv", ["study_steps.py", str(out), "mine", "--storage", url])
    study_steps.main()
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [parse_config(row["config"]) for row in rows] == [r.config for r in TRIALS[:2]]
    (committed, *_) = (COMMITTED / "data" / "study_steps_h200.jsonl").read_text().splitlines()
    assert rows[0].keys() >= json.loads(committed).keys()
    assert rows[0]["model"] == MISTRAL.name


def test_candidates_at_the_edge_lie_on_both_sides_of_what_may_fit() -> None:
    gpu = find_gpu("a10")
    forecaster = Forecaster(
        model=MISTRAL, gpu=gpu, budget_bytes=20 * GIB, predictor=ImaginedPredictor()
    )
    configs = edge_candidates(forecaster, count=20, seed=0)
    assert configs == edge_candidates(forecaster, count=20, seed=0)
    assert len(set(configs)) == 20
    forecasts = forecaster.forecast(configs)
    fits = [forecasts.fit(at) for at in range(len(configs))]
    assert fits.count(Fit.NO) >= 8
    assert len(fits) - fits.count(Fit.NO) >= 8
    for config in configs:
        smaller = TrialConfig(
            **{**config.model_dump(), "micro_batch_size": max(1, config.micro_batch_size - 2)}
        )
        fit = forecaster.forecast([smaller]).fit(0)
        assert fit is not Fit.NO or config.micro_batch_size <= 2


def test_a_study_that_was_made_in_bulk_is_driven_on_and_each_trial_timed(tmp_path: Path) -> None:
    url, space = f"sqlite:///{tmp_path}/sweep.db", long_study.a_space()
    known = list(long_study.records(space, 15))
    long_study.store(url, tmp_path, space, known)
    assert read_study(long_study.NAME, url=url, home=tmp_path).records == tuple(known)
    driven = long_study.drive(url, tmp_path, "random", more=2, profiled=False)
    assert len(driven.each) == 2
    assert min(driven.opening, driven.learning, *driven.each) > 0
    stored = read_study(long_study.NAME, url=url, home=tmp_path).records
    assert len({record.config for record in stored}) == len(stored) == 18


def test_the_page_of_8_bits_is_made_of_the_committed_rows() -> None:
    written = eight_bit_evidence.PAGE.read_text(encoding="utf-8")
    made = eight_bit_evidence.page(written, eight_bit_evidence.read_rows())
    assert written == made, "run: python -m tests.bench.eight_bit_evidence"


def test_differences_of_losses_are_between_runs_of_one_seed() -> None:
    # Seeds differ by far more than what is asked about, and come in any order.
    rows = [
        {"wide": "bfloat16", "base": base, "compute": compute, "seed": seed}
        | {"before": 2.0, "after": after}
        for place, (base, compute) in enumerate(eight_bit_evidence.ARMS)
        for seed in ((0, 1), (1, 0))[place % 2]
        for after in (1 + seed / 2 + place / 1000,)
    ]
    lines = eight_bit_evidence.table(rows)[2:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0] == ["bfloat16", "bfloat16", "2.0000", "1.2500 (-1.9266 to 4.4266)", "", ""]
    assert cells[2][4:] == ["+0.0020 (+0.0020 to +0.0020)", "+0.0010 (+0.0010 to +0.0010)"]


@pytest.mark.parametrize("cap", unsloth_beside.UNSLOTH)
def test_unsloth_is_asked_in_4_8_and_16_bits_beside_configurations_of_8(cap: float) -> None:
    asked = unsloth_beside.of_unsloth(unsloth_beside.UNSLOTH[cap], "attention")
    assert {one["precision"] for one in asked} == {"4", "16", "fp8"}
    arguments = unsloth_beside.parsed(["OUT.jsonl", "--cap", str(cap)])
    ours = [parse_config(one) for one in unsloth_beside.of_ours(arguments, cap)]
    assert {config.compute_dtype for config in ours} == {"bf16", "fp8"}
    turns = [question["side"] for question in unsloth_beside.asked_for(arguments)]
    assert turns[:6] == ["unsloth", "ours"] * 3
    given = unsloth_beside.parsed(["OUT.jsonl", "--ours", '{"micro_batch_size": 3}'])
    assert [one["micro_batch_size"] for one in unsloth_beside.of_ours(given, cap)] == [3]
