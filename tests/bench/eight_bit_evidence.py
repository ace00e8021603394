"""Does LoRA learn as well over 8-bit bases and products? A small Llama, trained here, says so.

A Llama of 50 million parameters learns the bytes of Python sources. It is then fine-tuned by LoRA
on documentation, from each kind of frozen base with each kind of products, and its loss on
documentation that it never saw is taken:

    python -m tests.bench.eight_bit_evidence OUT.jsonl

It takes some 7 minutes of an H200; with `--small` an hour of a CPU, in fp32 for bf16. Without a
file it writes what `RESULTS` says into docs/eight_bits.md and draws the figure, for which it needs
plotly's image engine and Chromium.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
from scipy.special import stdtrit

from reports.figures import themes
from tests.bench.stamp import stamp

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests/bench/results/eight_bit_evidence.jsonl"
PAGE = ROOT / "docs" / "eight_bits.md"
PICTURE = ROOT / "docs" / "images" / "eight_bits.svg"
BEGIN = "<!-- Made by `python -m tests.bench.eight_bit_evidence`: change the rows. -->"
END = "<!-- End of what is made. -->"
ARMS = (
    ("wide", "wide"),
    ("nf4", "wide"),
    ("nf4", "fp8"),
    ("nf4", "int8"),
    ("fp8", "wide"),
    ("fp8", "fp8"),
    ("int8", "wide"),
    ("int8", "int8"),
)
"""Bases, and what they multiply in; wide is `wide_dtype`."""
REFERENCE = ARMS[0]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PRETRAIN_RATE, TUNE_RATE = 1e-3, 1e-3
RANK, ALPHA = 16, 32
HELD_OUT_SHARE = 8
"""One file of so many is held out."""
MOST_BYTES = 64_000_000
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Of the model and of its trainings."""

    hidden: int = 768
    layers: int = 8
    sequence: int = 512
    pretrain_batch: int = 64
    pretrain_seconds: float = 120.0
    """Its learning rate falls to 0 within them; the steps are as many as the GPU does."""
    tune_batch: int = 32
    tune_steps: int = 120
    held_out: int = 512
    """Sequences that the loss is taken of, at most; the same ones each time."""


SMALL = Sizes(
    hidden=192,
    layers=6,
    sequence=128,
    pretrain_batch=16,
    pretrain_seconds=600.0,
    tune_batch=16,
    held_out=256,
)


@dataclass(frozen=True)
class Text:
    """Bytes of files: some to learn, and those of other files that are held out."""

    learned: torch.Tensor
    held_out: torch.Tensor
    about: Row


def read_text(kind: str, files: Iterable[Path], device: torch.device) -> Text:
    """Return different contents of files, in an order that does not depend on where they are."""
    contents: dict[str, bytes] = {}
    total = 0
    for file in files:
        content = file.read_bytes()
        contents[hashlib.sha256(content).hexdigest()] = content
        total += len(content)
        if total > MOST_BYTES:
            break
    parts = {True: bytearray(), False: bytearray()}
    for name, content in sorted(contents.items()):
        parts[int(name, 16) % HELD_OUT_SHARE == 0] += content + b"\n\0"
    learned, held_out = (
        torch.frombuffer(parts[is_held_out], dtype=torch.uint8).to(device)
        for is_held_out in (False, True)
    )
    digest = hashlib.sha256("".join(sorted(contents)).encode()).hexdigest()[:16]
    about = {"text": kind, "files": len(contents), "sha256": digest}
    about |= {"learned_bytes": len(learned), "held_out_bytes": len(held_out)}
    return Text(learned, held_out, about)


def files_here(*suffixes: str) -> list[Path]:
    """Return files of Python and of the installed packages, shuffled, the same way each time."""
    places = [Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parents[1]]
    names = {file for place in places for file in place.rglob("*") if file.suffix in suffixes}
    names |= {f for place in places for f in place.rglob("METADATA") if ".md" in suffixes}
    files = sorted(file for file in names if file.is_file())
    random.Random(0).shuffle(files)
    return files


