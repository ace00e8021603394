"""Measure Unsloth in 4, 16 and 8 bits beside this tool's configurations, turn by turn.

Each configuration has a process of its own with the model in it, capped to the same memory once it
is loaded; one that runs out of memory is a row too. A few load and compile side by side and are
then measured one after the other, the two sides in turns; the best of either is measured in further
rounds, which alone make the ratio. A turn is the faster of two stretches of 12 steps. Unsloth runs
in TRL's `SFTTrainer`, which it patches: a plain loop spoils the graphs that it compiles.

    python -m tests.bench.unsloth_beside OUT.jsonl [--cap GIB ...] [--ours JSON ...] [--study NAME]

Needs unsloth, unsloth_zoo, TRL and, for 8 bits, torchao; `--unsloth-path` names a directory with
them that this tool's own process is not to see.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from search_spaces.config import parse_config
from search_spaces.models import load_model_spec
from tests.bench.stamp import stamp

ROOT = Path(__file__).parents[2]
GIB = 2**30
SEED = 0
STEPS_WARMUP, STEPS = 3, 12
RANK, SEQ_LEN = 16, 512
PATIENCE_SECONDS = 150
"""A process that has not answered by then is ended, and its row says so."""
Row = dict[str, Any]
TARGETS = {
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "all-linear": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
FAST = {
    "kernels": "fused-loss",
    "upcast_fp32": False,
    "checkpoint_fraction": 0.0,
    "compile": True,
    "optimizer": "adamw_torch_fused",
    "expandable_segments": True,
    "double_quant": False,
}
"""What our configurations have in common where they do not say otherwise."""
PRECISIONS: dict[str, Row] = {
    "4": {"load_in_4bit": True},
    "16": {"load_in_4bit": False},
    "fp8": {"load_in_4bit": False, "load_in_fp8": True},
    "fp8-block": {"load_in_4bit": False, "load_in_fp8": "block"},
}
"""Unsloth's, as arguments of `FastLanguageModel.from_pretrained`."""
UNSLOTH = {21.48: "fp8:6/5/7,4:8,16:4", 38.39: "fp8:16/12/20,4:16,16:12"}
"""Precisions with their micro-batches that Unsloth is asked for under each cap in GiB."""
EIGHT = {"compute_dtype": "fp8", "quantization": "fp8"}
OURS: dict[float, tuple[Row, ...]] = {
    21.48: (
        {"micro_batch_size": 10, **EIGHT},
        {"micro_batch_size": 12, "compute_dtype": "fp8"},
        {"micro_batch_size": 8, **EIGHT},
        {"micro_batch_size": 4, "quantization": "none"},
    ),
    38.39: (
        {"micro_batch_size": 16, **EIGHT},
        {"micro_batch_size": 20, **EIGHT},
        {"micro_batch_size": 12, "quantization": "none"},
    ),
}
"""What we are asked for where the command line names nothing."""


def rate(step: Callable[[], torch.Tensor], tokens: int) -> Row:
    """Return the rates of a plain loop."""
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS_WARMUP):
        step()
    seconds = []
    for _ in range(2):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(STEPS):
            loss = step()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begun) / STEPS)
    return {**rates(seconds, tokens), "loss": loss.item()}


