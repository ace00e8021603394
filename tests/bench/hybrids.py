"""What hybrid models need and take: memory and speed predicted and measured, and linear attention
beside its loop in plain PyTorch.

    python -m tests.bench.hybrids --dry -o PREDICTED.jsonl
    python -m tests.bench.hybrids --part memory --predicted PREDICTED.jsonl -o OUT.jsonl
    python -m tests.bench.hybrids --part speed --predicted PREDICTED.jsonl -o OUT.jsonl

Shapes are the defaults of transformers' own config classes, half of the layers (`--whole` for all):
Qwen3.5-9B, as its documentation names them, OLMo Hybrid 7B, LFM2 with two convolutions before each
attention, and eight layers of Kimi Linear 48B-A3B, a mixture. Weights are random.

The first command predicts, without a GPU. The second measures the peak of each configuration, with
kernels of linear attention that are not tuned for the GPU, as tuning takes minutes for each type of
numbers and no memory afterwards. The third measures speeds at 2,048 and 8,192 tokens with tuned
kernels, then by transformers' loop in plain PyTorch, where the package is hidden from the worker;
and that a trial says so where the package is there and cannot be imported. A row says how a
configuration failed where it did; after `--seconds` nothing new is begun.

Triton 3.4 to 3.7.0 compiles a kernel of the backward pass wrongly on Hopper GPUs, so that a newer
one has to be on the path there, before torch's own. Where none can be had, `--triton-as 3.7.1` has
it used all the same: peaks and speeds are then what they are, and gradients are not.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlora_sweep.search_spaces.config import TrialConfig, parse_config
from qlora_sweep.search_spaces.errors import InputError, words_of
from qlora_sweep.search_spaces.gpus import GpuSpec, find_gpu, match_product
from qlora_sweep.search_spaces.models import ModelSpec, checked_config
from qlora_sweep.search_spaces.recurrent import FLASH_LINEAR_ATTENTION
from qlora_sweep.search_spaces.space import StepBudget
from qlora_sweep.storage.definition import Target
from qlora_sweep.storage.records import Measured
from qlora_sweep.sweep.predict.memory.predictor import TracingPredictor
from qlora_sweep.sweep.predict.speed.predictor import StepTimes
from qlora_sweep.sweep.running.device_info import read_gpu
from qlora_sweep.sweep.running.runner import Runner
from qlora_sweep.sweep.running.supervisor import SupervisedRunner
from qlora_sweep.sweep.running.wire import TrialRequest
from tests.bench.harness import Row, stamp, write

OpenRunner = Callable[[ModelSpec], AbstractContextManager[Runner]]

QWEN: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
}
OLMO: dict[str, Any] = {
    "model_type": "olmo_hybrid",
    "vocab_size": 100_352,
    "hidden_size": 3840,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 30,
    "num_key_value_heads": 30,
    "max_position_embeddings": 65_536,
}
LFM: dict[str, Any] = {
    "model_type": "lfm2",
    "vocab_size": 65_536,
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "layer_types": ["conv", "conv", "full_attention"] * 10,
}
KIMI: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": 163_840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "qwen3.5-9b": (QWEN, 16),
    "olmo-hybrid-7b": (OLMO, 16),
    "lfm2-2.6b": (LFM, 15),
    "kimi-linear-48b-a3b": (KIMI, 8),
}
"""A config, and how many layers are trained where not all are."""
LEAN: dict[str, Any] = {"upcast_fp32": False, "optimizer": "adamw_torch_fused"}
PLAIN: dict[str, Any] = {**LEAN, "quantization": "none", "double_quant": False}
FUSED: dict[str, Any] = {**LEAN, "kernels": "fused-loss"}
EVERY = {"target_modules": "all-linear"}
COMPARED: Sequence[dict[str, Any]] = (
    {**LEAN, "micro_batch_size": 4, "seq_len": 2048},
    {**LEAN, "micro_batch_size": 1, "seq_len": 8192},
)
"""Measured with the kernels and without."""
WITH_KERNELS = ("qwen3.5-9b", "olmo-hybrid-7b")
LISTED: Mapping[str, Sequence[dict[str, Any]]] = {
    "qwen3.5-9b": (
        *COMPARED,
        {**LEAN, "micro_batch_size": 8, "seq_len": 512, "checkpoint_fraction": 0.0},
        {**LEAN, **EVERY, "micro_batch_size": 1, "seq_len": 4096, "checkpoint_fraction": 0.25},
        {**FUSED, "micro_batch_size": 4, "seq_len": 2048},
        {**FUSED, "micro_batch_size": 1, "seq_len": 8192},
        {**FUSED, "micro_batch_size": 2, "seq_len": 2048, "checkpoint_fraction": 0.5},
        {**FUSED, **EVERY, "micro_batch_size": 3, "seq_len": 777, "lora_rank": 64},
        {**LEAN, "micro_batch_size": 2, "seq_len": 1024, "attention": "eager"},
        {**LEAN, "micro_batch_size": 2, "seq_len": 1024, "compute_dtype": "fp16"},
        {"micro_batch_size": 1, "seq_len": 512},
        {"micro_batch_size": 2, "seq_len": 2048, "target_modules": "qv", "lora_rank": 8},
        {"micro_batch_size": 1, "seq_len": 2048, "checkpoint_fraction": 0.0},
        {**PLAIN, "micro_batch_size": 2, "seq_len": 2048},
        {**PLAIN, "micro_batch_size": 2, "seq_len": 1000, "checkpoint_fraction": 0.0},
    ),
    "lfm2-2.6b": (
        {**LEAN, "micro_batch_size": 4, "seq_len": 2048},
        {**LEAN, "micro_batch_size": 8, "seq_len": 512, "checkpoint_fraction": 0.0},
        {**LEAN, "micro_batch_size": 1, "seq_len": 8192},
        {**LEAN, **EVERY, "micro_batch_size": 2, "seq_len": 1500, "checkpoint_fraction": 0.5},
    ),
    "olmo-hybrid-7b": (
        *COMPARED,
        {**LEAN, "micro_batch_size": 4, "seq_len": 512, "checkpoint_fraction": 0.0},
        {**LEAN, **EVERY, "micro_batch_size": 2, "seq_len": 1000, "lora_rank": 64},
        {"micro_batch_size": 1, "seq_len": 1024, "checkpoint_fraction": 0.5},
    ),
    "kimi-linear-48b-a3b": (
        {**LEAN, "micro_batch_size": 4, "seq_len": 1024},
        {**LEAN, "micro_batch_size": 2, "seq_len": 777, "checkpoint_fraction": 0.0},
        {**LEAN, "micro_batch_size": 1, "seq_len": 8192, "lora_rank": 64},
    ),
}
STEPS = StepBudget(warmup_min=1, warmup_max=2, measured_min=2, measured_max=4, seconds_max=3)
_FIXED_KERNELS: Mapping[str, tuple[dict[str, int], int]] = {
    "chunk_fwd_kernel_o": ({"BK": 64, "BV": 64}, 4),
    "chunk_bwd_kernel_dqkwg": ({}, 4),
    "chunk_bwd_kernel_dv_local": ({}, 4),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": ({"BV": 32}, 4),
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": ({"BV": 32}, 4),
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": ({"BK": 32}, 2),
    "recompute_w_u_fwd_kernel": ({}, 4),
    "prepare_wy_repr_bwd_kernel": ({}, 4),
    "chunk_local_cumsum_scalar_kernel": ({}, 2),
    "l2norm_fwd_kernel": ({"BT": 16}, 4),
    "l2norm_bwd_kernel": ({"BT": 16}, 4),
    "chunk_gla_fwd_kernel_o": ({"BK": 64, "BV": 64}, 4),
    "chunk_kda_bwd_kernel_dAv": ({}, 4),
    "chunk_kda_bwd_kernel_intra": ({}, 4),
    "chunk_kda_bwd_kernel_wy_dqkg_fused": ({"BK": 32, "BV": 64}, 4),
    "chunk_kda_fwd_kernel_inter_solve_fused": ({"BK": 32}, 2),
    "chunk_kda_fwd_kernel_intra_sub_chunk": ({}, 4),
    "chunk_kda_fwd_kernel_intra_token_parallel": ({"BH": 4}, 4),
    "chunk_local_cumsum_vector_kernel": ({"BS": 32}, 4),
    "recompute_w_u_fwd_kda_kernel": ({}, 4),
}
"""Blocks and warps of kernels that are not tuned: some of those that would be tried."""
_START = """
import importlib.metadata as metadata
known = metadata.version
def version(name):
    if name in {hidden!r}:
        raise metadata.PackageNotFoundError(name)
    return {told!r}.get(name) or known(name)
