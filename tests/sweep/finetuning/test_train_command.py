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

from search_spaces.models import load_model_spec
from sweep.cli import main
from sweep.data.texts import TextsRequest, open_prepared
from sweep.finetuning.protocol import TrainingResult
from sweep.finetuning.training import TrainingRequest, prepare_training
from tests.sweep.finetuning.trainings import run

ROOT = Path(__file__).parents[3]
CONFIG = {
    "micro_batch_size": 2,
    "effective_batch_size": 4,
    "seq_len": 48,
    "lora_rank": 8,
    "lora_dropout": 0.1,
    "optimizer": "adamw_torch_fused",
    "packing": "packed",
}

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
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


COMMAND = ["train", "config.json", "--model", "demo", "--data", "texts.jsonl", "--output", "out"]
COMMAND += ["--set", "data.tokenizer=tokenizer"]
COMMAND += ["--checkpoint-every", "1", "--max-steps", "5", "--seed", "3"]


def start(*more: str) -> subprocess.Popen[str]:
    program = "import sys; from sweep.cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", program, *COMMAND, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_a_training_that_was_killed_goes_on_and_leaves_the_same_adapter(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # One that was killed before its first checkpoint may be begun again.
    (home / "out").mkdir()
    (home / "out" / "run.json").write_text('{"seed": 4}')
    killed = start()
    assert killed.stderr is not None
    seen = next(line for line in killed.stderr if re.match(r"step 2: checkpoint", line))
    assert seen
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (home / "out" / "training.json").exists()
    assert not (home / "out" / "adapter_model.safetensors").exists()

    assert main(COMMAND) == 2
    assert "--resume resumes it" in capsys.readouterr().err
    assert main([*COMMAND[:-1], "4", "--resume"]) == 2
    assert "seed was 3 and is 4" in capsys.readouterr().err

    resumed = start("--resume", "--json")
    out, err = resumed.communicate(timeout=170)
    assert resumed.returncode == 0, err
    document = json.loads(out)
    assert document == json.loads((home / "out" / "training.json").read_text())
    # Of random weights there is no fingerprint by which a merge would know the base.
    assert document["model"]["model_type"] == "mistral"
    assert document["model"]["weights_fingerprint"] is None
    found = re.search(r"(\d+) steps from step (\d+)", err)
    assert found is not None
    assert (int(found[1]), int(found[2]) >= 2) == (document["steps"], True)
    leaves_all(home / "out")

    from safetensors.torch import load_file

    whole = uninterrupted(home)
    assert isinstance(whole, TrainingResult), whole
    one = load_file(home / "out" / "adapter_model.safetensors")
    other = load_file(f"{whole.checkpoint}/adapter_model.safetensors")
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)
    assert document["eval_loss"] == whole.eval_loss

    assert main([*COMMAND, "--resume"]) == 0
    assert "done: there is nothing left to do" in capsys.readouterr().err

    # One that was killed before they were gone leaves them to the next.
    for name in ("checkpoint-9", ".removing-8"):
        (home / "out" / name).mkdir()
    assert main([*COMMAND, "--resume"]) == 0
    leaves_all(home / "out")


def leaves_all(output: Path) -> None:
    values = json.loads((output / "adapter_config.json").read_text())
    assert values["base_model_name_or_path"] == "demo"
    assert (output / "tokenizer.json").is_file()
    card = (output / "README.md").read_text()
    assert card.startswith("---\n")
    for words in ("library_name: peft", "weights are random", "`0.1`", "transformers"):
        assert words in card
    assert (output / "additional_chat_templates" / "tools.jinja").is_file()
    page = (output / "loss.html").read_text()
    assert '"training loss"' in page
    assert "://" not in re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert [path.name for path in output.iterdir() if path.name.startswith(".")] == [".lock"]
    assert not list(output.glob("checkpoint-*"))


def uninterrupted(home: Path) -> object:
    """Train the same in this process, in one go."""

    def fail(_: str) -> None:
        raise AssertionError

    texts = next((home / "runs" / ".texts").glob("*/texts.json")).parent

    def read(request: TextsRequest) -> object:
        return open_prepared(texts)

    prepared = prepare_training(
        TrainingRequest(
            name="config.json",
            output=home / "whole",
            texts={"texts": "texts.jsonl", "tokenizer": "tokenizer"},
            model="demo",
            max_steps=5,
            seed=3,
        ),
        read_study=fail,  # type: ignore[arg-type]
        read_texts=read,  # type: ignore[arg-type]
        card=lambda: None,
        warn=fail,
    )
    end, _ = run(prepared.job)
    return end
