"""Rows become tokens as TRL and transformers make them, with loss where it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.sweep.data import encoding
from qlora_sweep.sweep.data.encoding import Encoder, Tokens, encoded
from qlora_sweep.sweep.data.files import Broken, Place, RowsError
from qlora_sweep.sweep.data.kinds import example_of, on_completions
from qlora_sweep.sweep.data.marking import marked
from tests.sweep.data.judged_by_trl import (
    labelled,
    preference_rows,
    supervised_rows,
    template_named,
)
from tests.sweep.data.layouts import layout_of
from tests.tables import cases

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is the kettle?"},
    {"role": "assistant", "content": "In the kitchen."},
    {"role": "user", "content": "And the clock?"},
    {"role": "assistant", "content": "It is in the hall: \N{HOURGLASS}"},
]
PREFIX = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and loop.last %}(thought){% endif %}"
    "{{ m['content'] }}</s>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As templates of models that think: the last answer is told with its thoughts, the others not."""
THINKING = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n<think>\n{% endif %}"
)
"""Prompts for an answer otherwise than it renders one, as Qwen3.5 does."""
ROLE = "{'human': 'user', 'gpt': 'assistant'}.get(m['role'], m['role'])"
"""TRL renames turns and not roles."""
RETELLING = (
    "{% for m in messages[1:] %}{% if m['role'] == 'user' %}[INST] "
    "{% if loop.last %}{{ messages[0]['content'] }} {% endif %}{{ m['content'] }}[/INST]"
    "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)
"""As Mistral's: the system's words stand in the last turn where that is the user's."""

GREETING = (
    "{% for m in messages %}"
    "{% if loop.first and m['role'] != 'system' %}<|system|>\nYou help.</s>\n{% endif %}"
    "<|{{ m['role'] }}|>\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}\n"
)
"""Has a system turn of its own, as SmolLM2's."""
ENDING = (
    "\n{{- bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
"""Ends a chat once, as Phi-3's."""


@pytest.fixture
def tokenizer(shipped: Any) -> Any:
    """The demonstration's, with its own chat template."""
    own, end = shipped.chat_template, shipped.eos_token
    yield shipped
    shipped.chat_template, shipped.eos_token = own, end


def encode(tokenizer: Any, kind: str, given: list[dict[str, Any]], only: bool | None) -> list[Any]:
    layout = layout_of(kind)
    encoder = Encoder(tokenizer, layout, completions_only=on_completions(kind, only))
    numbered = [(Place("mine", line), row) for line, row in enumerate(given, start=1)]
    return [row for _, row in encoded(numbered, encoder)]


def learned(tokenizer: Any, kind: str, only: bool | None = True, **row: Any) -> str:
    """Return the text of the tokens that carry loss, or why there are none."""
    (tokens,) = encode(tokenizer, kind, [row], only)
    return tokens.reason if isinstance(tokens, Broken) else decoded(tokenizer, tokens)


def decoded(tokenizer: Any, tokens: Tokens) -> str:
    return str(tokenizer.decode(tokens.ids[tokens.mask == 1]))


def labels_of(rows: Sequence[Tokens]) -> list[tuple[list[int], list[int]]]:
    return [labelled(row.ids.tolist(), row.mask.tolist()) for row in rows]


# Forty rows of every kind are TRL's


def chat(index: int) -> list[dict[str, str]]:
    turns = [
        {"role": "user", "content": f"What is {index} and {'so on ' * (index % 4)}?"},
        {"role": "assistant", "content": f"It is {index * 7}, as it was.\n\nNo more." * (index % 3)}
        if index % 3
        else {"role": "assistant", "content": " indeed "},
    ]
    system = [{"role": "system", "content": "Be kind."}] if index % 2 else []
    again = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": f"{index}"}]
    return [*system, *turns, *(again if index % 5 else [])]


def row_of(kind: str, index: int) -> dict[str, Any]:
    turns = chat(index)
    match kind:
        case "text":
            return {"text": f" In the hall {index}" * (1 + index % 3)}
        case "prompt-completion":
            pairs = [("the ket", "tle"), ("In ", "the"), ("a\n", "\nb"), ("2 =", " 4"), ("x", "é")]
            prompt, completion = pairs[index % 5]
            return {"prompt": f"{index} {prompt}", "completion": completion}
        case "instruction":
            return {"instruction": f"Say {index}.", "input": "x" * (index % 3), "output": "so"}
        case "turns":
            return {"prompt": turns[:-1], "completion": turns[-1:]}
        case "messages":
            return {"messages": turns}
        case _:
            theirs = {"user": "human", "assistant": "gpt"}
            told = [{"from": theirs[t["role"]], "value": t["content"]} for t in turns[-2:]]
            return {"conversations": told}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "template", "only"),
    cases(
        """
        text
        prompt-completion
        prompt-completion | | false
        instruction
        messages
        messages | | true
        conversations | roles
        turns | qwen3
        turns | qwen3_5_think
        turns | gptoss
        turns | thinking
        messages | qwen2_5 | true
        messages | qwen3_6 | true
        messages | gptoss | true
        messages | llama3 | true
        """
    ),
)
def test_forty_rows_are_trls_own(
    tokenizer: Any, kind: str, template: str | None, only: bool | None, tmp_path: Path
) -> None:
    from datasets import Dataset

    if template is not None:
        own = {"thinking": THINKING, "roles": PREFIX.replace("m['role']", ROLE)}
        tokenizer.chat_template = own.get(template) or template_named(template)
    made = [row_of(kind, index) for index in range(40)]
    is_pair = kind in ("turns", "prompt-completion", "instruction")
    ours = encode(tokenizer, "prompt-completion" if kind == "turns" else kind, made, only)
    if kind == "instruction":
        # Which TRL knows in these words alone.
        examples = [example_of(row, layout_of(kind)) for row in made]
        made = [{"prompt": one.prompt, "completion": one.completion} for one in examples]
    options = {"completion_only_loss": only} if is_pair else {"assistant_only_loss": bool(only)}

    theirs = supervised_rows(tokenizer, Dataset.from_list(made), tmp_path, **options)

    assert labels_of(ours) == theirs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("template", [GREETING, ENDING])
