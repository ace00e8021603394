"""A study and its exports, run for real on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, NothingFits
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from qlora_sweep.search_spaces.presets import preset_texts
from qlora_sweep.storage.records import Diverged
from qlora_sweep.sweep.cli import main
from qlora_sweep.sweep.data.marking import marked
from qlora_sweep.sweep.export.formats import exported
from qlora_sweep.sweep.export.record import Record, RecordedDataset, record_of
from qlora_sweep.sweep.verifying import runs
from qlora_sweep.sweep.verifying.runs import verify
from tests.sweep.export.studies import PAIR, a_study, some_dataset
from tests.sweep.export.weights import written_dataset

DEMO = load_model_spec("demo")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a study of one trial and its exports."""
    home = tmp_path_factory.mktemp("home")
    text = preset_texts()["cpu-demo"].replace("trials: 28", "trials: 1")
    (home / "one.yaml").write_text(text.replace("  seconds: 8", "  seconds: 1"), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWEEP_HOME", str(home))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.chdir(home)
        assert main(["run", "one.yaml", "--study", "one", "--no-confirm"]) == 0
        for format, name in (("script", "one.py"), ("trl", "one-trl.yaml")):
            assert main(["export", "one", "--format", format, "-o", name]) == 0
        yield home


def verified(what: str, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """Verify and return the document, once the exit code says what it says."""
    capsys.readouterr()
    code = main(["verify", what, "--steps", "8", "--json", *options])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if document["ok"] else 1)
    assert document["steps"] == 8
    return document


def on_cpu(format: str, **changes: Any) -> Record:
    record = record_of(a_study(model=DEMO, **changes))
    gpu = record.gpu.model_copy(update={"name": "cpu"})
    return record.model_copy(update={"format": format, "gpu": gpu})


def test_a_study_is_verified_by_a_training_of_its_winner(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = verified("one", capsys)
    assert document["run"] == "training"
    # How fast it is depends on what else this machine does; what it takes does not.
    assert document["peak_allocated_bytes"]["ratio"] == pytest.approx(1.0, abs=0.02)
    speed = document["tokens_per_second"]
    assert speed["reached"] == pytest.approx(speed["promised"] * speed["ratio"])
    assert list(home.joinpath("runs").glob(".verify-*")) == []


def test_a_verification_trains_on_the_dataset_that_was_measured_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    jobs = []

    def ended(job: Any, **_: Any) -> Any:
        jobs.append(job)
        return Diverged(step=1, detail="loss nan")

    monkeypatch.setattr(runs, "follow", ended)
    record = on_cpu("json", dataset=some_dataset())
    with pytest.raises(InputError, match="sweep data"):
        verify(record, steps=8)
    assert record.texts is not None
    directory = tmp_path / "runs" / ".texts" / record.texts.summary.fingerprint
    directory.mkdir(parents=True)
    with pytest.raises(NothingFits):
        verify(record, steps=8)
    (job,) = jobs
    assert (job.dataset, job.eval_fraction) == (str(directory), record.texts.eval_fraction)


@pytest.mark.integration
@pytest.mark.parametrize(("name", "run"), [("one.py", "script"), ("one-trl.yaml", "trl")])
def test_an_export_is_run_as_it_is(
    name: str, run: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = verified(str(home / name), capsys)
    assert document["run"] == run
    assert document["peak_allocated_bytes"]["reached"] is None
    differences = " ".join(document["differences"])
    assert "nothing counts a script's memory on a CPU" in differences
    # The study was measured here a moment ago.
    assert " -> " not in differences


@pytest.mark.integration
def test_a_script_in_8_bits_is_run_as_it_was_measured(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = TrialConfig(micro_batch_size=2, seq_len=32, compute_dtype="fp8", quantization="fp8")
    verified(exported_to(tmp_path / "train.py", config, format="script"), capsys)


def exported_to(path: Path, config: TrialConfig, *, format: str, dataset: Any = None) -> str:
    """Export a study of one configuration that a CPU measured, and return the file."""
    study = a_study(config, model=DEMO, dataset=dataset)
    target = study.definition.target.model_copy(update={"device": "cpu", "gpu": "cpu"})
    study = replace(study, definition=study.definition.model_copy(update={"target": target}))
    for each, text in exported(study, format=format).files(path).items():
        each.write_text(text, encoding="utf-8")
    return str(path)


ON_PAIRS = TrialConfig(method="dpo", micro_batch_size=2, seq_len=32, reference="precomputed")


@pytest.mark.integration
def test_a_study_on_random_pairs_is_verified_by_a_training(home: Path) -> None:
    found = verify(on_cpu("json", config=ON_PAIRS), steps=8)
    assert found.steps == 8
    assert found.comparison.memory.reached is not None


UNMARKED = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
"""A chat template that does not say which turns are the assistant's."""


@pytest.mark.integration
@pytest.mark.parametrize(("name", "format"), [("train.py", "script"), ("dpo.yaml", "trl")])
def test_an_export_on_random_pairs_is_run_as_it_is(
    name: str, format: str, tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = verified(exported_to(tmp_path / name, ON_PAIRS, format=format), capsys)
    assert document["run"] == format


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "template"), [("preference", None), ("messages", None), ("messages", UNMARKED)]
)
def test_trls_file_of_a_study_on_a_dataset_counts_supervised_tokens(
    kind: Any,
    template: str | None,
    tmp_path: Path,
    home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said: dict[str, Any] = {"source": str(tmp_path / "data.jsonl"), "completions_only": True}
    config = TrialConfig(micro_batch_size=2, seq_len=64)
    written_dataset(tmp_path / "data.jsonl", kind)
    if kind == "preference":
        said["columns"] = PAIR
        config = config.model_copy(update={"method": "dpo"})
    if template is not None:
        said["marked_template"] = marked(template)
    dataset = some_dataset(kind, **said)
    path = exported_to(tmp_path / "trl.yaml", config, format="trl", dataset=dataset)
    speed = verified(path, capsys)["tokens_per_second"]
    assert 0 < speed["reached"] < 16_800


FIGURES = "import pathlib, sys; pathlib.Path(sys.argv[-1]).write_text"
SAYS_NAN = '{"steps": 8, "tokens_per_second": NaN, "peak_allocated_bytes": null}'


@pytest.mark.parametrize(
    ("first", "code", "words"),
    [
        ("raise ValueError('broken here')", 3, "ValueError: broken here"),
        ("raise SystemExit(3)", 3, "the script ended with exit status 3"),
        ("raise SystemExit(0)", 2, "left no figures of what it reached"),
        (f"{FIGURES}('{SAYS_NAN}'); sys.exit()", 2, "left no figures of what it reached"),
        ("raise RuntimeError('CUDA out of memory')", 1, "out of memory"),
        ("import time; print('stuck', flush=True); time.sleep(60)", 3, "in which its 40 steps"),
    ],
    ids=("raises", "exits", "says-nothing", "says-nonsense", "runs-out", "hangs"),
)
def test_a_script_that_goes_wrong_ends_the_verification_and_says_how(
    home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    first: str,
    code: int,
    words: str,
) -> None:
    # What hangs is waited for that long; all others have ended by then, however busy the machine.
    seconds = 60.0
    if "sleep" in first:
        seconds = 1.0
    monkeypatch.setattr(runs, "_LOADING_SECONDS_MAX", seconds)
    monkeypatch.setattr(runs, "_SLOWER_MAX", 0.0)
    monkeypatch.setattr(runs, "_weights", lambda *_, **__: tmp_path)
    text = (home / "one.py").read_text(encoding="utf-8")
    changed = text.replace("import argparse\n", f"import argparse\n{first}\n", 1)
    (tmp_path / "own.py").write_text(changed)
    (tmp_path / "own.py.json").write_text((home / "one.py.json").read_text(encoding="utf-8"))
    assert main(["verify", str(tmp_path / "own.py")]) == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("none.py", "none.py: no such file"),
        ("one --steps 2", "at least 8"),
        ("one.py --trial 0", "--trial: an export is of one trial"),
        ("one --trial 77", "has no trial 77"),
    ],
)
def test_bad_input_is_named(
    arguments: str, words: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *arguments.split()]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("format", "dataset", "error", "words"),
    [
        (None, None, EnvironmentFault, "measured on a GPU, and there is none here"),
        ("script", "/gone.jsonl", InputError, "measured on /gone.jsonl, which is not here"),
        ("json", "/gone.jsonl", InputError, "/gone.jsonl, which is not prepared here"),
    ],
)
def test_what_cannot_be_run_here_is_refused_before_weights_are_made(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    format: str | None,
    dataset: str | None,
    error: type[Exception],
    words: str,
) -> None:
    monkeypatch.setattr(runs, "_weights", pytest.fail)
    record = record_of(a_study(model=DEMO)) if format is None else on_cpu(format)
    if dataset is not None:
        recorded = RecordedDataset(
            summary=some_dataset(source=dataset), source=dataset, eval_fraction=0.0, seed=0
        )
        record = record.model_copy(update={"texts": recorded})
    with pytest.raises(error, match=words):
        verify(record, path=Path(__file__))


def test_random_weights_load_as_the_architecture_they_are_of(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from qlora_sweep.sweep.verifying.__main__ import write_random_weights

    tokenizer = DEMO.tokenizer_path
    assert tokenizer is not None
    tied = ModelSpec("tied", "shipped", {**DEMO.config, "tie_word_embeddings": True})
    for spec in (DEMO, tied):
        directory = tmp_path / spec.name
        write_random_weights(spec, directory, tokenizer=tokenizer)
        model, told = AutoModelForCausalLM.from_pretrained(
            directory, dtype="auto", output_loading_info=True
        )
        assert model.dtype == torch.bfloat16
        assert not (told["missing_keys"])
        assert not (told["unexpected_keys"])
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        assert (head.weight is embedding.weight) == (spec is tied)
        assert len(AutoTokenizer.from_pretrained(directory)) <= DEMO.vocab_size
