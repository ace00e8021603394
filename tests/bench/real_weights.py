"""What configurations learn on a real pretrained model: many short trainings on one GPU.

    python -m tests.bench.real_weights RUNS.jsonl --model DIRECTORY [--processes 3] -o OUT.jsonl

Each line of RUNS is ``{"config": {...}, "seed": 0, "tokens": 1000000}``: a configuration, the seed
of its adapters and of the order of the rows, and the tokens that it trains on; or a list of such
runs that one process trains one after the other, as it compiles their layers once. Each line of OUT
is a run with the loss of held-out rows in nats a token: in the products that it trained in
(``eval_loss``), in 16-bit compute on the same base (``eval_loss_16_bit``), and of its adapters on a
16-bit base (``eval_loss_16_bit_base``).

``"unfitted": true`` leaves 8-bit products as they are. Rows with ``noise`` or ``power`` are what
this program made at commit d0956b35.

Base, adapters and 8-bit layers are those of a trial; a step is captured as one CUDA graph, so that
a model of 135 million parameters does not wait for its host, and several share the GPU: speeds say
nothing. The text is Python's standard library in rows without padding, one file in twelve held out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from qlora_sweep.search_spaces.config import MAX_GRAD_NORM, WEIGHT_DECAY, TrialConfig, parse_config
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.storage.records import EightBitProducts
from qlora_sweep.sweep.training.adapters import Attached, attached, eager
from qlora_sweep.sweep.training.faithfulness import products_of
from qlora_sweep.sweep.training.fitting import fit, multiplying_in
from qlora_sweep.sweep.training.model import BaseModel, build_base, compute_type
from qlora_sweep.sweep.training.step import evaluating
from tests.bench.harness import stamp, write

HELD_OUT_EVERY = 12
"""One file in so many is held out."""
EVAL_TOKENS = 131_072
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
_WARMUP_STEPS = 3
"""That CUDA's libraries need before a step can be captured; they train nothing."""


