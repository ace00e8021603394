"""Makes what is shipped for the demo model: 200 short chats, and a tokenizer trained on them.

Run as ``python -m tests.data.demo_texts`` in the repository's root; it writes
``docs/examples/dataset.jsonl`` and ``search_spaces/tokenizers/demo``. Every sentence is put
together from the words below, so nobody else's text is in either.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXTS = Path("docs/examples/dataset.jsonl")
TOKENIZER = Path("search_spaces/tokenizers/demo")
ROWS, SEED, VOCABULARY = 200, 7, 512
SPECIAL = ("<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
"""In the order of their ids; the demo's config names 1 and 2."""
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_THINGS = {
    "kettle": ("kitchen", "boils the water", "a steel lid", "descale it"),
    "bicycle": ("shed", "carries one rider", "two thin wheels", "oil the chain"),
    "lantern": ("porch", "lights the path", "a glass chimney", "trim the wick"),
    "sailboat": ("harbour", "crosses the bay", "a canvas sail", "rinse the ropes"),
    "telescope": ("attic", "shows far stars", "a long brass tube", "dust the lens"),
    "beehive": ("orchard", "holds the honey", "ten wooden frames", "check the queen"),
    "loom": ("workshop", "weaves the wool", "a hundred strings", "wax the shuttle"),
    "clock": ("hall", "tells the hour", "a slow pendulum", "wind the spring"),
}
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_PEOPLE = ("Ada", "Bruno", "Clara", "Dario", "Edith", "Farid", "Greta", "Hugo")
_QUESTIONS = (
    "Where does {person} keep the {thing}?",
    "What is the {thing} in the {place} good for?",
    "How should {person} look after the {thing}?",
    "Write about the {thing} that {person} found in the {place} on {day}.",
)
_ANSWERS = (
    "{person} keeps the {thing} in the {place}.",
    "It {use} and has {part}.",
    "Once a month one should {care}, best on a {day}.",
    "When it rains on {day}, {person} covers the {thing} with an old cloth.",
    "Nobody in the {place} remembers who built it, but it still {use}.",
    "To {care} takes {count} minutes and a steady hand.",
    "The {thing} cost {count} coins, and {person} would not sell it for twice that.",
    "In the {place} there is room for {count} more of them.",
)


def chats(rows: int = ROWS, seed: int = SEED) -> Iterator[dict[str, object]]:
    """Yield chats of one to three questions; most are short and a few are long."""
    chance = random.Random(seed)
    for _ in range(rows):
        turns = [{"role": "system", "content": "Answer in plain sentences."}]
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            words = _words(chance)
            sentences = min(24, 1 + int(chance.lognormvariate(0.7, 0.8)))
            answer = " ".join(
                chance.choice(_ANSWERS).format(**words | {"count": chance.randint(2, 90)})
                for _ in range(sentences)
            )
            turns.append({"role": "user", "content": chance.choice(_QUESTIONS).format(**words)})
            turns.append({"role": "assistant", "content": answer})
        yield {"messages": turns if chance.random() < 0.3 else turns[1:]}


def _words(chance: random.Random) -> dict[str, str]:
    thing = chance.choice(sorted(_THINGS))
    place, use, part, care = _THINGS[thing]
    person, day = chance.choice(_PEOPLE), chance.choice(_DAYS)
    words = {"thing": thing, "place": place, "use": use, "part": part, "care": care}
    return words | {"person": person, "day": day}


def trained(rows: list[dict[str, object]]) -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on the chats' turns."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    turns = (turn["content"] for row in rows for turn in row["messages"])  # type: ignore[attr-defined]
    tokenizer.train_from_iterator(turns, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", SPECIAL.index("<s>"))]
    )
    return tokenizer


def main() -> None:
    """Write both."""
    rows = list(chats())
    TEXTS.parent.mkdir(parents=True, exist_ok=True)
    TEXTS.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    TOKENIZER.mkdir(parents=True, exist_ok=True)
    trained(rows).save(str(TOKENIZER / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
    }
    (TOKENIZER / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (TOKENIZER / "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    main()
