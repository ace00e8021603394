"""Rows become tokens as TRL and transformers make them, with loss where it belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast
from trl.data_utils import common_prefix_length

from search_spaces.errors import InputError
from search_spaces.models import load_model_spec
from sweep.data.kinds import Broken, Chat, Pair, Row, Text
from sweep.data.rendering import Rendered, renderer
from sweep.data.tokenizing import Tokenizing, Tokens, load_tokenizer

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
REFUSING = "{{ raise_exception('Roles must alternate') }}"


def the_demos() -> PreTrainedTokenizerFast:
    directory = load_model_spec("demo").tokenizer_path
    assert directory is not None
    return load_tokenizer(directory, name="demo")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return the_demos()


def rendered(tokenizer: Any, row: Row, *, completions_only: bool = False) -> Rendered | Broken:
    is_chat = isinstance(row, Chat)
    render = renderer(tokenizer, name="demo", is_chat=is_chat, completions_only=completions_only)
    return render(row)


def tokens_of(tokenizer: Any, row: Row, *, completions_only: bool = False) -> Tokens:
    result = rendered(tokenizer, row, completions_only=completions_only)
    assert isinstance(result, Rendered), result
    (tokens,) = Tokenizing(tokenizer)([result])
    return tokens


def learned(tokenizer: Any, row: Row) -> str:
    """Return the text of the tokens that carry loss, with completions alone."""
    tokens = tokens_of(tokenizer, row, completions_only=True)
    return str(tokenizer.decode(tokens.ids[tokens.mask == 1]))


def test_a_text_ends_with_the_end_of_its_sequence(tokenizer: Any) -> None:
    tokens = tokens_of(tokenizer, Text("the kettle"))
    assert tokens.ids.tolist() == tokenizer("the kettle</s>")["input_ids"]
    assert tokens_of(tokenizer, Text("the kettle</s>")).ids.tolist() == tokens.ids.tolist()
    assert tokens.loss is None
    # Nothing comes before the first, from which it could be predicted.
    assert tokens.loss_count == len(tokens.ids) - 1


def test_a_completion_is_learned_up_to_the_end_of_its_sequence(tokenizer: Any) -> None:
    assert learned(tokenizer, Pair("Where is it?", " In the hall.")) == " In the hall.</s>"
    assert learned(tokenizer, Pair("Answer:\n", "\N{HOURGLASS}")) == "\N{HOURGLASS}</s>"


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("the ket", "tle"), ("In ", "the hall"), ("a\n", "\nb"), ("2 + 2 =", " 4"), ("x", "\u0301y")],
)
def test_completions_begin_where_trl_has_them_begin(
    tokenizer: Any, prompt: str, completion: str
) -> None:
    tokens = tokens_of(tokenizer, Pair(prompt, completion), completions_only=True)
    whole = tokenizer(prompt + completion + "</s>")["input_ids"]
    begin = common_prefix_length(tokenizer(prompt)["input_ids"], whole)
    assert tokens.ids.tolist() == whole
    assert tokens.mask.tolist() == [0] * begin + [1] * (len(whole) - begin)


def test_a_chat_is_what_transformers_makes_of_it(tokenizer: Any) -> None:
    theirs = tokenizer.apply_chat_template(
        TURNS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens = tokens_of(tokenizer, Chat(TURNS), completions_only=True)
    assert tokens.ids.tolist() == theirs["input_ids"]
    assert tokens.mask.tolist() == theirs["assistant_masks"]
    assert tokens_of(tokenizer, Chat(TURNS)).ids.tolist() == theirs["input_ids"]


@pytest.mark.parametrize("template", [PREFIX, FORGETFUL])
def test_turns_are_told_apart_where_the_template_marks_none(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    thought = "(thought)" if template is FORGETFUL else ""
    expected = f"In the kitchen.</s>\n{thought}It is in the hall: \N{HOURGLASS}</s>\n"
    assert learned(tokenizer, Chat(TURNS)) == expected


def test_turns_are_found_by_their_words_where_what_is_before_them_changes(tokenizer: Any) -> None:
    # As Mistral's: the system's words stand in the last turn where that is the user's.
    tokenizer.chat_template = (
        "{% for m in messages[1:] %}{% if m['role'] == 'user' %}[INST] "
        "{% if loop.last %}{{ messages[0]['content'] }} {% endif %}{{ m['content'] }}[/INST]"
        "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
    )
    chat = [TURNS[0], {"role": "user", "content": "Yes or no?"}, TURNS[2] | {"content": "no"}]
    assert learned(tokenizer, Chat(chat)).strip() == "no</s>"
    assert (
        tokenizer.decode(tokens_of(tokenizer, Chat(chat)).ids) == "[INST] Yes or no?[/INST] no</s>"
    )


def test_of_a_prompt_in_turns_nothing_is_learned(tokenizer: Any) -> None:
    chat = Chat(TURNS, prompt_turns=4)
    assert learned(tokenizer, chat) == "It is in the hall: \N{HOURGLASS}</s>"
    tokenizer.chat_template = PREFIX
    assert learned(tokenizer, chat) == "It is in the hall: \N{HOURGLASS}</s>\n"


def test_a_template_that_trl_knows_is_trained_with_trls_marks(tokenizer: Any) -> None:
    from trl.chat_template_utils import qwen2_5_chat_template

    tokenizer.chat_template = qwen2_5_chat_template
    text = learned(tokenizer, Chat(TURNS))
    assert "In the kitchen." in text
    assert "And the clock?" not in text


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (REFUSING, "the chat template refuses it: Roles must alternate"),
        ("{{ messages[99]['content'] + 'x' }}", "the chat template refuses it"),
        ("{{ messages[0]['content'] + 1 }}", "the chat template fails"),
    ],
)
def test_a_template_that_raises_breaks_the_row_and_no_more(
    tokenizer: Any, template: str, reason: str
) -> None:
    tokenizer.chat_template = template
    for completions_only in (False, True):
        result = rendered(tokenizer, Chat(TURNS), completions_only=completions_only)
        assert isinstance(result, Broken)
        assert result.reason.startswith(reason)


def test_turns_that_a_template_leaves_out_cannot_be_told_apart(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages | length }}"
    result = rendered(tokenizer, Chat(TURNS), completions_only=True)
    assert isinstance(result, Broken)
    assert "cannot be told apart" in result.reason


def test_a_tokenizer_without_a_template_is_refused_for_chats_alone(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="'demo' has no chat template, which these texts need"):
        renderer(tokenizer, name="demo", is_chat=True, completions_only=False)
    assert isinstance(rendered(tokenizer, Text("a")), Rendered)


def test_a_batch_of_chats_and_pairs_keeps_its_order(tokenizer: Any) -> None:
    rows: list[Row] = [Pair("a", "b"), Chat(TURNS), Pair("the", " hall"), Chat(TURNS[1:])]
    alone = [tokens_of(tokenizer, row, completions_only=True) for row in rows]
    render = renderer(tokenizer, name="demo", is_chat=True, completions_only=True)
    made = [render(row) for row in rows]
    together = Tokenizing(tokenizer)([row for row in made if isinstance(row, Rendered)])
    for one, same in zip(alone, together, strict=True):
        assert one.ids.tolist() == same.ids.tolist()
        assert one.mask.tolist() == same.mask.tolist()


def test_a_tokenizer_in_python_does_the_same(tmp_path: Path) -> None:
    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path)
    slow = AutoTokenizer.from_pretrained(tmp_path)
    assert not slow.is_fast
    assert learned(slow, Pair("Where?", " In the hall.")) == " In the hall.</s>"
    slow.chat_template = PREFIX
    assert learned(slow, Chat(TURNS[1:3])).rstrip() == "In the kitchen.</s>"
    assert tokens_of(slow, Text("abc")).ids.tolist() == slow("abc")["input_ids"]


def test_long_rows_are_whole_whatever_the_tokenizer_says(tokenizer: Any) -> None:
    tokenizer.model_max_length = 4
    tokenizer.backend_tokenizer.enable_truncation(4)
    assert len(tokens_of(tokenizer, Text("the hall " * 50)).ids) > 50


@pytest.mark.parametrize("text", ["", "{}", "no JSON"])
def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(InputError, match="tokenizer 'mine': transformers cannot read it"):
        load_tokenizer(tmp_path, name="mine")
