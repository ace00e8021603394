"""Measure Unsloth in 4, 16 and 8 bits beside this tool's configurations, turn by turn.

    python -m tests.bench.unsloth_beside OUT.jsonl [--cap 21.48 38.39] [--model NAME] [--layers N]
        [--ours JSON ...] [--theirs JSON ...]

What a side is not told is in the tables, of rows of 512 tokens under these caps. `--theirs
'{"precision": "4", "micro_batch_size": 1, "seq_len": 8192, "checkpointing": "unsloth"}'` asks
Unsloth for one configuration, where what is not said is `THEIRS`.

Each configuration has a process of its own with the model in it, capped to the same memory once it
is loaded; one that runs out of memory is a row too. The first turn loads and compiles; the second
counts. The best of either side is then measured in turns, which alone make the ratio. A turn is the
faster of two stretches of 12 steps. Unsloth runs in TRL's `SFTTrainer`, which it patches: a plain
loop spoils the graphs that it compiles. Needs unsloth, unsloth_zoo, TRL and, for 8 bits, torchao;
`--unsloth-path` names a directory with them that this tool's own process is not to see.
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
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from qlora_sweep.search_spaces.config import parse_config
from qlora_sweep.search_spaces.models import ModelSpec, checked_config, load_model_spec
from tests.bench.harness import ROOT, Row, stamp, word_tokenizer, write

GIB = 2**30
SEED = 0
STEPS_WARMUP, STEPS = 3, 12
FAST = {
    "lora_rank": 16,
    "target_modules": "attention",
    "seq_len": 512,
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
}
"""Unsloth's, as arguments of `FastLanguageModel.from_pretrained`."""
THEIRS: Row = {"seq_len": 512, "checkpointing": False}
"""What configurations of Unsloth have where they do not say otherwise."""
UNSLOTH: dict[float, list[tuple[str, int]]] = {
    21.48: [("fp8", 6), ("fp8", 5), ("fp8", 7), ("4", 8), ("16", 4)],
    38.39: [("fp8", 16), ("fp8", 12), ("fp8", 20), ("4", 16), ("16", 12)],
}
"""Precisions with their micro-batches that Unsloth is asked for under each cap in GiB."""
EIGHT, PLAIN = {"compute_dtype": "fp8", "quantization": "fp8"}, {"quantization": "none"}
OURS: dict[float, list[tuple[int, Row]]] = {
    21.48: [(10, EIGHT), (12, {"compute_dtype": "fp8"}), (4, PLAIN)],
    38.39: [(16, EIGHT), (20, EIGHT), (12, PLAIN)],
}
"""What we are asked for where the command line names nothing."""


def rates(seconds: Sequence[float], tokens: int, loss: float) -> Row:
    """Return what stretches with such steps come to, and the peaks in bytes."""
    return {
        "tokens_per_second": tokens / min(seconds),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "loss": loss,
    }


def ours(question: Row) -> Callable[[Row], Row]:
    """Return what measures a turn of a configuration in this tool's own training loop, as a trial
    has it; the base is the first one's."""
    from qlora_sweep.sweep.training.adapters import attached
    from qlora_sweep.sweep.training.model import build_base
    from qlora_sweep.sweep.training.step import TrainingLoop

    first = parse_config(settings_of(question["asked"]))
    spec = model_of(question["model"], question["layers"])
    device = torch.device("cuda")
    base = build_base(first, spec=spec, weights="random", device=device, seed=SEED)

    def measure(asked: Row) -> Row:
        config = parse_config(settings_of(asked))
        steps = asked.get("steps", STEPS)
        seconds = []
        with attached(base, config) as attachment:
            loop = TrainingLoop(attachment, config, seed=SEED)
            for count in (STEPS_WARMUP, steps, steps):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                losses = [loop.step() for _ in range(count)]
                torch.cuda.synchronize()
                seconds.append((time.perf_counter() - begun) / count)
        return rates(seconds[1:], config.tokens_per_step, losses[-1].item())

    return measure


def settings_of(asked: Row) -> Row:
    """Return the settings of a trial in what was asked for."""
    return {name: value for name, value in asked.items() if name != "steps"}


