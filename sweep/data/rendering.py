"""A row as the text that is tokenized, and which characters of it carry loss.

Chats go through the tokenizer's chat template, as transformers renders it. Runs in the texts'
child, with transformers and without torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from search_spaces.errors import InputError, words_of
from sweep.data.kinds import Broken, Chat, Pair, Row, Text

Spans = tuple[tuple[int, int], ...]
_MARKS = re.compile(r"\{\%-?\s*generation\s*-?\%\}")
_UNTOLD = "the chat template renders the assistant's turns so that they cannot be told apart"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A row as text."""

    text: str
    spans: Spans | None
    """Of the characters that carry loss, in order; None where all do."""
    is_templated: bool
    """Whether it went through a chat template, which brings the special tokens."""


class ChatTemplate:
    """A tokenizer's chat template.

    Args:
        tokenizer: of the model.
        name: what the person calls it.
        completions_only: whether the assistant's turns are to be told from the rest.

    Raises:
        InputError: the tokenizer has no chat template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, name: str, completions_only: bool
    ) -> None:
        try:
            self._template = tokenizer.get_chat_template()
        except ValueError as error:
            raise InputError(
                f"the tokenizer of '{name}' has no chat template, which these texts need: name "
                "one that has with --set data.tokenizer=NAME (an instruct model's, say)"
            ) from error
        if completions_only:
            self._template = _with_marks(tokenizer) or self._template
        self._has_marks = completions_only and _MARKS.search(self._template) is not None
        self._special = dict(tokenizer.special_tokens_map)

    def render(self, chat: Chat, *, completions_only: bool) -> Rendered | Broken:
        """Return a chat as text, or why the template refuses it."""
        try:
            if not completions_only:
                return Rendered(self._text(chat, chat.messages), None, True)
            return self._with_spans(chat)
        except TemplateError as error:
            return Broken(f"the chat template refuses it: {words_of(error)}")
        except Exception as error:  # noqa: BLE001 - code of somebody's, written for rows of theirs
            return Broken(f"the chat template fails: {words_of(error)}")

    def _text(self, chat: Chat, messages: list[Any], *, prompts: bool = False) -> str:
        rendered, _ = self._rendered(chat, messages, add_generation_prompt=prompts)
        return str(rendered[0])

    def _rendered(self, chat: Chat, messages: list[Any], **options: Any) -> Any:
        return render_jinja_template(
            conversations=[messages],
            tools=chat.tools,
            chat_template=self._template,
            **options,
            **{**self._special, **chat.options},
        )

    def _with_spans(self, chat: Chat) -> Rendered | Broken:
        if self._has_marks:
            texts, marked = self._rendered(chat, chat.messages, return_assistant_tokens_mask=True)
            text, found = texts[0], [(int(begin), int(end)) for begin, end in marked[0]]
            begun = self._begin(chat, text, chat.prompt_turns) if chat.prompt_turns else 0
            spans = tuple(span for span in found if span[0] >= (begun or 0))
        else:
            text = self._text(chat, chat.messages)
            spans = tuple(self._told_spans(chat, text))
        is_told = bool(spans) and all(begin < end for begin, end in spans)
        return Rendered(text, spans, True) if is_told else Broken(_UNTOLD)

    def _told_spans(self, chat: Chat, text: str) -> list[tuple[int, int]]:
        """Return the assistant's turns by what the template makes of the turns up to each."""
        spans: list[tuple[int, int]] = []
        for index, message in enumerate(chat.messages):
            if message["role"] != "assistant" or index < chat.prompt_turns:
                continue
            begin = self._begin(chat, text, index)
            end = None if begin is None else self._end(chat, text, index, begin)
            if begin is None or end is None:
                return []
            spans.append((begin, end))
        return spans

    def _begin(self, chat: Chat, text: str, index: int) -> int | None:
        """Return where in the whole text a turn begins, behind what prompts for it."""
        for prompts in (True, False):
            before = self._text(chat, chat.messages[:index], prompts=prompts) if index else ""
            if text.startswith(before):
                return len(before)
        return _own_words(chat, text, index)

    def _end(self, chat: Chat, text: str, index: int, begin: int) -> int | None:
        """Return where a turn ends, with what the template closes it by."""
        is_last = index + 1 == len(chat.messages)
        through = text if is_last else self._text(chat, chat.messages[: index + 1])
        if text.startswith(through):
            return len(through)
        # Some templates leave an earlier turn's thoughts out: then its own words are looked for.
        content = str(chat.messages[index].get("content") or "").strip()
        found = text.find(content, begin)
        if not content or found < 0:
            return None
        end = found + len(content)
        closing = through[through.rfind(content) + len(content) :]
        return end + _common_length(closing, text[end:])


def _own_words(chat: Chat, text: str, index: int) -> int | None:
    """Return where a turn's own words begin, for templates that tell the turns before it otherwise
    once it follows; None where they are not in the text.

    Words are looked for one turn after another, as an answer may repeat what was asked.
    """
    found, end = -1, 0
    for message in chat.messages[: index + 1]:
        content = str(message.get("content") or "").strip()
        found = text.find(content, end) if content else -1
        if found >= 0:
            end = found + len(content)
    return found if found >= 0 else None


def _with_marks(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the template that TRL trains with where it marks the turns and the model's own does
    not; None where TRL has none for it."""
    from trl.chat_template_utils import get_training_chat_template

    try:
        return get_training_chat_template(tokenizer)
    except (ValueError, TypeError, TemplateError, AttributeError, KeyError):
        return None


def _common_length(left: str, right: str) -> int:
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def renderer(
    tokenizer: PreTrainedTokenizerBase, *, name: str, is_chat: bool, completions_only: bool
) -> Callable[[Row], Rendered | Broken]:
    """Return what renders rows.

    Raises:
        InputError: they are chats, and the tokenizer has no template for them.
    """
    template: ChatTemplate | None = None
    if is_chat:
        template = ChatTemplate(tokenizer, name=name, completions_only=completions_only)

    def render(row: Row) -> Rendered | Broken:
        nonlocal template
        match row:
            case Text(text):
                return Rendered(text, None, False)
            case Pair(prompt, completion):
                text = prompt + completion
                spans = ((len(prompt), len(text)),) if completions_only else None
                return Rendered(text, spans, False)
            case Chat():
                if template is None:
                    # Prompts and completions may be turns, too.
                    template = ChatTemplate(tokenizer, name=name, completions_only=completions_only)
                return template.render(row, completions_only=completions_only)

    return render