def test_trl_learns_the_same_turns_by_a_template_that_is_marked_for_it(
    tokenizer: Any, template: str, tmp_path: Path
) -> None:
    from datasets import Dataset

    tokenizer.chat_template = template
    made = [row_of("messages", index) for index in range(40)]
    ours = encode(tokenizer, "messages", made, True)
    tokenizer.chat_template = marked(template)
    given = Dataset.from_list(made)
    theirs = supervised_rows(tokenizer, given, tmp_path, assistant_only_loss=True)
    assert labels_of(ours) == theirs


def test_a_template_that_is_marked_renders_the_same(tokenizer: Any) -> None:
    from trl import chat_template_utils

    def rendered(template: str) -> list[str]:
        tokenizer.chat_template = template
        render = partial(tokenizer.apply_chat_template, tokenize=False)
        return [render(TURNS[1:]), render(TURNS[1:4], add_generation_prompt=True)]

    names = [name for name in dir(chat_template_utils) if name.endswith("_chat_template")]
    templates = [getattr(chat_template_utils, name) for name in names]
    own = [PREFIX, FORGETFUL, THINKING, GREETING, ENDING]
    tried = 0
    for template in own + [one for one in templates if isinstance(one, str)]:
        if chat_template_utils.has_generation_markers(template) or "image" in template:
            continue
        assert rendered(marked(template)) == rendered(template)
        tried += 1
    assert tried > len(own)


# What TRL has no word for


def test_a_text_ends_once_with_the_end_of_its_sequence(tokenizer: Any) -> None:
    one, same = encode(tokenizer, "text", [{"text": "the ket"}, {"text": "the ket</s>"}], None)
    assert one.ids.tolist() == same.ids.tolist() == tokenizer("the ket</s>")["input_ids"]
    # Nothing comes before the first, from which it could be predicted.
    assert one.loss_count == len(one.ids) - 1
    tokenizer.model_max_length = 4
    tokenizer.backend_tokenizer.enable_truncation(4)
    (long,) = encode(tokenizer, "text", [{"text": "the hall " * 50}], None)
    assert len(long.ids) > 50