def sequences(text: torch.Tensor, length: int, count: int, chosen: torch.Generator) -> torch.Tensor:
    """Return token ids (count, length) from anywhere in a text."""
    starts = torch.randint(len(text) - length, (count, 1), generator=chosen).to(text.device)
    found: torch.Tensor = text[starts + torch.arange(length, device=text.device)]
    return found.long()


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return what is not rounded to 8 bits: bf16, and fp32 where bf16 is emulated, on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def autocast(device: torch.device) -> torch.autocast:
    """Return mixed precision as Trainer has it, and none on a CPU."""
    dtype = wide_dtype(device)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def train(
    model: Any,
    batch: Callable[[], torch.Tensor],
    *,
    rate: float,
    share_done: Callable[[int], float],
) -> int:
    """Train until the share that is done is 1, the learning rate falling to 0; return the steps."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01, fused=True)
    steps = 0
    while (share := share_done(steps)) < 1:
        optimizer.param_groups[0]["lr"] = rate * min((steps + 1) / 20, 1 - share)
        ids = batch()
        with autocast(ids.device):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
        if steps % 10 == 0:
            loss.item()  # The clock that ends the training is the device's, not the queue's.
    return steps


@torch.no_grad()
def loss_on(model: Any, text: torch.Tensor, sizes: Sizes) -> float:
    """Return the mean loss in nats a byte, on sequences spread over a text.

    The model stays in training mode, which changes nothing without dropout: in evaluation mode
    bitsandbytes packs 4-bit weights on a CPU so that no gradient passes them any more.
    """
    count = min(sizes.held_out, len(text) // sizes.sequence)
    count -= count % sizes.tune_batch
    starts = torch.arange(count, device=text.device) * (len(text) // count)
    ids = text[starts[:, None] + torch.arange(sizes.sequence, device=text.device)].long()
    total = 0.0
    for part in ids.split(sizes.tune_batch):
        with autocast(text.device):
            total += model(input_ids=part, labels=part).loss.item() * len(part)
    return total / count


def pretrained(sizes: Sizes, text: Text, directory: Path) -> Row:
    """Train a model from nothing, write it and say what became of it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.hidden // 64,
        num_key_value_heads=sizes.hidden // 128,
        max_position_embeddings=sizes.sequence,
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(0)
    device = text.learned.device
    model = LlamaForCausalLM(config).to(device)
    if device.type == "cuda":
        for layer in model.model.layers:
            layer.compile()
    chosen = torch.Generator().manual_seed(0)

    def batch() -> torch.Tensor:
        return sequences(text.learned, sizes.sequence, sizes.pretrain_batch, chosen)

    begun = time.perf_counter()
    steps = train(
        model,
        batch,
        rate=PRETRAIN_RATE,
        share_done=lambda _: (time.perf_counter() - begun) / sizes.pretrain_seconds,
    )
    after = loss_on(model, text.held_out, sizes)
    model.to(wide_dtype(device)).save_pretrained(directory)
    parameters = sum(p.numel() for p in model.parameters())
    return {"pretrained": steps, "parameters": parameters, "after": after}


def base_model(directory: Path, base: str, compute: str, device: torch.device) -> Any:
    """Return the frozen model as a study would have it."""
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    from sweep.training.eight_bit import compute_in_8_bits, to_8_bits

    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=wide_dtype(device),
    )
    model = LlamaForCausalLM.from_pretrained(
        directory,
        dtype=wide_dtype(device),
        quantization_config=nf4 if base == "nf4" else None,
        device_map={"": device},
    )
    if base in ("fp8", "int8"):
        to_8_bits(model, base, left=("lm_head",), device=device)
    if compute != "wide":
        compute_in_8_bits(model, compute)
    return model


def tuned(model: Any, text: Text, sizes: Sizes, seed: int) -> Row:
    """Fine-tune adapters on a frozen model; return its losses before and after."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora).train()
    before = loss_on(model, text.held_out, sizes)
    chosen = torch.Generator().manual_seed(seed)

    def batch() -> torch.Tensor:
        return sequences(text.learned, sizes.sequence, sizes.tune_batch, chosen)

    train(model, batch, rate=TUNE_RATE, share_done=lambda steps: steps / sizes.tune_steps)
    return {"before": before, "after": loss_on(model, text.held_out, sizes)}


def measured(sizes: Sizes, seeds: int) -> Iterator[Row]:
    """Yield the rows: of the run, of the model, and of each fine-tuning, seed by seed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sources = read_text("Python sources", files_here(".py"), device)
    documents = read_text("documentation", files_here(".md", ".rst"), device)
    tokens = sizes.tune_steps * sizes.tune_batch * sizes.sequence
    run = {**stamp(), **asdict(sizes), "lora_rank": RANK, "lora_alpha": ALPHA}
    run["wide"] = str(wide_dtype(device)).removeprefix("torch.")
    yield {**run, "tune_tokens": tokens, "texts": [sources.about, documents.about]}
    with tempfile.TemporaryDirectory() as scratch:
        yield pretrained(sizes, sources, Path(scratch))
        for seed in range(seeds):
            for base, compute in ARMS:
                begun = time.perf_counter()
                model = base_model(Path(scratch), base, compute, device)
                row = {"base": base, "compute": compute, "seed": seed}
                row |= tuned(model, documents, sizes, seed)
                yield {**row, "seconds": round(time.perf_counter() - begun, 1)}


def of_arms(rows: Iterable[Row], key: str = "after") -> dict[tuple[str, str], dict[int, float]]:
    """Return the losses of each kind of base and products, by seed."""
    found: dict[tuple[str, str], dict[int, float]] = {arm: {} for arm in ARMS}
    for row in rows:
        if "seed" in row:
            found[row["base"], row["compute"]][row["seed"]] = row[key]
    return found