metadata.version = version
"""
"""Python runs it as it starts: packages that are hidden from a worker, and versions that it is
told."""
_TRITON = "import triton\ntriton.__version__ = {version!r}\n"
_UNIMPORTABLE = "raise ImportError('hidden')\n"


@dataclass(frozen=True)
class Case:
    """A configuration of a model, with the kernels of linear attention or without."""

    model: ModelSpec
    config: TrialConfig
    path: str = "kernels"
    """``kernels``, ``tuned`` kernels, ``loop`` where their package is hidden, or ``broken`` where
    it is there and cannot be imported: a trial has to say so."""

    @property
    def key(self) -> str:
        """What tells its prediction from others."""
        settings = self.config.model_dump(mode="json", exclude_defaults=True)
        said = [self.model.name, self.model.config, settings]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def model_of(name: str, *, is_whole: bool) -> ModelSpec:
    """Return a model of the table, whole or with as many layers as it says."""
    known, layers = MODELS[name]
    if not is_whole:
        known = {**known, "num_hidden_layers": layers}
        if "layer_types" in known:
            known["layer_types"] = known["layer_types"][:layers]
    return ModelSpec(name, "directory", checked_config(known, label=name))


def cases(*, is_whole: bool) -> dict[str, list[Case]]:
    """Return all that is asked, by part; bases alike follow one another."""
    models = {name: model_of(name, is_whole=is_whole) for name in MODELS}
    memory: list[Case] = []
    for name, settings in LISTED.items():
        memory += [Case(models[name], parse_config(each)) for each in settings]
    compared = [parse_config(settings) for settings in COMPARED]
    speed: list[Case] = []
    for name in WITH_KERNELS:
        for path in ("tuned", "loop"):
            speed += [Case(models[name], config, path) for config in compared]
    speed.append(Case(models[WITH_KERNELS[0]], compared[0], "broken"))
    return {"memory": memory, "speed": speed}


def predicted(case: Case, memory: TracingPredictor, gpu: GpuSpec) -> Row:
    """Return what is predicted of a case that has its kernels."""
    row: Row = {}
    try:
        known = memory.predict(case.config)
        row["peak"] = {
            "bytes": known.peak_allocated_bytes,
            "uncertainty": known.uncertainty,
            "parts": dict(known.breakdown),
        }
    except InputError as error:
        row["peak_unknown"] = str(error)
    speed = StepTimes([case.config], model=case.model, gpu=gpu, evidence=None).prediction(0)
    if isinstance(speed, InputError):
        return row | {"step_unknown": str(speed)}
    low, high = speed.step_estimate.ends
    terms = {term: round(seconds, 4) for term, seconds in speed.terms.items()}
    row["step"] = {"seconds": speed.step_seconds, "low": low, "high": high, "terms": terms}
    return row


def predictions(asked: Sequence[Case], gpu: GpuSpec) -> dict[str, Row]:
    """Return what is predicted of each case where it has its kernels, by its key."""
    found: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in MODELS:
            own = {case.key: case for case in asked if case.model.name == name}
            if not own:
                continue
            memory = TracingPredictor(
                next(iter(own.values())).model,
                cache_dir=Path(directory),
                compute_capability=gpu.compute_capability,
            )
            memory.predict_all([case.config for case in own.values()])
            for key, case in own.items():
                found[key] = predicted(case, memory, gpu)
            memory.end_children()
    return found


def measured(runner: Runner, case: Case) -> Row:
    """Return what a trial measured, or how it ended."""
    began = time.perf_counter()
    try:
        outcome = runner.run(TrialRequest(config=case.config, steps=STEPS))
    except Exception as error:  # noqa: BLE001 - the next configuration may run
        return {"failure": f"{type(error).__name__}: {words_of(error)}"[:800]}
    row: Row = {"wall_seconds": round(time.perf_counter() - began, 1)}
    if not isinstance(outcome, Measured):
        return row | {"failure": f"{type(outcome).__name__}: {outcome}"[:800]}
    found = outcome.measurement
    kept = ("step_seconds", "tokens_per_second", "final_loss")
    kept += ("peak_allocated_bytes", "peak_reserved_bytes")
    return row | {name: getattr(found, name) for name in kept} | {"flags": found.flags}


def compared(row: Row) -> Row:
    """Return measured over predicted, of peak and step; nothing of what is missing."""
    found: Row = {}
    known = row.get("predicted", {})
    if "peak_allocated_bytes" in row and "peak" in known:
        ratio = row["peak_allocated_bytes"] / known["peak"]["bytes"]
        found["peak_error"] = round(ratio - 1.0, 4)
        found["is_peak_within"] = abs(ratio - 1.0) <= known["peak"]["uncertainty"]
    if "step_seconds" in row and "step" in known:
        found["step_ratio"] = round(row["step_seconds"] / known["step"]["seconds"], 3)
        found["is_step_within"] = known["step"]["low"] <= row["step_seconds"]
        found["is_step_within"] &= row["step_seconds"] <= known["step"]["high"]
    return found


@contextmanager
def environment(path: str, *, triton_as: str | None = None) -> Iterator[None]:
    """Let workers that start inside run linear attention in one of the ways of `Case.path`.

    Args:
        path: the way.
        triton_as: the version that they take Triton for; None for its own.
    """
    hidden = [FLASH_LINEAR_ATTENTION] if path == "loop" else []
    start = _START.format(hidden=hidden, told={"triton": triton_as})
    if triton_as is not None:
        start += _TRITON.format(version=triton_as)
    with tempfile.TemporaryDirectory() as directory:
        changes: dict[str, str] = {}
        if path == "kernels":
            for name, (blocks, warps) in _FIXED_KERNELS.items():
                known = {"kwargs": blocks, "num_warps": warps, "num_stages": 2, "num_ctas": 1}
                file = Path(directory, f"{name}.json")
                file.write_text(json.dumps({"default_config": known}), encoding="utf-8")
            changes = {"FLA_CONFIG_DIR": directory, "FLA_CACHE_MODE": "default"}
        if path in ("loop", "broken"):
            package = Path(directory, "fla")
            package.mkdir()
            (package / "__init__.py").write_text(_UNIMPORTABLE, encoding="utf-8")
        if path in ("loop", "broken") or triton_as is not None:
            Path(directory, "sitecustomize.py").write_text(start, encoding="utf-8")
            before = filter(None, [directory, os.environ.get("PYTHONPATH")])
            changes["PYTHONPATH"] = os.pathsep.join(before)
        with changed_environment(changes):
            yield


@contextmanager
def changed_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set variables; on exit they are as they were."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def summary(rows: Sequence[Row]) -> Row:
    """Return the worst errors, and how many times as fast linear attention is by its kernels."""
    peaks = [row["peak_error"] for row in rows if "peak_error" in row]
    ratios = [row["step_ratio"] for row in rows if "step_ratio" in row]
    speeds: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["path"] in ("tuned", "loop") and "tokens_per_second" in row:
            settings = row["config"]
            shape = f"{row['model']} {settings['micro_batch_size']} x {settings['seq_len']}"
            speeds.setdefault(shape, {}).setdefault(row["path"], row["tokens_per_second"])
    faster = {
        shape: {**both, "times": round(both["tuned"] / both["loop"], 2)}
        for shape, both in speeds.items()
        if len(both) == 2
    }
    return {
        "measured": sum("step_seconds" in row for row in rows),
        "failed": sum("failure" in row for row in rows),
        "peak_errors": sorted(peaks),
        "step_ratios": sorted(ratios),
        "beside_the_loop": faster,
    }


def run(
    asked: Sequence[Case],
    known: Mapping[str, Row],
    *,
    seconds: float,
    open_runner: OpenRunner,
    output: Path | None,
    triton_as: str | None = None,
) -> Row:
    """Measure all cases, write a row each, and return what they come to.

    Args:
        asked: the cases.
        known: predictions by the cases' keys.
        seconds: after which no case is begun.
        open_runner: starts a worker for a model.
        output: file for the rows; None for none.
        triton_as: see `environment`.
    """
    began = time.perf_counter()
    rows: list[Row] = []
    for _, alike in itertools.groupby(asked, key=lambda case: (case.model.name, case.path)):
        group = list(alike)
        first = group[0]
        with environment(first.path, triton_as=triton_as), open_runner(first.model) as runner:
            for case in group:
                row: Row = {"model": case.model.name, "layers": case.model.hidden_layers}
                row |= {"path": case.path, "triton_as": triton_as}
                if time.perf_counter() - began > seconds:
                    row["failure"] = "not begun: the time is over"
                else:
                    row |= measured(runner, case)
                row["predicted"] = {}
                if case.path in ("kernels", "tuned"):
                    row["predicted"] = known.get(case.key, {})
                row |= compared(row) | {"config": case.config.model_dump(mode="json")}
                write(row, output)
                rows.append(row)
    return summary(rows)


def on_gpu(directory: Path) -> OpenRunner:
    """Return what starts workers on the GPU that is here, with their logs in a directory."""
    gpu_here = read_gpu()
    assert gpu_here is not None, "there is no GPU here: --dry predicts alone"
    gpu = match_product(gpu_here.product) or find_gpu("h200")
    budget = int(0.97 * gpu_here.memory_bytes)
    target = Target(gpu=gpu.name, device="cuda", budget_bytes=budget)
    numbers = itertools.count()

    def opened(model: ModelSpec) -> AbstractContextManager[Runner]:
        log = directory / f"{next(numbers)}-{model.name}.log"
        return SupervisedRunner(model, target=target, log_path=log)

    return opened


def read_predictions(path: Path) -> dict[str, Row]:
    """Return what ``--dry`` wrote."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {row["key"]: row["predicted"] for row in rows if "key" in row}


