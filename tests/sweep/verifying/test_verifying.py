"""A study and its exports, run for real on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault, InputError
from search_spaces.models import ModelSpec, load_model_spec
from search_spaces.presets import preset_texts
from search_spaces.texts import LengthQuantiles, TextsSummary
from sweep.cli import main
from sweep.export.formats import endings_of, exported
from sweep.export.record import RecordedTexts, record_of
from sweep.terminal.listings import read
from sweep.verifying import runs
from sweep.verifying.__main__ import write_random_weights
from sweep.verifying.runs import verify
from tests.sweep.export.studies import a_study

DEMO = load_model_spec("demo")
TEXTS = TextsSummary(
    source="chats.jsonl",
    kind="messages",
    format="auto",
    fingerprint="0" * 16,
    tokenizer="demo",
    completions_only=False,
    rows=9,
    broken=0,
    tokens=90,
    loss_tokens=81,
    longest=10,
    quantiles=LengthQuantiles(p50=10, p90=10, p95=10, p99=10, max=10),
)


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


def verified(what: str, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    """Verify and return the document, once the exit code says what it says."""
    capsys.readouterr()
    code = main(["verify", what, "--steps", "8", "--json", *options])
    document: dict[str, object] = json.loads(capsys.readouterr().out)
    assert code == (0 if document["ok"] else 1)
    return document


def test_a_study_is_verified_by_a_training_of_its_winner(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = verified("one", capsys)
    assert document["run"] == "training"
    assert document["steps"] == 8
    # How fast it is depends on what else this machine does; what it takes does not.
    peak = document["peak_allocated_bytes"]
    assert isinstance(peak, dict)
    assert peak["ratio"] == pytest.approx(1.0, abs=0.02)
    speed = document["tokens_per_second"]
    assert isinstance(speed, dict)
    assert speed["reached"] == pytest.approx(speed["promised"] * speed["ratio"])
    assert list(home.joinpath("runs").glob(".verify-*")) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "run"), [("one.py", "script"), ("one-trl.yaml", "trl")])
def test_an_export_is_run_as_it_is(
    name: str, run: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = verified(str(home / name), capsys)
    assert document["run"] == run
    assert document["steps"] == 8
    peak = document["peak_allocated_bytes"]
    assert isinstance(peak, dict)
    assert peak["reached"] is None
    differences = " ".join(map(str, document["differences"]))  # type: ignore[call-overload]
    assert "nothing counts a script's memory on a CPU" in differences
    # The study was measured here a moment ago.
    assert " -> " not in differences


@pytest.mark.slow
@pytest.mark.parametrize("format", ["script", "json"])
def test_an_export_in_8_bits_is_run_as_it_was_measured(
    format: str, tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = TrialConfig(micro_batch_size=2, seq_len=32, compute_dtype="fp8", quantization="fp8")
    study = a_study(config, model=DEMO)
    target = study.definition.target.model_copy(update={"device": "cpu", "gpu": "cpu"})
    study = replace(study, definition=study.definition.model_copy(update={"target": target}))
    path = tmp_path / f"train{endings_of(format)[0]}"
    for each, text in exported(study, format=format).files(path).items():
        each.write_text(text, encoding="utf-8")
    assert verified(str(path), capsys)["steps"] == 8


@pytest.mark.parametrize(
    ("kind", "texts", "said"),
    [
        ("trl", __file__, "tokens that carry loss TRL does not count: verify the study"),
        ("script", "/gone.jsonl", "measured on /gone.jsonl, which is not here"),
    ],
)
def test_an_export_of_a_study_with_texts_is_refused_before_weights_are_made(
    kind: Literal["trl", "script"], texts: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_weights", pytest.fail)
    study = record_of(a_study(model=DEMO, texts=TEXTS.model_copy(update={"source": texts})))
    gpu = study.gpu.model_copy(update={"name": "cpu"})
    record = study.model_copy(update={"format": kind, "gpu": gpu})
    with pytest.raises(InputError, match=said):
        verify(record, path=Path(__file__))


FIGURES = "import pathlib, sys; pathlib.Path(sys.argv[-1]).write_text"
SAYS_NAN = '{"steps": 8, "tokens_per_second": NaN, "peak_allocated_bytes": null}'


@pytest.mark.parametrize(
    ("first", "code", "words"),
    [
        ("raise ValueError('broken here')", 3, "ValueError: broken here"),
        ("raise SystemExit(3)", 3, "the script ended with exit status 3"),
        ("raise SystemExit(0)", 2, "left no figures of what it reached"),
        (f"{FIGURES}('{SAYS_NAN}'); sys.exit()", 2, "left no figures of what it reached"),
        ("import time; print('stuck', flush=True); time.sleep(60)", 3, "in which its 40 steps"),
    ],
    ids=("raises", "exits", "says-nothing", "says-nonsense", "hangs"),
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
    monkeypatch.setattr(runs, "_LOADING_SECONDS_MAX", 1.0 if "sleep" in first else 60.0)
    monkeypatch.setattr(runs, "_SLOWER_MAX", 0.0)
    write_random_weights(DEMO, tmp_path / "model", tokenizer=_tokenizer())
    text = (home / "one.py").read_text(encoding="utf-8")
    changed = text.replace("import argparse\n", f"import argparse\n{first}\n", 1)
    (tmp_path / "own.py").write_text(changed)
    (tmp_path / "own.py.json").write_text((home / "one.py.json").read_text(encoding="utf-8"))
    assert main(["verify", str(tmp_path / "own.py"), "--model", str(tmp_path / "model")]) == code
    assert words in capsys.readouterr().err


def test_bad_input_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["none.py"], "none.py: no such file"),
        (["nothing"], "nothing"),
        (["one", "--steps", "2"], "--steps must be at least 8, got 2"),
        (["one.py", "--trial", "0"], "--trial: an export is of one trial"),
        (["one", "--trial", "77"], "has no trial 77"),
    ):
        assert main(["verify", *arguments]) == 2
        assert words in capsys.readouterr().err


def test_what_was_measured_on_a_card_is_not_verified_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    record = record_of(a_study(model=load_model_spec("mistral-7b-v0.3")))
    with pytest.raises(EnvironmentFault, match="measured on a GPU, and there is none here"):
        verify(record)


def test_texts_that_are_gone_are_asked_for(home: Path) -> None:
    record = record_of(read("one", url=f"sqlite:///{home}/runs/sweep.db"))
    texts = RecordedTexts(summary=TEXTS, source=TEXTS.source, eval_fraction=0.0, seed=0)
    with pytest.raises(InputError, match=r"measured on chats\.jsonl, which is not prepared here"):
        verify(record.model_copy(update={"texts": texts}))


def test_random_weights_load_as_the_architecture_they_are_of(tmp_path: Path) -> None:

    tied = ModelSpec("tied", "shipped", {**DEMO.config, "tie_word_embeddings": True})
    for spec in (DEMO, tied):
        directory = tmp_path / spec.name
        write_random_weights(spec, directory, tokenizer=_tokenizer())
        model, told = AutoModelForCausalLM.from_pretrained(
            directory, dtype="auto", output_loading_info=True
        )
        assert model.dtype == torch.bfloat16
        assert not told["missing_keys"]
        assert not told["unexpected_keys"]
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        assert (head.weight is embedding.weight) == (spec is tied)
        assert len(AutoTokenizer.from_pretrained(directory)) <= DEMO.vocab_size


def _tokenizer() -> Path:
    path = DEMO.tokenizer_path
    assert path is not None
    return path
