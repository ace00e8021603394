"""``--for TRAINER``: plans, studies and exports of what that trainer can run, and does."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from qlora_sweep.search_spaces.config import TrialConfig, parse_config
from qlora_sweep.search_spaces.gpus import GIB, find_gpu
from qlora_sweep.search_spaces.rules import Setting, broken_rules
from qlora_sweep.search_spaces.trainers import TRAINERS
from qlora_sweep.storage.reading import read_study
from qlora_sweep.sweep.api import plan
from tests.golden.stored_studies import store
from tests.reports import synthetic
from tests.sweep.imagined_study import MISTRAL
from tests.sweep.simulated_device import at_speed
from tests.sweep.typed import Sweep

DATA = Path(__file__).parents[1] / "data"
GPUS = ("a100-80gb", "a10")
OTHERS = [name for name in TRAINERS if name != "sweep"]
A10 = find_gpu("a10")
HEADLINE = TrialConfig(
    micro_batch_size=12,
    compute_dtype="int8",
    checkpoint_fraction=0.0,
    upcast_fp32=False,
    kernels="fused-loss",
    compile=True,
    optimizer="adamw_torch_fused",
    expandable_segments=True,
)
LEAN = HEADLINE.changed(
    micro_batch_size=2,
    compute_dtype="bf16",
    kernels="hf",
    compile=False,
    adapter_dtype="bf16",
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nobody's studies, on a machine without a GPU; what is traced is kept from test to test."""
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


Planned = Callable[..., dict[str, Any]]


@pytest.fixture
def planned(sweep: Sweep) -> Planned:
    """Plans as it is typed; returns the document."""

    def plan(*words: str | Path) -> dict[str, Any]:
        said = sweep("plan", *words, "--json")
        assert said.code == 0
        return dict(json.loads(said.out))

    return plan


# Plans


@pytest.mark.parametrize(("trainer", "gpu"), list(zip(OTHERS, itertools.cycle(GPUS), strict=False)))
def test_what_is_recommended_for_a_trainer_is_what_it_can_run(
    planned: Planned, trainer: str, gpu: str
) -> None:
    document = planned("--gpu", gpu, "--for", trainer)
    config = parse_config(document["recommended"]["config"])
    assert config.trainer == trainer
    setting = Setting(MISTRAL, "cuda", find_gpu(gpu).compute_capability)
    assert list(broken_rules(config, setting)) == []
    assert not list(TRAINERS[trainer].lacks(config, MISTRAL))
    label = TRAINERS[trainer].label
    assert any(label in note for note in document["notes"]), "it says whose figures these are"


def test_sweep_is_what_is_planned_for_where_nobody_says(planned: Planned) -> None:
    assert planned("a10", "--for", "sweep") == planned("a10")


def test_python_plans_for_a_trainer_too() -> None:
    found = plan("a10", trainer="trl")
    assert found.config is not None
    assert (found.config.trainer, found.config.compile) == ("trl", False)


def test_memory_and_speed_are_of_what_trl_was_measured_to_do(sweep: Sweep, home: Path) -> None:
    rows = [json.loads(line) for line in (DATA / "trl_h200.jsonl").read_text().splitlines()]
    asked = home / "asked.jsonl"
    asked.write_text("".join(f"{json.dumps(row['config'])}\n" for row in rows))
    said = sweep("plan", "--gpu", "h200", "--for", "trl", "--from-file", asked, "--json")
    for row, line in zip(rows, said.out.splitlines(), strict=True):
        found = json.loads(line)
        assert found["peak_allocated_bytes"] == pytest.approx(row["peak_allocated_bytes"], rel=0.02)
        low, high = found["tokens_per_second_range"]
        assert low <= row["tokens_per_second"] <= high


def test_what_a_line_or_an_exact_question_leaves_out_is_what_the_trainer_does(
    sweep: Sweep, planned: Planned, home: Path
) -> None:
    asked = home / "asked.jsonl"
    asked.write_text('{}\n{"quantization": "none"}\n{"compile": true}\n')
    said = sweep("plan", "a10", "--for", "trl", "--from-file", asked, "--json")
    four, sixteen, compiled = (json.loads(line) for line in said.out.splitlines())
    assert four["fits"] is sixteen["fits"] is True
    assert four["config"]["adapter_dtype"] == "bf16"
    assert sixteen["config"]["adapter_dtype"] == "fp32"
    assert not four["config"]["upcast_fp32"]
    assert compiled["invalid"]["rule"] == "trainer"
    assert planned("a10", "--for", "trl", "--exact")["config"] == four["config"]