def main() -> None:
    """Predict, or measure, and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="predict alone, without a GPU")
    parser.add_argument("--part", choices=("memory", "speed"), help="one part of both")
    parser.add_argument("--whole", action="store_true", help="train all layers")
    parser.add_argument("--predicted", type=Path, help="what --dry wrote")
    parser.add_argument("--model", choices=MODELS, help="one of the models")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first so many cases")
    parser.add_argument("--seconds", type=float, default=420.0, help="then nothing is begun")
    parser.add_argument("--triton-as", help="the version that workers take Triton for")
    parser.add_argument("-o", "--output", type=Path)
    typed = parser.parse_args()
    write(stamp(), typed.output)
    asked: list[Case] = []
    for part, own in cases(is_whole=typed.whole).items():
        if typed.part in (None, part):
            asked += [case for case in own if typed.model in (None, case.model.name)]
    asked = asked[typed.skip :]
    known: dict[str, Row] = {}
    if typed.predicted is not None:
        known = read_predictions(typed.predicted)
    known |= predictions([case for case in asked if case.key not in known], find_gpu("h200"))
    if not typed.dry:
        with tempfile.TemporaryDirectory() as directory:
            opened = on_gpu(Path(directory))
            found = run(
                asked,
                known,
                seconds=typed.seconds,
                open_runner=opened,
                output=typed.output,
                triton_as=typed.triton_as,
            )
        write(found, typed.output)
        return
    for key, case in {case.key: case for case in asked}.items():
        row = {"model": case.model.name, "layers": case.model.hidden_layers, "key": key}
        write(row | {"predicted": known[key]}, typed.output)


if __name__ == "__main__":
    main()