def rates(seconds: Sequence[float], tokens: int) -> Row:
    """Return what stretches with such steps come to, and the peaks in bytes."""
    return {
        "tokens_per_second": tokens / min(seconds),
        "slower_stretch": tokens / max(seconds),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


class Ours:
    """One configuration in this tool's own training loop, as a trial has it."""

    def __init__(self, model: str, asked: Row, directory: Path) -> None:
        from sweep.training.model import build_base

        self._spec = load_model_spec(model)
        self._config = parse_config(asked)
        self._base = build_base(
            self._config,
            spec=self._spec,
            weights="random",
            device=torch.device("cuda"),
            seed=SEED,
        )

    def measure(self) -> Row:
        """Return the rates of a turn."""
        from sweep.training.adapters import attached
        from sweep.training.step import TrainingLoop

        with attached(self._base, self._config) as attachment:
            loop = TrainingLoop(attachment, self._config, seed=SEED)
            return rate(loop.step, self._config.tokens_per_step)


class Unsloth:
    """One precision and micro-batch of Unsloth, from a directory of random weights."""

    def __init__(self, model: str, asked: Row, directory: Path) -> None:
        from unsloth import FastLanguageModel

        self._batch = asked["micro_batch_size"]
        self._model, self._tokenizer = FastLanguageModel.from_pretrained(
            str(directory),
            max_seq_length=SEQ_LEN,
            dtype=torch.bfloat16,
            **PRECISIONS[asked["precision"]],
        )
        self._model = FastLanguageModel.get_peft_model(
            self._model,
            r=RANK,
            lora_alpha=2 * RANK,
            lora_dropout=0,
            target_modules=TARGETS[asked["target_modules"]],
            use_gradient_checkpointing=False,
            random_state=SEED,
        )

    def measure(self) -> Row:
        """Return the rates of a turn."""
        from datasets import Dataset
        from transformers import TrainerCallback
        from trl import SFTConfig, SFTTrainer

        batch, marks = self._batch, []
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
            done = SFTTrainer(
                model=self._model,
                processing_class=self._tokenizer,
                args=arguments,
                train_dataset=Dataset.from_dict({"input_ids": ids.tolist()}),
                callbacks=[Clock()],
            ).train()
        found = rates([(end - begin) / STEPS for begin, end in pairwise(marks)], batch * SEQ_LEN)
        return {**found, "loss": done.training_loss}


def clean() -> None:
    """Give back what is no longer used."""
    gc.collect()
    torch.cuda.empty_cache()


def serve(question: Row) -> None:
    """Answer each line on standard input with a JSON line: a turn of one configuration."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side = Ours if question["side"] == "ours" else Unsloth
    runner = None
    for _ in sys.stdin:
        try:
            if runner is None:
                runner = side(question["model"], question["asked"], Path(question["directory"]))
                clean()
                total = torch.cuda.get_device_properties(0).total_memory
                torch.cuda.set_per_process_memory_fraction(question["cap_gib"] * GIB / total)
            answer = runner.measure()
        except Exception as error:  # noqa: BLE001 - it is this row's answer
            is_oom = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
            said = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            answer = {"oom": True} if is_oom else said
        clean()
        if question["side"] == "unsloth" and runner is not None:
            answer["versions"] = {n: version(n) for n in ("unsloth", "unsloth_zoo", "trl")}
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


class Process:
    """One configuration of one side, in a process of its own."""

    def __init__(self, question: Row, unsloth_path: Path | None) -> None:
        self.question = question
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        if question["side"] == "unsloth" and unsloth_path is not None:
            paths.insert(0, str(unsloth_path))
        expandable = question["asked"].get("expandable_segments", True)
        segments = f"expandable_segments:{expandable}"
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TMPDIR": question["directory"],
            "HF_HUB_OFFLINE": "1",
            "UNSLOTH_DISABLE_STATISTICS": "1",
            "PYTORCH_ALLOC_CONF": segments,
            "PYTORCH_CUDA_ALLOC_CONF": segments,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "-", "--serve", json.dumps(question)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=question["directory"],
            env={**os.environ, **own},
            text=True,
        )

    def ask(self) -> None:
        """Let it measure a turn."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            print("turn", file=self._process.stdin, flush=True)

    def answer(self) -> Row:
        """Return the row of the turn."""
        process = self._process
        assert process.stdout is not None
        begun = time.perf_counter()
        timer = threading.Timer(PATIENCE_SECONDS, process.kill)
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        answer = json.loads(line) if line else {"error": f"ended with status {process.wait()}"}
        named = {key: self.question[key] for key in ("cap_gib", "side", "asked")}
        return {**named, **answer, "turn_seconds": round(time.perf_counter() - begun, 1)}

    def turn(self) -> Row:
        """Return the row of one more turn."""
        self.ask()
        return self.answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


@dataclass
class Best:
    """The fastest configuration of a side so far, its process still there."""

    process: Process
    tokens_per_second: float


class Comparison:
    """What is measured, each row written as soon as it is known."""

    def __init__(self, path: Path, unsloth_path: Path | None) -> None:
        self._path = path
        self._unsloth_path = unsloth_path
        self._best: dict[tuple[float, str], Best] = {}

    def write(self, row: Row) -> None:
        """Add a line to the output."""
        print(json.dumps(row), flush=True)
        with self._path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")

    def ask(self, questions: Sequence[Row]) -> None:
        """Measure configurations once each; the best of a side under a cap keep their process."""
        processes = [Process(question, self._unsloth_path) for question in questions]
        for process in processes:
            process.ask()
        for process in processes:
            process.answer()  # Loaded and compiled beside the others: not a measurement.
        for process in processes:
            row = process.turn()
            self.write(row)
            key = row["cap_gib"], row["side"]
            speed, known = row.get("tokens_per_second", 0.0), self._best.get(key)
            if known is not None and speed <= known.tokens_per_second:
                process.close()
                continue
            self._best[key] = Best(process, speed)
            if known is not None:
                known.process.close()

    def rounds(self, cap: float, count: int) -> Row:
        """Return what the bests of both sides reach in turns under a cap, and their ratio."""
        bests = {side: self._best[cap, side] for side in ("unsloth", "ours")}
        speeds: dict[str, list[float]] = {side: [] for side in bests}
        versions = {}
        for number in range(1, count + 1):
            for side, best in bests.items():
                row = best.process.turn()
                self.write({**row, "round": number})
                speeds[side].append(row.get("tokens_per_second", float("nan")))
                versions |= row.get("versions", {})
        pairs = zip(speeds["ours"], speeds["unsloth"], strict=True)
        return {
            "summary": "best of ours over best of Unsloth's, means of the rounds",
            "cap_gib": cap,
            "ratio": statistics.mean(speeds["ours"]) / statistics.mean(speeds["unsloth"]),
            "ratio_by_round": [ours / theirs for ours, theirs in pairs],
            "tokens_per_second": speeds,
            **{side: best.process.question["asked"] for side, best in bests.items()},
            "versions": versions,
        }

    def close(self) -> None:
        """End what is still there."""
        for best in self._best.values():
            best.process.close()


def of_unsloth(asked: str, targets: str) -> list[Row]:
    """Return the questions of ``fp8:6/7,4:8``: precisions with their micro-batches."""
    questions = []
    for word in asked.split(","):
        precision, batches = word.split(":")
        if precision not in PRECISIONS:
            raise SystemExit(f"precision {precision!r} is none of {', '.join(PRECISIONS)}")
        for batch in map(int, batches.split("/")):
            row = {"precision": precision, "micro_batch_size": batch, "target_modules": targets}
            questions.append(row)
    return questions


def of_ours(arguments: argparse.Namespace, cap: float) -> list[Row]:
    """Return our questions: those given, winners of studies, or what stands in `OURS`."""
    given = [json.loads(text) for text in arguments.ours]
    shared = {"lora_rank": RANK, "target_modules": arguments.targets, "seq_len": SEQ_LEN, **FAST}
    if arguments.study:
        from sweep.api import best

        given += [best(study).config.model_dump(mode="json") for study in arguments.study]
    return [{**shared, **asked} for asked in given or OURS[cap]]


def asked_for(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the questions of each cap, the two sides in turns."""
    for cap in arguments.cap:
        theirs = of_unsloth(arguments.unsloth or UNSLOTH[cap], arguments.targets)
        ours = of_ours(arguments, cap)
        pairs = itertools.zip_longest(theirs[: arguments.most], ours[: arguments.most])
        for pair in pairs:
            for side, asked in zip(("unsloth", "ours"), pair, strict=True):
                if asked is not None:
                    yield {"cap_gib": cap, "side": side, "asked": asked}


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line, or what these words of one mean."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path, help="JSON lines are added to it")
    parser.add_argument("--cap", type=float, nargs="+", default=list(OURS), help="in GiB")
    parser.add_argument("--model", default="mistral-7b-v0.3")
    parser.add_argument("--targets", choices=TARGETS, default="attention")
    parser.add_argument("--unsloth", help=f"precisions and micro-batches, as {UNSLOTH[21.48]}")
    parser.add_argument("--ours", action="append", default=[], help="a configuration as JSON")
    parser.add_argument("--study", action="append", default=[], help="whose winner is one of ours")
    parser.add_argument("--most", type=int, help="configurations of a side under a cap")
    parser.add_argument("--at-once", type=int, default=2, help="that load side by side")
    parser.add_argument("--rounds", type=int, default=3, help="of the bests")
    parser.add_argument("--unsloth-path", type=Path, help="put first on the path of Unsloth's side")
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> None:
    """Compare the two, or be one configuration of one of them."""
    arguments = parsed()
    if arguments.serve:
        serve(arguments.serve)
        return
    comparison = Comparison(arguments.path, arguments.unsloth_path)
    comparison.write({**stamp(), "model": arguments.model})
    with tempfile.TemporaryDirectory() as scratch:
        save_model(arguments.model, Path(scratch))
        clean()
        shared = {"model": arguments.model, "directory": scratch}
        questions = [{**shared, **question} for question in asked_for(arguments)]
        try:
            for first in range(0, len(questions), arguments.at_once):
                comparison.ask(questions[first : first + arguments.at_once])
            for cap in arguments.cap:
                comparison.write(comparison.rounds(cap, arguments.rounds))
        finally:
            comparison.close()


if __name__ == "__main__":
    main()
