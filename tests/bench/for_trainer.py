"""What a plan for TRL predicts, beside TRL's own run of the exported file.

    python -m tests.bench.for_trainer [a10] [--model mistral-7b-v0.3] [--also JSON ...] [--steps 40]
        [-o OUT.jsonl]

The configuration that `sweep plan GPU --for trl` recommends, and others like it, are written as
`sweep export --format trl` writes them, and run as `sweep verify` runs such a file: TRL's own
command on random weights, its allocator capped to the GPU's budget. A row each: peak allocated
memory and tokens/s, predicted and reached. Needs a GPU and TRL, and no network.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import closing
from pathlib import Path

from qlora_sweep.search_spaces.config import TrialConfig, as_options
from qlora_sweep.search_spaces.errors import SweepError
from qlora_sweep.search_spaces.gpus import find_gpu
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from qlora_sweep.storage.definition import Target
from qlora_sweep.storage.files import make_directory
from qlora_sweep.sweep.api import plan
from qlora_sweep.sweep.export.formats import written
from qlora_sweep.sweep.export.record import predicted_record
from qlora_sweep.sweep.paths import runs_directory
from qlora_sweep.sweep.planning.answers import tracing
from qlora_sweep.sweep.predict.building import build_forecaster
from qlora_sweep.sweep.predict.forecast import Forecast
from qlora_sweep.sweep.predict.memory.profile_store import TracingChildren
from qlora_sweep.sweep.running.device_info import read_gpu
from qlora_sweep.sweep.verifying.runs import verify, write_weights
from tests.bench.harness import Row, stamp, write

ALSO = ({"micro_batch_size": 3, "seq_len": 1024, "kernels": "hf"},)
"""What is run beside the recommendation where nobody says: another size, without Liger's layers."""


def forecasts(configs: list[TrialConfig], *, model: ModelSpec, target: Target) -> list[Forecast]:
    """Return what is predicted of configurations under a budget, on the GPU that is here."""
    here = find_gpu(target.gpu)
    gpu = read_gpu()
    if gpu is not None and gpu.known is not None:
        here = gpu.known
    with closing(TracingChildren(outlive=True)) as children:
        predictor = tracing(children)(model, here)
        forecaster = build_forecaster(model, target, shapes=None, predictor=predictor)
        found = [forecaster.expect(config) for config in configs]
        for forecast in found:
            assert forecast.memory is not None, forecast.notes
    return found


def run(forecast: Forecast, *, target: Target, weights: Path, steps: int) -> Row:
    """Run a configuration in TRL, and return what was predicted and what was reached."""
    record = predicted_record("for-trl", forecast, target=target)
    export = written(record, format="trl")
    row: Row = {
        "config": forecast.config.changes_from(TrialConfig(trainer="trl")),
        "fits": forecast.fits,
        "predicted_tokens_per_second_range": forecast.speed_estimate.ends,
    }
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trl.yaml")
        for file, text in export.files(path).items():
            file.write_text(text, encoding="utf-8")
        record = record.model_copy(update={"format": "trl", "unsupported": export.lost})
        try:
            found = verify(record, path=path, steps=steps, model=str(weights))
        except SweepError as error:
            return row | {"failed": str(error)}
    said = found.to_json()
    kept = ("steps", "tokens_per_second", "peak_allocated_bytes", "differences")
    return row | {key: said[key] for key in kept}


def main() -> None:
    """Print a row for each configuration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gpu", nargs="?", default="a10")
    parser.add_argument("--model", default="mistral-7b-v0.3")
    parser.add_argument("--also", type=json.loads, action="append")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--weights", type=Path, help="a directory with weights; made by default")
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    write({**stamp(), "model": asked.model, "gpu": asked.gpu}, asked.output)
    model, gpu = load_model_spec(asked.model), find_gpu(asked.gpu)
    recommended = plan(asked.gpu, model=asked.model, trainer="trl").config
    assert recommended is not None, "something fits"
    print("recommended:", *as_options(recommended.changes_from(TrialConfig())), flush=True)
    configs = [recommended]
    for changes in asked.also or ALSO:
        configs.append(recommended.changed(**changes))
    gpu_here = read_gpu()
    product = None if gpu_here is None or gpu_here.known == gpu else gpu_here.product
    target = Target(gpu=gpu.name, device="cuda", budget_bytes=gpu.budget_bytes, emulated_on=product)
    found = forecasts(configs, model=model, target=target)
    make_directory(runs_directory())
    with tempfile.TemporaryDirectory(dir=runs_directory()) as directory:
        weights = asked.weights or write_weights(model, Path(directory))
        for forecast in found:
            row = run(forecast, target=target, weights=weights, steps=asked.steps)
            write(row, asked.output)


if __name__ == "__main__":
    main()
