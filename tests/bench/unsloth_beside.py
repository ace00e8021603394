"""Measure Unsloth beside this tool: the same model, adapters, caps and step loop, turn by turn.

Both sides keep a process of their own with the model in it, capped to the same memory, and take
turns, so that what the card does in the meantime happens to both. A row is the faster of two
stretches of 12 steps; the best row of either side is measured twice. Unsloth runs in TRL's
`SFTTrainer`, which it patches: a plain loop spoils the graphs that it compiles.

    python tests/bench/unsloth_beside.py OUT.json [--model mistral-7b-v0.3] [--caps 21.48,38.39]

Needs unsloth, unsloth_zoo and TRL beside this tool's own packages.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from search_spaces.config import TrialConfig, parse_config
from search_spaces.models import load_model_spec
from tests.bench.stamp import stamp

GIB = 2**30
SEED = 0
STEPS_WARMUP, STEPS = 3, 12
RANK, SEQ_LEN = 16, 512
SHARED = {"lora_rank": RANK, "target_modules": "attention", "seq_len": SEQ_LEN}
FAST = {
    "kernels": "fused-loss",
    "upcast_fp32": False,
    "checkpoint_fraction": 0.0,
    "compile": True,
    "optimizer": "adamw_torch_fused",
    "expandable_segments": True,
}
Row = dict[str, Any]
PLAIN = {"double_quant": False}
EXACT = {"quantization": "none"}
QUESTIONS: dict[float, tuple[tuple[str, Row], ...]] = {
    21.48: (
        ("unsloth", {"micro_batch_size": 8}),
        ("ours", {"micro_batch_size": 10, **PLAIN}),
        ("ours", {"micro_batch_size": 4, **EXACT}),
    ),
    38.39: (
        ("unsloth", {"micro_batch_size": 16}),
        ("ours", {"micro_batch_size": 12, **EXACT}),
        ("ours", {"micro_batch_size": 16, "quantized_fraction": 0.125, **PLAIN}),
    ),
}
"""What is asked for under each cap, in this order; the best of either side is asked once more."""


def rate(step: Callable[[], object], tokens: int) -> Row:
    """Return the rates of a plain loop."""
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS_WARMUP):
        step()
    seconds = []
    for _ in range(2):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begun) / STEPS)
    return rates(seconds, tokens)


def rates(seconds: Sequence[float], tokens: int) -> Row:
    """Return what stretches with such steps come to, and the peaks in bytes."""
    return {
        "tokens_per_second": tokens / min(seconds),
        "slower_stretch": tokens / max(seconds),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


class Ours:
    """This tool's own training loop, as a trial has it."""

    def __init__(self, model: str) -> None:
        self._spec = load_model_spec(model)
        self._base: Any = None

    def measure(self, asked: Row) -> Row:
        """Return the rate of one configuration."""
        from sweep.training.adapters import attached
        from sweep.training.model import build_base
        from sweep.training.step import TrainingLoop

        config = parse_config({**SHARED, **FAST, **asked})
        if self._base is None or self._base.config != config.base():
            if self._base is not None:
                self._base.close()
            self._base = None
            clean()
            device = torch.device("cuda")
            self._base = build_base(
                config, spec=self._spec, weights="random", device=device, seed=SEED
            )
        with attached(self._base, config) as attachment:
            vocabulary = self._spec.vocab_size
            loop = TrainingLoop(attachment, config, vocab_size=vocabulary, seed=SEED)
            return rate(loop.step, config.tokens_per_step)