def test_a_mark_that_the_tokenizer_itself_puts_at_the_end_is_learned(tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    backend = tokenizer.backend_tokenizer
    own, marks = backend.post_processor, [("<s>", 1), ("</s>", tokenizer.eos_token_id)]
    backend.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=marks)
    try:
        (tokens,) = encode(
            tokenizer, "prompt-completion", [{"prompt": "a", "completion": "b"}], True
        )
    finally:
        backend.post_processor = own
    assert tokens.mask.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("template", [PREFIX, FORGETFUL, THINKING])
def test_turns_are_told_apart_where_the_template_marks_none(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    thought = {PREFIX: "", FORGETFUL: "(thought)", THINKING: "\n</think>\n\n"}[template]
    first = "In the kitchen.</s>\n"
    expected = f"{first}{thought}It is in the hall: \N{HOURGLASS}</s>\n"
    assert learned(tokenizer, "messages", messages=TURNS) == expected
    # What begins the first turn of all is no answer of the model's.
    alone = learned(tokenizer, "messages", messages=TURNS[2:])
    assert alone == expected.replace("(thought)", thought)


def test_a_prompt_that_is_told_otherwise_later_carries_no_loss(tokenizer: Any) -> None:
    tokenizer.chat_template = RETELLING
    asked = {"role": "user", "content": "Yes or no?"}
    answer = {"role": "assistant", "content": "no"}
    assert learned(tokenizer, "messages", messages=[TURNS[0], asked, answer]).strip() == "no</s>"
    row = {"prompt": [TURNS[0], asked, TURNS[2], asked], "completion": [answer]}
    assert learned(tokenizer, "prompt-completion", **row).strip() == "no</s>"


@pytest.mark.parametrize("only", [False, True])
def test_a_template_may_leave_the_thoughts_of_earlier_answers_out(
    tokenizer: Any, only: bool
) -> None:
    later = "(m['content'] if loop.last else m['content'].split('</think>')[-1]) | trim"
    tokenizer.chat_template = PREFIX.replace("m['content'] | trim", later)
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nno"}
    turns = [TURNS[1], thought, TURNS[3], thought]
    last = f"{thought['content']}</s>\n"
    whole = learned(tokenizer, "messages", only, messages=turns)
    assert whole.endswith(last)
    assert whole.count("hm") == 1
    assert not only or whole == f"no</s>\n{last}"
    pair = learned(tokenizer, "prompt-completion", only, prompt=turns[:3], completion=turns[3:])
    assert pair == last if only else pair.endswith(last)


def test_turns_of_weight_0_carry_no_loss(tokenizer: Any) -> None:
    turns = [dict(turn) for turn in TURNS]
    turns[2]["weight"], turns[4]["weight"] = 0, 1
    for template in (tokenizer.chat_template, PREFIX):
        tokenizer.chat_template = template
        text = learned(tokenizer, "messages", messages=turns)
        assert text.strip() == "It is in the hall: \N{HOURGLASS}</s>"
        turns[4]["weight"] = 0
        assert "every turn of" in learned(tokenizer, "messages", messages=turns)
        turns[4]["weight"] = 1
    row = {"prompt": turns[:2], "completion": turns[2:]}
    assert "turn 3: weight is false, which" in learned(tokenizer, "prompt-completion", **row)
    turns[2]["weight"] = 0.5
    assert "weight must be 0 or 1" in learned(tokenizer, "messages", messages=turns)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "refuses it: Roles must alternate"),
        ("{{ messages[99]['content'] + 'x' }}", "the chat template refuses it"),
        ("{{ messages[0]['content'] + 1 }}", "the chat template fails"),
        # Meant for contents in parts, of which a text has none.
        (PREFIX.replace("m['content'] | trim", "m['content'].text"), "leaves out what turn 2 says"),
    ],
)
def test_a_template_that_does_not_render_a_row_breaks_it(
    tokenizer: Any, template: str, reason: str
) -> None:
    tokenizer.chat_template = template
    for only in (False, True):
        assert reason in learned(tokenizer, "messages", only, messages=TURNS)