def unsloth(question: Row) -> Callable[[Row], Row]:
    """Return what measures a turn of a configuration in Unsloth, from a directory of random
    weights; precision and checkpointing are the first one's."""
    from unsloth import FastLanguageModel  # isort: skip - it patches what comes after it
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    first = question["asked"]
    loaded, tokenizer = FastLanguageModel.from_pretrained(
        question["directory"],
        max_seq_length=first.get("longest", first["seq_len"]),
        dtype=torch.bfloat16,
        use_gradient_checkpointing=first["checkpointing"],
        **PRECISIONS[first["precision"]],
    )
    model = FastLanguageModel.get_peft_model(
        loaded,
        r=16,
        lora_alpha=32,
        lora_dropout=0,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        use_gradient_checkpointing=first["checkpointing"],
        random_state=SEED,
    )

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self, ends: Sequence[int]) -> None:
            self.ends = ends
            self.marks: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step in self.ends:
                torch.cuda.synchronize()
                self.marks.append(time.perf_counter())

    def measure(asked: Row) -> Row:
        batch, length = asked["micro_batch_size"], asked["seq_len"]
        steps = asked.get("steps", STEPS)
        ends = [STEPS_WARMUP + steps * stretch for stretch in range(3)]
        clock = Clock(ends)
        ids = torch.randint(model.config.vocab_size, (batch * ends[-1], length))
        with tempfile.TemporaryDirectory() as directory:
            arguments = SFTConfig(
                output_dir=directory,
                per_device_train_batch_size=batch,
                gradient_accumulation_steps=1,
                gradient_checkpointing=bool(first["checkpointing"]),
                max_steps=ends[-1],
                bf16=True,
                optim="adamw_torch_fused",
                logging_steps=1000,
                max_length=length,
                save_strategy="no",
                report_to="none",
                dataset_kwargs={"skip_prepare_dataset": True},
            )
            done = SFTTrainer(
                model=model,
                processing_class=tokenizer,
                args=arguments,
                train_dataset=Dataset.from_dict({"input_ids": ids.tolist()}),
                callbacks=[clock],
            ).train()
        seconds = [(end - begin) / steps for begin, end in pairwise(clock.marks)]
        return rates(seconds, batch * length, done.training_loss)

    return measure