class Unsloth:
    """Unsloth's model with its own kernels, from a directory of random weights."""

    def __init__(self, directory: Path) -> None:
        from unsloth import FastLanguageModel

        self._model, self._tokenizer = FastLanguageModel.from_pretrained(
            str(directory), max_seq_length=SEQ_LEN, dtype=torch.bfloat16, load_in_4bit=True
        )
        self._model = FastLanguageModel.get_peft_model(
            self._model,
            r=RANK,
            lora_alpha=2 * RANK,
            lora_dropout=0,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            use_gradient_checkpointing=False,
            random_state=SEED,
        )

    def measure(self, asked: Row) -> Row:
        """Return the rate of one micro-batch."""
        from datasets import Dataset
        from transformers import TrainerCallback
        from trl import SFTConfig, SFTTrainer

        batch, marks = asked["micro_batch_size"], []
        ends = [STEPS_WARMUP + STEPS * stretch for stretch in range(3)]

        class Clock(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step in ends:
                    torch.cuda.synchronize()
                    marks.append(time.perf_counter())

        ids = torch.randint(self._model.config.vocab_size, (batch * ends[-1], SEQ_LEN))
        torch.cuda.reset_peak_memory_stats()
        with tempfile.TemporaryDirectory() as directory:
            arguments = SFTConfig(
                output_dir=directory,
                per_device_train_batch_size=batch,
                gradient_accumulation_steps=1,
                max_steps=ends[-1],
                bf16=True,
                optim="adamw_torch_fused",
                logging_steps=1000,
                max_length=SEQ_LEN,
                save_strategy="no",
                report_to="none",
                dataset_kwargs={"skip_prepare_dataset": True},
            )
            SFTTrainer(
                model=self._model,
                processing_class=self._tokenizer,
                args=arguments,
                train_dataset=Dataset.from_dict({"input_ids": ids.tolist()}),
                callbacks=[Clock()],
            ).train()
        return rates([(end - begin) / STEPS for begin, end in pairwise(marks)], batch * SEQ_LEN)


def clean() -> None:
    """Give back what the last row left."""
    gc.collect()
    torch.cuda.empty_cache()


def serve(side: str, model: str, directory: Path) -> None:
    """Answer one JSON line for each question on standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    runner = Ours(model) if side == "ours" else Unsloth(directory)
    total = torch.cuda.get_device_properties(0).total_memory
    print(json.dumps({"ready": side}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        torch.cuda.set_per_process_memory_fraction(asked.pop("cap_gib") * GIB / total)
        try:
            answer = runner.measure(asked)
        except torch.OutOfMemoryError:
            answer = {"oom": True}
        except Exception as error:  # noqa: BLE001 - it is this row's answer
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        clean()
        print(json.dumps(answer), file=answers, flush=True)


def save_model(name: str, directory: Path) -> None:
    """Write a random 16-bit model with a tokenizer, as Unsloth loads one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    spec = load_model_spec(name)
    values = {key: value for key, value in spec.config.items() if key != "model_type"}
    config = AutoConfig.for_model(spec.config["model_type"], **values)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2}
    words |= {f"w{index}": index for index in range(3, spec.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
    )
    tokenizer.save_pretrained(directory)


class Side:
    """One of the two, in its process."""

    def __init__(self, name: str, model: str, directory: Path) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1"}
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", name, "--model", model, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def answer(self) -> Row:
        """Return the next line of the process."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with status {self._process.wait()}")
        return dict(json.loads(line))

    def ask(self, question: Row) -> Row:
        """Return what one configuration reached."""
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self.answer()


def compare(cap: float, sides: dict[str, Side], rows: list[Row]) -> Row:
    """Return the best of either side under a cap, and their ratio."""

    def ask(side: str, asked: Row) -> None:
        row = {"cap_gib": cap, "side": side, **asked, **sides[side].ask({**asked, "cap_gib": cap})}
        print(json.dumps(row), flush=True)
        rows.append(row)

    def best(side: str) -> Row:
        own = [r for r in rows if (r["cap_gib"], r["side"]) == (cap, side)]
        return max(own, key=lambda row: row.get("tokens_per_second", 0.0))

    for side, asked in QUESTIONS[cap]:
        ask(side, asked)
    for side in ("unsloth", "ours"):
        again = {key: value for key, value in best(side).items() if key in TrialConfig.model_fields}
        ask(side, again)
    ours, theirs = best("ours"), best("unsloth")
    ratio = ours["tokens_per_second"] / theirs["tokens_per_second"]
    return {"cap_gib": cap, "ratio": ratio, "ours": ours, "unsloth": theirs}


def main() -> None:
    """Compare the two, or be one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--model", default="mistral-7b-v0.3")
    parser.add_argument("--caps", default=",".join(map(str, QUESTIONS)))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.model, arguments.path)
        return
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        save_model(arguments.model, Path(scratch))
        clean()
        sides = {n: Side(n, arguments.model, Path(scratch)) for n in ("ours", "unsloth")}
        for side in sides.values():
            side.answer()
        summary = [compare(float(cap), sides, rows) for cap in arguments.caps.split(",")]
    result = {**stamp(), "summary": summary, "rows": rows}
    arguments.path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for line in summary:
        print(f"{line['cap_gib']} GiB: {line['ratio']:.3f} x Unsloth")


if __name__ == "__main__":
    main()