def less(losses: dict[int, float], reference: dict[int, float]) -> list[float]:
    """Return the differences between runs of one seed."""
    return [losses[seed] - reference[seed] for seed in sorted(losses)]


@dataclass(frozen=True)
class Estimate:
    """A mean with Student's 95 % interval."""

    value: float
    low: float
    high: float


def mean_estimate(values: list[float]) -> Estimate:
    """Return the mean of at least two independent values with its interval."""
    mean, count = float(np.mean(values)), len(values)
    half = float(stdtrit(count - 1, 0.975) * np.std(values, ddof=1) / np.sqrt(count))
    return Estimate(mean, mean - half, mean + half)


def _said(estimate: Estimate, form: str) -> str:
    return f"{estimate.value:{form}} ({estimate.low:{form}} to {estimate.high:{form}})"


def named(base: str, compute: str, wide: str) -> list[str]:
    """Return what the base and the products of an arm are called, with the type that is wide."""
    return [wide if name == "wide" else name for name in (base, compute)]


def table(rows: list[Row]) -> list[str]:
    """Return the lines of the table: held-out losses, and what they differ by."""
    before, after, wide = of_arms(rows, "before"), of_arms(rows), rows[0]["wide"]
    lines = [
        f"| base | products | before | after | less {wide} on {wide} "
        f"| less {wide} on the same base |",
        "|---|---|---|---|---|---|",
    ]
    for base, compute in ARMS:
        losses = after[base, compute]
        cells = [*named(base, compute, wide), f"{min(before[base, compute].values()):.4f}"]
        cells.append(_said(mean_estimate(list(losses.values())), ".4f"))
        for reference in (REFERENCE, (base, "wide")):
            differences = mean_estimate(less(losses, after[reference]))
            cells.append("" if reference == (base, compute) else _said(differences, "+.4f"))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def figure(rows: list[Row]) -> go.Figure:
    """Return the differences to wide on wide: a dot for each seed, and their means."""
    losses, wide = of_arms(rows), rows[0]["wide"]
    drawn = go.Figure()
    for base, compute in reversed(ARMS[1:]):
        differences = less(losses[base, compute], losses[REFERENCE])
        mean = mean_estimate(differences)
        name = "{} base, {} products".format(*named(base, compute, wide))
        drawn.add_scatter(
            x=differences,
            y=[name] * len(differences),
            mode="markers",
            marker={"color": "#8192A6", "size": 7},
        )
        drawn.add_scatter(
            x=[mean.value],
            y=[name],
            error_x={"type": "data", "array": [mean.high - mean.value]},
            marker={"color": "#0072B2", "size": 10, "symbol": "diamond"},
        )
    drawn.add_vline(x=0, line={"dash": "dot", "width": 1})
    drawn.update_layout(
        template=themes()["light"],
        showlegend=False,
        width=860,
        height=380,
        margin={"l": 190, "r": 20, "t": 20, "b": 60},
        paper_bgcolor="#ffffff",
        xaxis_title=f"held-out loss less that of {wide} products on a {wide} base, nats a byte",
    )
    return drawn


def read_rows() -> list[Row]:
    """Return the committed rows; none before there are any."""
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def section(rows: list[Row]) -> str:
    """Return the part of the page that is made of the rows."""
    if not rows:
        return f"{BEGIN}\n\nNot measured yet.\n\n{END}"
    run, model, *_ = rows
    versions = ", ".join(f"{n} {v}" for n, v in run["versions"].items() if v is not None)
    about = (
        f"Held-out loss in nats a byte, {len(of_arms(rows)[REFERENCE])} seeds, with 95 % intervals "
        f"(Student's t); differences are between runs of one seed. A Llama of "
        f"{model['parameters'] / 1e6:.0f} million parameters, {run['layers']} layers, "
        f"{run['hidden']} wide, first learned {run['texts'][0]['text']} for "
        f"{model['pretrained']:,} steps, to a held-out loss of {model['after']:.3f}; then adapters "
        f"of rank {run['lora_rank']} on all linear layers learned {run['tune_tokens']:,} bytes of "
        f"{run['texts'][1]['text']}. {run['card'] or 'CPU'}, {run['date']}, {versions}."
    )
    picture = f"![Differences of held-out losses](images/{PICTURE.name})"
    return "\n".join([BEGIN, "", about, "", *table(rows), "", picture, "", END])


def page(text: str, rows: list[Row]) -> str:
    """Return the page with what is made of the rows in its place."""
    before, _, rest = text.partition(BEGIN)
    return before + section(rows) + rest.partition(END)[2]


def main() -> None:
    """Measure into a file, or write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path, nargs="?", help="JSON lines are written to it")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="what a CPU does in an hour")
    arguments = parser.parse_args()
    if arguments.path is None:
        rows = read_rows()
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
        if rows:
            figure(rows).write_image(PICTURE)
        return
    with arguments.path.open("w", encoding="utf-8") as out:
        for row in measured(SMALL if arguments.small else Sizes(), arguments.seeds):
            print(json.dumps(row), file=out, flush=True)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