@dataclass(frozen=True)
class Sources:
    """Python's standard library as tokens, each file with the tokenizer's end of text behind it."""

    training: np.ndarray  # (tokens,)
    held_out: np.ndarray  # (tokens,)

    def training_rows(self, seq_len: int, *, seed: int) -> np.ndarray:
        """Return rows (rows, seq_len) of the training files in the order of a seed."""
        rows = _rows(self.training, seq_len)
        return rows[np.random.default_rng(seed).permutation(len(rows))]

    def held_out_rows(self, seq_len: int) -> np.ndarray:
        """Return rows (rows, seq_len) of the held-out files, `EVAL_TOKENS` in all at most."""
        return _rows(self.held_out, seq_len)[: EVAL_TOKENS // seq_len]


def _rows(tokens: np.ndarray, seq_len: int) -> np.ndarray:
    return tokens[: len(tokens) // seq_len * seq_len].reshape(-1, seq_len)


def python_sources(model: str) -> Sources:
    """Return the sources of this Python's standard library as a model's tokenizer reads them."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in sorted(root.rglob("*.py"))
        if not _LEFT_OUT & set(file.relative_to(root).parts)
    ]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    tokens = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]
    held_out = tokens[::HELD_OUT_EVERY]
    training = [ids for index, ids in enumerate(tokens) if index % HELD_OUT_EVERY]
    return Sources(np.concatenate(training), np.concatenate(held_out))


class Step:
    """An optimizer step of attached adapters on rows of tokens, captured where there is a GPU.

    Args:
        attachment: base and adapters.
        config: how it trains.
    """

    def __init__(self, attachment: Attached, config: TrialConfig) -> None:
        self._model = attachment.model
        self._parameters = attachment.trainable_parameters()
        device = self._parameters[0].device
        shape = (config.accumulation_steps, config.micro_batch_size, config.seq_len)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self._mask = causal_mask(config.seq_len, device)
        self._autocast = autocast(config, device)
        self._rate = torch.zeros((), device=device)
        is_on_gpu = device.type == "cuda"
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=self._rate,
            weight_decay=WEIGHT_DECAY,
            fused=is_on_gpu,
            capturable=is_on_gpu,
        )
        self._loss = torch.zeros((), device=device)
        self._run = self._step
        if is_on_gpu:
            self._run = self._captured()

    def _step(self) -> None:
        self._loss.zero_()
        for micro_batch in self._tokens:
            with self._autocast:
                found = self._model(
                    input_ids=micro_batch, attention_mask=self._mask, labels=micro_batch
                )
                loss = found.loss / len(self._tokens)
            loss.backward()
            self._loss += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._parameters, MAX_GRAD_NORM, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)

    def _captured(self) -> Any:
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(_WARMUP_STEPS):
                self._step()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        # At a rate of 0 the steps so far moved no adapter, but Adam's averages.
        for state in self._optimizer.state.values():
            for value in state.values():
                value.zero_()
        return graph.replay

    def take(self, rows: np.ndarray, *, rate: float) -> torch.Tensor:
        """Take a step on rows (samples, seq_len) and return its mean loss, on the device."""
        self._tokens.copy_(torch.from_numpy(rows).reshape(self._tokens.shape))
        self._rate.fill_(rate)
        self._run()
        return self._loss.clone()


def causal_mask(seq_len: int, device: torch.device) -> torch.Tensor:
    """Return the mask (1, 1, seq_len, seq_len) of which position sees which."""
    return torch.ones(seq_len, seq_len, dtype=torch.bool, device=device).tril()[None, None]


def autocast(config: TrialConfig, device: torch.device) -> torch.autocast:
    """Return the precision that a configuration's products outside the frozen layers have."""
    dtype = compute_type(config)
    is_narrow = dtype != torch.float32
    # A cast weight that is kept from one pass to the next would be an old one in a graph.
    return torch.autocast(device.type, dtype, enabled=is_narrow, cache_enabled=False)


def held_out_loss(attachment: Attached, config: TrialConfig, rows: np.ndarray) -> float:
    """Return the mean loss of rows (rows, seq_len), in nats a token."""
    model = attachment.model
    device = next(model.parameters()).device
    mask = causal_mask(config.seq_len, device)
    losses = list[torch.Tensor]()
    with evaluating(model), eager(attachment.layers), autocast(config, device):
        for part in torch.from_numpy(rows).split(16):
            tokens = part.to(device)
            losses.append(model(input_ids=tokens, attention_mask=mask, labels=tokens).loss)
    return float(torch.stack(losses).mean())


def judged(
    sources: Sources, base: BaseModel, run: dict[str, Any], *, wide: BaseModel
) -> dict[str, Any]:
    """Train a run and return it with what was learned.

    Args:
        sources: what it trains on.
        base: as the run's configuration has it.
        run: what to train.
        wide: a 16-bit base, on which the adapters are judged as well.
    """
    config = parse_config(run["config"])
    torch.manual_seed(run["seed"])
    began = time.perf_counter()
    rows = sources.training_rows(config.seq_len, seed=run["seed"])
    held_out = sources.held_out_rows(config.seq_len)
    with attached(base, config) as attachment:
        model = attachment.model
        about: dict[str, Any] = {}
        if config.is_8bit_compute and not run.get("unfitted"):
            about["eight_bit"] = fitted(attachment, config, rows).model_dump(mode="json")
        losses = train(attachment, config, run, rows)
        eval_loss = held_out_loss(attachment, config, held_out)
        with multiplying_in(model, None):
            eval_loss_16_bit = held_out_loss(attachment, config, held_out)
        learned = adapters_of(model)
    on_wide = config.changed(quantization="none", compute_dtype="bf16", compile=False)
    with attached(wide, on_wide) as attachment:
        take_adapters(attachment.model, learned)
        eval_loss_16_bit_base = held_out_loss(attachment, on_wide, held_out)
    last = losses[-max(1, len(losses) // 10) :]
    return {
        **run,
        **about,
        "steps": len(losses),
        "train_loss": statistics.fmean(last) if last else None,
        "eval_loss": eval_loss,
        "eval_loss_16_bit": eval_loss_16_bit,
        "eval_loss_16_bit_base": eval_loss_16_bit_base,
        "eval_tokens": held_out.size,
        "training_tokens": sources.training.size,
        "seconds": time.perf_counter() - began,
    }


def adapters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a model's trained parameters by name."""
    named = model.named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad}


@torch.no_grad()
def take_adapters(model: torch.nn.Module, learned: dict[str, torch.Tensor]) -> None:
    """Give a model's trained parameters the values that they have in another one."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(learned[name])


def train(
    attachment: Attached, config: TrialConfig, run: dict[str, Any], rows: np.ndarray
) -> list[float]:
    """Train for a run's tokens on rows (rows, seq_len) and return the loss of each step."""
    samples = config.samples_per_step
    steps = run["tokens"] // (samples * config.seq_len)
    if steps == 0:
        return []
    step = Step(attachment, config)
    losses = list[torch.Tensor]()
    for index in range(steps):
        places = np.arange(index * samples, (index + 1) * samples) % len(rows)
        rate = run["config"]["learning_rate"] * (1 - index / steps)
        losses.append(step.take(rows[places], rate=rate))
    return [float(loss) for loss in losses]


def fitted(attachment: Attached, config: TrialConfig, rows: np.ndarray) -> EightBitProducts:
    """Return what fitting 8-bit products on the first of rows (rows, seq_len) came to."""
    device = next(attachment.model.parameters()).device
    tokens = torch.from_numpy(rows[: config.micro_batch_size]).to(device)
    with autocast(config, device):
        batch = {"input_ids": tokens, "labels": tokens}
        model = attachment.model
        return products_of(fit(model, model, batch, kind=config.compute_dtype))


def trained(
    runs: Iterable[dict[str, Any]], *, model: str, sources: Sources
) -> Iterator[dict[str, Any]]:
    """Train runs one after the other, and yield each with what was learned."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec = load_model_spec(model)

    def base_of(config: TrialConfig) -> BaseModel:
        return build_base(config, spec=spec, weights="pretrained", device=device, seed=0)

    wide = base_of(TrialConfig(quantization="none", upcast_fp32=False))
    for run in runs:
        # A base that was fitted to 8 bits serves one run.
        base = base_of(parse_config(run["config"]))
        try:
            yield judged(sources, base, run, wide=wide)
        except Exception as error:  # noqa: BLE001 - the other runs go on
            yield {**run, "error": repr(error)[:500]}
        base.close()
        if device.type == "cuda":
            # Others train on the same GPU.
            torch.cuda.empty_cache()
    wide.close()


def _work(runs: list[dict[str, Any]], model: str, sources: Sources) -> list[dict[str, Any]]:
    return list(trained(runs, model=model, sources=sources))


def groups_in(text: str) -> list[list[dict[str, Any]]]:
    """Return the groups of runs that lines of JSON are: each a list of runs, or one run."""
    groups = []
    for line in text.splitlines():
        asked = json.loads(line)
        groups.append(asked if isinstance(asked, list) else [asked])
    return groups


def main() -> None:
    """Train what a file lists, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    write(stamp(), asked.output)
    groups = groups_in(asked.runs.read_text(encoding="utf-8"))
    train_one = partial(_work, model=asked.model, sources=python_sources(asked.model))
    with ProcessPoolExecutor(asked.processes, get_context("spawn")) as processes:
        for group in processes.map(train_one, groups):
            for found in group:
                write(found, asked.output)


if __name__ == "__main__":
    main()
