"""The walk of a person with a pretrained model: chats, a study, an adapter, a merged model.

Commands are run as they are typed, in a directory of the walk's own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from qlora_sweep.sweep.cli import main
from tests.real_model import VARIABLE, MissingModelError, real_model

ROOT = Path(__file__).parents[2]
CHATS = ROOT / "tests" / "data" / "chats.jsonl"
QUESTION = "The capital of France is"
LEARNING_RATE = "1e-3"
TRL = "from trl.cli.main import main; main()"
"""The command ``trl``, which may not be beside Python."""
SECONDS_MAX = 800
"""Of an exported file's few steps, most of which are imports and quantizing the base."""


def pretrained() -> Path:
    """Return the pretrained model's directory; where there is none the test is skipped, unless one
    was named."""
    try:
        return real_model()
    except MissingModelError as missing:
        if VARIABLE in os.environ:
            raise
        pytest.skip(str(missing))


@dataclass
class Walk:
    """A study of a pretrained model on chats, and what came of it.

    Attributes:
        home: an empty directory, for the study and all files.
        model: the pretrained model's directory.
        device: where its answers and losses are worked out.
        steps: how many each training makes.
    """

    home: Path
    model: Path
    device: str
    steps: int

    def sweep(self, *words: str | Path) -> dict[str, Any]:
        """Run a command with ``--json`` and return what it prints.

        A verification whose speed is another one, as on a busy machine, exits with 1.
        """
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = main([*map(str, words), "--json"])
        assert code == 0 or (words[0] == "verify" and code == 1)
        document: dict[str, Any] = json.loads(printed.getvalue())
        return document

    @property
    def on_chats(self) -> tuple[str, ...]:
        """The options that name the chats and what is learned from them."""
        return ("--data", str(CHATS), "--set", "data.completions_only=true")

    def study(self, space: str) -> dict[str, Any]:
        """Run a study of a space, called ``chats``; return what `sweep best` says."""
        (self.home / "space.yaml").write_text(space, encoding="utf-8")
        asked = ("space.yaml", "--study", "chats", "--model", self.model, *self.on_chats)
        return self.sweep("run", *asked, "--no-confirm")

    def train(self) -> dict[str, Any]:
        """Train the winner; return what ``training.json`` holds."""
        asked = ("--max-steps", str(self.steps), "--set", f"learning_rate={LEARNING_RATE}")
        return self.sweep("train", "chats", "--output", "adapter", *asked)

    def export(self, format: str, file: str) -> None:
        """Write the winner as a file of another trainer."""
        assert main(["export", "chats", "--format", format, "-o", file]) == 0

    def run_script(self) -> Path:
        """Run ``train.py``, an exported script; return the directory of its adapter."""
        given = ("--model", self.model, "--data", CHATS, "--output", "by-script")
        given += ("--max-steps", str(self.steps), "--learning-rate", LEARNING_RATE)
        self._run("train.py", *given)
        return self.home / "by-script"

    def run_trl(self) -> Path:
        """Run TRL's command on ``trl.yaml``, an exported file; return the adapter's directory."""
        options = ("--max_steps", str(self.steps), "--learning_rate", LEARNING_RATE)
        if self.device == "cpu":
            options += ("--use_cpu", "true")
        options += ("--output_dir", "by-trl")
        self._run("-c", TRL, "sft", "--config", "trl.yaml", *options)
        return self.home / "by-trl"

    def _run(self, *words: str | Path) -> None:
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=self.home,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]

    # What models make of words

    def loaded(self, directory: Path | None = None, *, adapter: Path | None = None) -> Any:
        """Return a model in fp32: the base, or that of a directory, with an adapter on it."""
        model = AutoModelForCausalLM.from_pretrained(directory or self.model, dtype=torch.float32)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter)
        return model.to(self.device).eval()

    @torch.no_grad()
    def answer(self, model: Any) -> str:
        """Return how a model continues the question, each time by the likeliest token."""
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        question = tokenizer(QUESTION, return_tensors="pt").to(self.device)
        told = model.generate(**question, max_new_tokens=8, do_sample=False)
        return str(tokenizer.decode(told[0])).removeprefix(QUESTION)

    @torch.no_grad()
    def answers(self, model: Any) -> Answers:
        """Return what a model makes of the last turn of every third chat, the assistant's."""
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        logits = []
        losses = []
        for messages in chats()[::3]:
            prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)
            whole = tokenizer.apply_chat_template(messages)
            asked = len(prompt["input_ids"])
            tokens = torch.tensor(whole["input_ids"], device=self.device)
            predicted = model(input_ids=tokens[None]).logits[0, asked - 1 : -1]
            logits.append(predicted.cpu())
            told = tokens[asked:]
            losses.append(torch.nn.functional.cross_entropy(predicted, told, reduction="none"))
        return Answers(torch.cat(logits), float(torch.cat(losses).mean()))


@dataclass(frozen=True)
class Answers:
    """What a model makes of answers.

    Attributes:
        logits: for each of their tokens, of shape (tokens, vocabulary), on the host.
        loss: mean over the tokens, in nats.
    """

    logits: torch.Tensor
    loss: float


def chats() -> list[list[Mapping[str, str]]]:
    """Return the turns of each chat."""
    lines = CHATS.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def assert_near(found: Answers, wanted: Answers) -> None:
    """Check that two models are the same but for the rounding of weights to 16 bits."""
    apart = (found.logits - wanted.logits).abs().mean()
    same = found.logits.argmax(-1) == wanted.logits.argmax(-1)
    assert apart < 0.05 * wanted.logits.std()
    assert same.float().mean() > 0.9
    assert abs(found.loss - wanted.loss) < 0.05
