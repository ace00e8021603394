"""`sweep train` as a person types it: killed, resumed, refused, and what it leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qlora_sweep.search_spaces.config import parse_config
from qlora_sweep.search_spaces.learning_rates import in_words, learning_rate_of
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.sweep.cli import main
from qlora_sweep.sweep.finetuning.protocol import TrainingJob, TrainingResult
from tests.sweep.finetuning.trainings import ended

CONFIG = {
    "micro_batch_size": 2,
    "effective_batch_size": 4,
    "seq_len": 48,
    "lora_rank": 8,
    "lora_dropout": 0.1,
    "optimizer": "adamw_torch_fused",
    "packing": "packed",
}
COMMAND = ["train", "config.json", "--model", "demo", "--data", "texts.jsonl"]
COMMAND += ["--set", "data.tokenizer=tokenizer", "--max-steps", "5", "--seed", "3"]
INTO_OUT = ["--checkpoint-every", "1", "--output", "out"]
PROGRAM = "import sys; from qlora_sweep.sweep.cli import main; sys.exit(main())"

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    words = [{"text": f"Row {n} says {'so ' * (n % 7 + 3)}and ends."} for n in range(40)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in words))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    own = load_model_spec("demo").tokenizer_path
    assert own is not None
    shutil.copytree(own, tmp_path / "tokenizer")
    templates = tmp_path / "tokenizer" / "additional_chat_templates"
    templates.mkdir()
    (templates / "tools.jinja").write_text("{{ messages }}")
    return tmp_path


def killed_at(line: str, *also: str) -> None:
    """Train in a process of its own, and kill that once it has said a line."""
    command = [sys.executable, "-c", PROGRAM, *COMMAND, *INTO_OUT, *also]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as training:
        assert training.stderr is not None
        assert next(said for said in training.stderr if said.startswith(line))
        training.send_signal(signal.SIGKILL)


@pytest.mark.timeout(400)
def test_a_training_that_was_killed_resumes_and_leaves_the_same_adapter(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    out = home / "out"
    # One that was killed before its first checkpoint may be begun again.
    out.mkdir()
    (out / "run.json").write_text('{"seed": 4}')
    killed_at("step 2: checkpoint")
    assert not (out / "training.json").exists()
    assert not (out / "adapter_model.safetensors").exists()

    # As if it had been killed while it gave its files their names.
    shutil.copytree(home / "tokenizer", out, dirs_exist_ok=True)

    assert main([*COMMAND, *INTO_OUT]) == 2
    assert "--resume resumes it" in capsys.readouterr().err
    assert main([*COMMAND[:-1], "4", *INTO_OUT, "--resume"]) == 2
    assert "seed was 3 and is 4" in capsys.readouterr().err

    assert main([*COMMAND, *INTO_OUT, "--resume", "--json"]) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert document == json.loads((out / "training.json").read_text())
    found = re.search(r"(\d+) steps from step (\d+)", said.err)
    assert found is not None
    assert (int(found[1]), int(found[2]) >= 2) == (document["steps"], True)
    rule = learning_rate_of(parse_config(CONFIG), load_model_spec("demo").config)
    assert document["learning_rate"] == rule.model_dump(mode="json")
    assert document["config"]["learning_rate"] == rule.value
    shown = " ".join(said.err.split())
    for text in (shown, (out / "README.md").read_text()):
        assert in_words(rule.value) in text
        assert in_words(rule.high) in text
    leaves_all(out)

    whole = uninterrupted(home)
    one, other = (
        load_file(f"{directory}/adapter_model.safetensors") for directory in (out, whole.checkpoint)
    )
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)
    for key in ("eval_loss", "train_loss", "tokens"):
        assert document[key] == getattr(whole, key)

    # One that was killed before they were gone leaves them to the next.
    for name in ("checkpoint-9", ".removing-8"):
        (out / name).mkdir()
    assert main([*COMMAND, *INTO_OUT, "--resume"]) == 0
    assert "done: there is nothing left to do" in capsys.readouterr().err
    leaves_all(out)


def uninterrupted(home: Path) -> TrainingResult:
    """Train the same in this process, in one go."""
    known = json.loads((home / "out" / "run.json").read_text())
    del known["texts"]
    dataset = next((home / "runs" / ".texts").glob("*/texts.json")).parent
    parts = {"model": load_model_spec("demo").to_json(), "dataset": str(dataset)}
    return ended(TrainingJob.model_validate({**known, **parts, "output": str(home / "whole")}))


def leaves_all(output: Path) -> None:
    values = json.loads((output / "adapter_config.json").read_text())
    assert values["base_model_name_or_path"] == "demo"
    assert (output / "tokenizer.json").is_file()
    assert (output / "additional_chat_templates" / "tools.jinja").is_file()
    model_card = (output / "README.md").read_text()
    assert model_card.startswith("---\n")
    for words in ("library_name: peft", "weights are random", "`0.1`", "transformers"):
        assert words in model_card
    page = (output / "loss.html").read_text()
    assert '"training loss"' in page
    assert "://" not in re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert [path.name for path in output.iterdir() if path.name.startswith(".")] == [".lock"]
    assert not list(output.glob("checkpoint-*"))


@pytest.mark.integration
@pytest.mark.timeout(400)
def test_what_was_agreed_to_is_not_asked_again(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shorter = ("--seq-len", "16")
    assert main([*COMMAND, *INTO_OUT, *shorter]) == 2
    assert "--yes" in capsys.readouterr().err
    killed_at("step 1: checkpoint", *shorter, "--yes")
    assert main([*COMMAND, *INTO_OUT, "--resume"]) == 2
    assert "seq_len was 16 and is 48" in capsys.readouterr().err
    assert main([*COMMAND, *INTO_OUT, *shorter, "--resume", "--json"]) == 0
    said = capsys.readouterr()
    assert "Length 16 cuts" in said.err
    document = json.loads(said.out)
    assert document["promised_basis"] == "predicted"
    assert document["truncation"]["dataset"]["supervised_tokens_cut_share"] > 0.05


@pytest.mark.integration
@pytest.mark.timeout(400)
def test_a_training_of_two_ranks_is_resumed_by_two_alone(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = home / "config.json"
    config.write_text(json.dumps({**CONFIG, "data_parallel": 2, "micro_batch_size": 1}))
    killed_at("step 1: checkpoint")
    two = config.read_text()
    config.write_text(json.dumps({**CONFIG, "micro_batch_size": 1}))
    assert main([*COMMAND, *INTO_OUT, "--resume"]) == 2
    assert "data_parallel was 2 and is 1" in capsys.readouterr().err
    config.write_text(two)
    assert main([*COMMAND, *INTO_OUT, "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 5
    leaves_all(home / "out")
