"""How long `sweep data` takes of 100,000 rows of some 300 words each, plain and as chats.

Run as ``python -m tests.bench.texts_speed OUT.json [--rows N]``. Words are made of syllables and
drawn by Zipf's law from 50,000, and the tokenizer is a byte-level BPE of 32,000 tokens trained on
the first rows, as models have; no text of anybody's is needed. Each command runs in a process of
its own; its peak is that of the largest process among it and its children. The second run of plain
texts finds them prepared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.bench.stamp import stamp
from tests.data.demo_texts import TEMPLATE

ROWS, WORDS, SEED = 100_000, 300, 5
_VOCABULARY, _KNOWN_WORDS, _TRAINED_ON = 32_000, 50_000, 3_000
_SPECIAL = ("<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_MEASURED = """
import resource, sys
from sweep.cli import main
status = main(sys.argv[1:])
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
cpu = sum(one.ru_utime + one.ru_stime for one in used)
print(max(one.ru_maxrss for one in used), cpu, file=sys.stderr)
sys.exit(status)
"""
"""Prints the kibibytes of the largest process and the processors' seconds of all."""


def texts(rows: int, *, words: int = WORDS, seed: int = SEED) -> Iterator[str]:
    """Yield texts of some ``words`` words each: half to twice as many, at random."""
    chance = random.Random(seed)
    consonants, vowels = "bcdfghjklmnprstvwz", "aeiou"
    syllables = [c + v + e for c in consonants for v in vowels for e in ("", "n", "r", "s")]
    known = [
        "".join(chance.choices(syllables, k=chance.randint(1, 4))) for _ in range(_KNOWN_WORDS)
    ]
    weights, total = [], 0.0
    for rank in range(1, _KNOWN_WORDS + 1):
        total += 1.0 / rank
        weights.append(total)
    for _ in range(rows):
        count = int(words * chance.triangular(0.5, 2.0, 0.75))
        drawn = chance.choices(known, cum_weights=weights, k=count)
        sentences = (" ".join(drawn[at : at + 12]).capitalize() for at in range(0, count, 12))
        yield ". ".join(sentences) + "."


def chat(text: str, turns: int) -> list[dict[str, str]]:
    """Return a text as a chat of so many turns, asked and answered by turns."""
    size = -(-len(text) // turns)
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": part} for at, part in enumerate(parts)]


def write(directory: Path, rows: int) -> dict[str, Path]:
    """Write both kinds of texts and the tokenizer."""
    files = {kind: directory / f"{kind}.jsonl" for kind in ("plain", "chat")}
    with files["plain"].open("w") as plain, files["chat"].open("w") as chats:
        for number, text in enumerate(texts(rows)):
            plain.write(json.dumps({"text": text}) + "\n")
            chats.write(json.dumps({"messages": chat(text, 2 + 2 * (number % 3))}) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(_TRAINED_ON), trainer)
    (directory / "tokenizer").mkdir()
    tokenizer.save(str(directory / "tokenizer" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    return files


def measured(home: Path, *typed: str) -> dict[str, Any]:
    """Run `sweep data` and return what it took."""
    command = [sys.executable, "-c", _MEASURED, "data", *typed, "--json"]
    began = time.monotonic()
    done = subprocess.run(
        command, check=True, capture_output=True, env={**os.environ, "SWEEP_HOME": str(home)}
    )
    seconds = time.monotonic() - began
    document = json.loads(done.stdout)
    peak_kib, cpu_seconds = done.stderr.split()[-2:]
    return {
        "rows": document["rows"],
        "tokens": document["tokens"],
        "loss_tokens": document["loss_tokens"],
        "seconds": round(seconds, 1),
        "cpu_seconds": round(float(cpu_seconds), 1),
        "peak_rss_bytes": int(peak_kib) * 1024,
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=ROWS)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        files = write(home, asked.rows)
        with_tokenizer = ("--set", f"data.tokenizer={home / 'tokenizer'}")
        runs = {
            "plain": (str(files["plain"]), *with_tokenizer),
            "plain, again": (str(files["plain"]), *with_tokenizer),
            "chat": (str(files["chat"]), *with_tokenizer),
            "chat, completions only": (
                str(files["chat"]),
                *with_tokenizer,
                "--set",
                "data.completions_only=true",
            ),
        }
        bytes_read = {kind: path.stat().st_size for kind, path in files.items()}
        found: dict[str, Any] = {}
        for run, typed in runs.items():
            load = os.getloadavg()[0]
            found[run] = measured(home, *typed) | {"load_average_before": round(load, 1)}
            _save(asked.out, {"stamp": stamp(), "file_bytes": bytes_read, "runs": found})


def _save(path: Path, result: dict[str, Any]) -> None:
    """Write what was measured so far: a run of a busy machine takes long."""
    processors = {"processors": len(os.sched_getaffinity(0))}
    path.write_text(json.dumps(result | processors, indent=1) + "\n")


if __name__ == "__main__":
    main()
