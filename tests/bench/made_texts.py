"""Write texts whose lengths are spread as those of instructions are, for studies on texts.

    python -m tests.bench.made_texts OUT.jsonl [--rows 12000]

Some 70 words each in the median (200 tokens of the demo's tokenizer), lognormal, at most 900.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

SENTENCE = (
    "the model learns from texts that people wrote about GPUs memory speed rank batches and how "
    "long a row of them is when it is cut or packed"
)
SEED = 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=12_000)
    options = parser.parse_args()
    chance, words = random.Random(SEED), SENTENCE.split()
    with options.out.open("w", encoding="utf-8") as file:
        for _ in range(options.rows):
            count = int(min(900, max(6, chance.lognormvariate(4.3, 0.8))))
            text = " ".join(chance.choices(words, k=count))
            file.write(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
    main()