def test_a_tokenizer_without_a_template_is_refused_for_chats_alone(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(RowsError, match="has no chat template, which these texts need"):
        Encoder(tokenizer, layout_of("messages"), completions_only=False)
    assert encode(tokenizer, "text", [{"text": "a"}], None)


def test_what_cannot_be_tokenized_is_broken(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "CHARACTERS_MAX", 20)
    tokenizer.eos_token = None
    given = [{"text": text} for text in ("ab \ud83d", "x" * 21, "fine")]
    half, long, fine = encode(tokenizer, "text", given, None)
    assert "\\ud83d" in half.reason
    assert "21 characters, of at most 20" in long.reason
    assert isinstance(fine, Tokens)


def test_rows_of_many_batches_keep_their_order(tokenizer: Any) -> None:
    pairs = [{"prompt": TURNS[:2], "completion": TURNS[2:3]}, {"prompt": "a", "completion": "b"}]
    many = [pairs[index % 7 % 2] for index in range(2500)]
    many[1700] = {"prompt": ""}
    found = encode(tokenizer, "prompt-completion", many, None)
    alone = [encode(tokenizer, "prompt-completion", [pair], None)[0] for pair in pairs]
    for index, row in enumerate(found):
        if index == 1700:
            assert isinstance(row, Broken)
        else:
            assert row.ids.tolist() == alone[index % 7 % 2].ids.tolist()
            assert row.mask.tolist() == alone[index % 7 % 2].mask.tolist()


def test_a_tokenizer_in_python_does_the_same(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, ByT5Tokenizer

    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path)
    slow = AutoTokenizer.from_pretrained(tmp_path)
    assert not slow.is_fast
    text = learned(slow, "prompt-completion", prompt="Where?", completion=" In the hall.")
    assert text == " In the hall.</s>"
    slow.chat_template = PREFIX
    assert learned(slow, "messages", messages=TURNS[1:3]).rstrip() == "In the kitchen.</s>"


# Pairs


def pair(kind: str, index: int) -> dict[str, Any]:
    asked = [{"role": "user", "content": f"What is {index}?"}]
    told = [[{"role": "assistant", "content": f"It is {index * n}."}] for n in (3, 5 + index)]
    dataset = f"It is {index} ", f"It is {index}, so {index * 5}\n"
    match kind:
        case "texts":
            return {"prompt": f"What is {index}? ", "chosen": dataset[0], "rejected": dataset[1]}
        case "implicit texts":
            return {"chosen": f"What? {dataset[0]}so", "rejected": f"What? {dataset[1]}"}
        case "turns":
            return {"prompt": asked, "chosen": told[0], "rejected": told[1]}
        case _:
            return {"chosen": asked + told[0], "rejected": asked + told[1]}


@pytest.mark.parametrize("kind", ["texts", "implicit texts", "turns", "implicit turns"])
@pytest.mark.filterwarnings("ignore")
def test_pairs_are_trls(tokenizer: Any, kind: str) -> None:
    from datasets import Dataset

    given = [pair(kind, index) for index in range(1, 9)]
    found = []
    for both in encode(tokenizer, "preference", given, None):
        found += labels_of(both.members)
    assert found == preference_rows(tokenizer, Dataset.from_list(given))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"chosen": "yes"}, "rejected is missing"),
        ({"prompt": "?", "chosen": "yes", "rejected": "yes"}, "chosen and rejected are the same"),
        (
            {"prompt": "?", "chosen": "yes", "rejected": [TURNS[2]]},
            "chosen must be a list of turns",
        ),
        (
            {"prompt": "?", "chosen": TURNS[1:3], "rejected": TURNS[1:2] + TURNS[4:]},
            "begin with it",
        ),
        ({"chosen": TURNS[2:3], "rejected": TURNS[4:]}, "no turn in common"),
    ],
    ids=str,
)
def test_a_pair_that_teaches_nothing_is_broken(
    tokenizer: Any, row: dict[str, Any], reason: str
) -> None:
    (broken,) = encode(tokenizer, "preference", [row], None)
    assert isinstance(broken, Broken)
    assert reason in broken.reason