@pytest.mark.parametrize(
    ("trainer", "typed"),
    [
        ("trl", "compile=true"),
        ("trl", "checkpoint_fraction=0.375"),
        ("trl", "adapter_dtype=fp32"),
        ("axolotl", "checkpoint_fraction=0.5"),
        ("llama-factory", "kernels=fused-loss"),
        ("unsloth", "quantization=int8"),
    ],
)
def test_a_typed_value_that_the_trainer_cannot_run_is_refused(
    sweep: Sweep, trainer: str, typed: str
) -> None:
    options = ["--set", "quantization=nf4"] if typed.startswith("adapter") else []
    said = sweep("plan", "a10", "--for", trainer, "--set", typed, *options)
    assert (said.code, said.out) == (2, "")
    assert TRAINERS[trainer].label in said.err
    assert all(word in said.err for word in typed.split("="))
    assert sweep("run", "a10", "--for", trainer, "--set", typed, *options).code == 2


def test_a_typed_type_of_the_adapters_has_the_base_that_goes_with_it(planned: Planned) -> None:
    found = planned("a10", "--for", "trl", "--set", "adapter_dtype=fp32")
    config = found["recommended"]["config"]
    assert (config["adapter_dtype"], config["quantization"]) == ("fp32", "none")


def test_a_trainer_that_is_none_is_refused(sweep: Sweep) -> None:
    said = sweep("plan", "a10", "--for", "trll")
    assert said.code == 2
    assert "--for" in said.err
    assert sweep("export", "a10", "--for", "trll").code == 2


OWN = """\
gpu: a10
dimensions:
  micro_batch_size: [2, 4]
  {}
fixed: {{checkpoint_fraction: 0.0, upcast_fp32: false}}
"""


def test_of_a_persons_own_list_what_the_trainer_cannot_run_is_left_out_and_named(
    sweep: Sweep, home: Path
) -> None:
    space = home / "mine.yaml"
    space.write_text(OWN.format("compile: [false, true]"))
    said = sweep("plan", space, "--for", "trl", "--json")
    assert said.code == 0
    assert "compile true" in said.err
    config = json.loads(said.out)["recommended"]["config"]
    assert (config["compile"], config["checkpoint_fraction"]) == (False, 0.0)
    assert config["micro_batch_size"] in (2, 4), "nothing is added to a list"


def test_a_list_of_which_the_trainer_runs_nothing_is_refused(sweep: Sweep, home: Path) -> None:
    space = home / "mine.yaml"
    space.write_text(OWN.format("quantization: [fp8, int8]"))
    said = sweep("plan", space, "--for", "trl")
    assert said.code == 2
    assert "TRL" in said.err
    assert "quantization" in said.err


def test_shares_of_recomputed_layers_are_each_nth_of_the_models(
    planned: Planned, home: Path
) -> None:
    space = home / "mine.yaml"
    searched = "checkpoint_fraction: {low: 0.2, high: 0.6}"
    space.write_text(f"gpu: a10\ndimensions:\n  micro_batch_size: [4]\n  {searched}\n")
    found = planned(space, "--for", "trl")["recommended"]["config"]
    assert found["checkpoint_fraction"] in (0.25, 0.5)


def test_unsloth_is_not_predicted_where_nothing_of_it_is_measured(sweep: Sweep) -> None:
    said = sweep("plan", "a10", "--for", "unsloth", "--model", "gemma-3-4b")
    assert said.code == 2
    assert "not predicted" in said.err
    both = ["--set", "quantization=none", "--set", "checkpoint_fraction=1"]
    assert sweep("plan", "a100-80gb", "--for", "unsloth", *both).code == 2


# Studies


def test_a_study_for_a_trainer_samples_what_it_can_run_and_says_so(
    sweep: Sweep, home: Path
) -> None:
    run = ["run", "cpu-demo", "--trials", "2", "--no-confirm"]
    assert sweep(*run, "--for", "trl").code == 0
    study = read_study("cpu-demo-trl", url=_url(home), home=home / "runs")
    assert study.definition.space.fixed["trainer"] == "trl"
    for record in study.records:
        assert not list(TRAINERS["trl"].lacks(record.config, MISTRAL))
        assert record.config.trainer == "trl"
        assert record.measurement is not None
    assert "TRL" in sweep("best", "cpu-demo-trl").out
    # A study of another space is not resumed by accident.
    assert sweep(*run, "--study", "cpu-demo-trl").code == 2
    options = yaml.safe_load(sweep("export", "cpu-demo-trl", "--for", "trl").out)
    assert options["max_length"] > 0
    # A script would hold the logits.
    assert sweep("export", "cpu-demo-trl", "--format", "script").code == 2
    verified = sweep("verify", "cpu-demo-trl", "--steps", "8", "--json")
    assert json.loads(verified.out)["peak_allocated_bytes"]["ratio"] == pytest.approx(1.0, abs=0.05)