def serve(question: Row) -> None:
    """Answer each line on standard input, changes of the configuration, with a JSON line: a turn of
    it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    measure = None
    for line in sys.stdin:
        try:
            if measure is None:
                measure = (ours if question["side"] == "ours" else unsloth)(question)
                gc.collect()
                torch.cuda.empty_cache()
                total = torch.cuda.get_device_properties(0).total_memory
                torch.cuda.set_per_process_memory_fraction(question["cap_gib"] * GIB / total)
            torch.cuda.reset_peak_memory_stats()
            answer = measure(question["asked"] | json.loads(line))
        except Exception as error:  # noqa: BLE001 - it is this row's answer
            is_oom = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
            said = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            answer = {"oom": True} if is_oom else said
        gc.collect()
        torch.cuda.empty_cache()
        if question["side"] == "unsloth" and measure is not None:
            answer["versions"] = {n: version(n) for n in ("unsloth", "unsloth_zoo", "trl")}
        print(json.dumps(answer), file=answers, flush=True)


def model_of(name: str, layers: int | None) -> ModelSpec:
    """Return a model that ships with the tool, or the first of its layers."""
    whole = load_model_spec(name)
    if layers is None:
        return whole
    config = {**whole.config, "num_hidden_layers": layers}
    return ModelSpec(name, "directory", checked_config(config, label=name))


def save_model(spec: ModelSpec, directory: Path) -> None:
    """Write a random 16-bit model with a tokenizer, as Unsloth loads one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in spec.config.items() if key != "model_type"}
    config = AutoConfig.for_model(spec.config["model_type"], **values)
    with torch.device("cuda"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    word_tokenizer(spec.vocab_size).save_pretrained(directory)


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

    def turn(self, changes: Row | None = None) -> Row:
        """Return the row of one more turn, of the configuration or of a changed one."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            print(json.dumps(changes or {}), file=process.stdin, flush=True)
        begun = time.perf_counter()
        timer = threading.Timer(self.question["patience_seconds"], process.kill)
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        answer = json.loads(line) if line else {"error": f"ended with status {process.wait()}"}
        named = {key: self.question[key] for key in ("cap_gib", "side", "asked")}
        named["asked"] = named["asked"] | (changes or {})
        return {**named, **answer, "turn_seconds": round(time.perf_counter() - begun, 1)}

    def close(self) -> None:
        """End the process."""
        with self._process:
            self._process.kill()


def questions(cap: float, typed: argparse.Namespace) -> Iterator[Row]:
    """Yield what both sides are asked for under a cap, in turns."""
    asked_of_us = typed.ours or [
        {"micro_batch_size": batch} | changes for batch, changes in OURS.get(cap, ())
    ]
    asked_of_them = typed.theirs or [
        {"precision": precision, "micro_batch_size": batch}
        for precision, batch in UNSLOTH.get(cap, ())
    ]
    own = [FAST | asked for asked in asked_of_us]
    theirs = [THEIRS | asked for asked in asked_of_them]
    for pair in itertools.zip_longest(theirs, own):
        for side, asked in zip(("unsloth", "ours"), pair, strict=True):
            if asked is not None:
                yield {"cap_gib": cap, "side": side, "asked": asked}


def in_cells(asked: argparse.Namespace, cap: float, shared: Row) -> None:
    """Write a row for each cell of each configuration, whose cells share a process."""
    longest = max(cell.get("seq_len", 0) for cell in asked.cell)
    for question in questions(cap, asked):
        if question["side"] == "unsloth":
            question["asked"] = question["asked"] | {"longest": longest}
        process = Process(shared | question, asked.unsloth_path)
        for cell in asked.cell:
            write(process.turn(cell), asked.path)
        process.close()


def compare(asked: argparse.Namespace, cap: float, shared: Row) -> Row:
    """Return what the bests of both sides reach in turns under a cap, and their ratio."""
    bests: dict[str, tuple[float, Process]] = {}
    for question in questions(cap, asked):
        process = Process(shared | question, asked.unsloth_path)
        row = process.turn()
        if "tokens_per_second" in row:
            row = process.turn()
        write(row, asked.path)
        known = bests.get(row["side"], (0.0, None))
        slower: Process | None = process
        if row.get("tokens_per_second", 0.0) > known[0]:
            bests[row["side"]], slower = (row["tokens_per_second"], process), known[1]
        if slower is not None:
            slower.close()
    speeds: dict[str, list[float]] = {side: [] for side in bests}
    versions: Row = {}
    for number in range(1, asked.rounds + 1):
        for side, (_, process) in bests.items():
            row = process.turn()
            write({**row, "round": number}, asked.path)
            speeds[side].append(row.get("tokens_per_second", float("nan")))
            versions |= row.get("versions", {})
    for _, process in bests.values():
        process.close()
    ratio = None
    if len(speeds) == 2:
        ratio = statistics.mean(speeds["ours"]) / statistics.mean(speeds["unsloth"])
    return {
        "summary": "best of ours over best of Unsloth's, means of the rounds",
        "cap_gib": cap,
        "ratio": ratio,
        "tokens_per_second": speeds,
        **{side: process.question["asked"] for side, (_, process) in bests.items()},
        "versions": versions,
    }


def main() -> None:
    """Compare the two, or be one configuration of one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="JSON lines are added to it")
    parser.add_argument("--cap", type=float, nargs="+", default=list(OURS), help="in GiB")
    parser.add_argument("--model", default="mistral-7b-v0.3")
    parser.add_argument(
        "--layers", type=int, help="how many of the model's layers; all unless said"
    )
    for side in ("--ours", "--theirs"):
        parser.add_argument(
            side, action="append", default=[], type=json.loads, help="a configuration as JSON"
        )
    parser.add_argument(
        "--cell",
        action="append",
        default=[],
        type=json.loads,
        help="changes of each configuration, as JSON: each cell once, in place of the comparison",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=150.0,
        help="a process that has not answered after so many seconds is ended, and its row says so",
    )
    parser.add_argument("--rounds", type=int, default=3, help="of the bests")
    parser.add_argument("--unsloth-path", type=Path, help="put first on the path of Unsloth's side")
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve)
        return
    about = {"model": asked.model, "layers": asked.layers}
    write(stamp() | about, asked.path)
    with tempfile.TemporaryDirectory() as scratch:
        save_model(model_of(asked.model, asked.layers), Path(scratch))
        torch.cuda.empty_cache()
        shared = about | {"directory": scratch, "patience_seconds": asked.patience}
        for cap in asked.cap:
            if asked.cell:
                in_cells(asked, cap, shared)
            else:
                write(compare(asked, cap, shared), asked.path)


if __name__ == "__main__":
    main()