def test_a_study_for_a_trainer_that_no_trial_can_run_is_refused(sweep: Sweep) -> None:
    said = sweep("run", "cpu-demo", "--for", "unsloth")
    assert said.code == 2
    assert "sweep plan" in said.err


# Exports


def _url(home: Path) -> str:
    return f"sqlite:///{home}/runs/sweep.db"


@pytest.fixture
def a10(home: Path) -> str:
    """A study for sweep, whose winner other trainers cannot run, and whose baseline they can."""
    return _study(home, HEADLINE, LEAN.changes_from(HEADLINE))


def _study(home: Path, config: TrialConfig, baseline: dict[str, Any]) -> str:
    fixed = config.model_dump(mode="json")
    searched = {"micro_batch_size": {"choices": [fixed.pop("micro_batch_size")]}}
    space = {"dimensions": searched, "fixed": fixed, "baseline": baseline}
    model = {"model": MISTRAL.to_json(), "model_fingerprint": MISTRAL.fingerprint}
    about = synthetic.definition(space=space, emulated_on=None).model_copy(update=model)
    trials = [
        synthetic.record(number, at_speed(tried, speed, peak_allocated_bytes=16 * GIB), tried)
        for number, speed, tried in ((0, 500.0, about.space.baseline_config()), (1, 2000.0, config))
    ]
    known = synthetic.snapshot(trials, name="a10", definition=about)
    store(known, url=_url(home), home=home / "runs")
    return "a10"


@pytest.mark.parametrize("trainer", ["trl", "unsloth"])
def test_a_winner_that_runs_out_of_memory_in_its_trainer_is_not_written(
    sweep: Sweep, a10: str, home: Path, trainer: str
) -> None:
    path = home / ("trainer.py" if trainer == "unsloth" else "trainer.yaml")
    said = sweep("export", a10, "--format", trainer, "-o", path)
    assert (said.code, said.out) == (1, "")
    assert not path.exists()
    words = " ".join(said.err.split())
    for needed in (TRAINERS[trainer].label, "21.5", f"--for {trainer}", "--force"):
        assert needed in words
    # Both ways out.
    assert sweep("export", a10, "--format", trainer, "-o", path, "--force").code == 0
    assert path.exists()
    assert sweep("export", a10, "--for", trainer, "-o", path, "--force").code == 0


def test_the_best_that_a_trainer_can_do_fits_there(
    sweep: Sweep, planned: Planned, a10: str, home: Path
) -> None:
    path = home / "trl.yaml"
    assert sweep("export", a10, "--for", "trl", "-o", path).code == 0
    record = json.loads((home / "trl.yaml.json").read_text())
    config = parse_config(record["config"])
    assert not list(TRAINERS["trl"].lacks(config, MISTRAL))
    found = planned("a10", "--exact", *_options(config, "--for", "trl"))
    assert found["fits"] is True
    assert found["peak_allocated_bytes"] < A10.budget_bytes
    told = yaml.safe_load(path.read_text())
    assert told["per_device_train_batch_size"] == config.micro_batch_size


def test_a_study_on_pairs_stays_one_in_a_trainer_whose_pairs_are_not_predicted(
    sweep: Sweep, home: Path
) -> None:
    pairs = LEAN.changed(method="dpo", kernels="liger", adapter_dtype="fp32")
    study = _study(home, pairs, {"micro_batch_size": 1})
    said = sweep("export", study, "--for", "axolotl")
    assert said.code == 0
    assert "dpo" in said.out
    assert "GiB of" not in said.err


def test_another_trial_is_judged_alike(sweep: Sweep, a10: str, home: Path) -> None:
    study = read_study(a10, url=_url(home), home=home / "runs")
    numbers = {record.config.compile: record.number for record in study.records}
    assert sweep("export", a10, "--format", "trl", "--trial", numbers[True]).code == 1
    said = sweep("export", a10, "--format", "trl", "--trial", numbers[False])
    assert said.code == 0
    assert "GiB" in said.err, "what it needs there"
    assert yaml.safe_load(said.out)["per_device_train_batch_size"] == LEAN.micro_batch_size


def test_a_script_is_sweeps_own_and_a_format_has_one_trainer(sweep: Sweep, a10: str) -> None:
    assert sweep("export", a10, "--format", "script").code == 0
    assert sweep("export", a10, "--for", "sweep").code == 0
    assert sweep("export", a10, "--for", "trl", "--format", "axolotl").code == 2
    assert sweep("export", a10, "--for", "trl", "--format", "script").code == 2


def _options(config: TrialConfig, *more: str) -> list[str]:
    changed = config.changes_from(TrialConfig(trainer="trl"))
    changed.pop("target_modules", None)
    typed = [
        ["--set", f"{key}={json.dumps(value).strip(chr(34))}"] for key, value in changed.items()
    ]
    return [*more, *(word for words in typed for word in words)]
