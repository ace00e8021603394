"""The rows of a dataset as tokens: rendered, tokenized, and with loss where it belongs.

    rows, broken, notes = tokenized("dataset.jsonl", tokenizer)

An `Encoder` makes tokens of rows, and `encoded` reads and encodes at once. transformers, datasets
and TRL are imported where they are needed.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qlora_sweep.sweep.data.collation import INPUT, MASK
from qlora_sweep.sweep.data.files import Broken, DatasetSource, Place, Read, RowsError, is_nothing
from qlora_sweep.sweep.data.kinds import (
    CHATS,
    LOSS_KEYS,
    PREFERENCE,
    Example,
    ReadingOptions,
    RowLayout,
    all_broken,
    common_length,
    example_of,
    first_rows,
    names_shown,
    on_completions,
    pair_of,
    turns_in,
)

CHARACTERS_MAX = 8_000_000
"""Of a row, for which a tokenizer takes a gigabyte and more."""
_MARKS = re.compile(r"\{\%-?\s*generation\s*-?%\}")
_ALL_SILENT = "every turn of the assistant is said to carry no loss"
_UNTOLD = "the chat template renders the assistant's turns so that they cannot be told apart"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A row as text, and where its loss is: everywhere, behind a prompt, or in some spans."""

    text: str
    example: Example
    """What the row was read as."""
    prompt: str | None = None
    """The tokens that the whole text has in common with it carry no loss."""
    spans: list[tuple[int, int]] | None = None
    """Of the characters that alone carry loss, in order."""
    is_templated: bool = False
    """Whether it went through a chat template, which brings the special tokens."""
    rejected: Rendered | None = None
    """Of a pair, what was rejected."""

    def carries(self, character: int) -> bool:
        """Return whether a character carries loss."""
        if self.spans is not None:
            return any(begin <= character < end for begin, end in self.spans)
        return self.prompt is None or character >= common_length(self.prompt, self.text)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A row's tokens."""

    ids: NDArray[np.int32]
    mask: NDArray[np.int8]
    """1 where a token carries loss."""
    rejected: Tokens | None = None
    """Of a pair, what was rejected."""

    @property
    def members(self) -> tuple[Tokens, ...]:
        """The row, and of a pair both."""
        if self.rejected is None:
            return (self,)
        return (self, self.rejected)

    @property
    def differs_from(self) -> int:
        """Of a pair, the first token in which one differs from the other."""
        assert self.rejected is not None
        return common_length(self.ids, self.rejected.ids)

    @property
    def loss_count(self) -> int:
        """Tokens that carry loss: never the first, which no token predicts."""
        return int(self.mask[1:].sum())


class Encoder:
    """Makes tokens of rows, as TRL's SFT trainer does.

    Chats go through the tokenizer's template, and have their special tokens from it. Other rows
    begin as the tokenizer begins them, and end with the end-of-sequence token. With loss on
    completions alone, that is on what TRL's completion mask and assistant mask have: a completion
    from where the tokens of its prompt end, of a chat the assistant's turns. Turns of the
    assistant's that say so (`LOSS_KEYS`) carry none in either case.

    Args:
        tokenizer: of transformers.
        layout: how rows are read.
        completions_only: whether loss is on completions and the assistant's turns alone.

    Raises:
        RowsError: rows are chats, and the tokenizer has no template for them.
    """

    def __init__(self, tokenizer: Any, layout: RowLayout, *, completions_only: bool) -> None:
        self._tokenizer = tokenizer
        self._layout = layout
        self._completions_only = completions_only
        are_chats = not layout.columns.keys().isdisjoint(CHATS)
        self._is_marking = completions_only and are_chats
        self._templates: dict[bool, str] = {}
        self._end: int | None = tokenizer.eos_token_id
        self._special = dict(tokenizer.special_tokens_map)
        self._fast: Any = None
        if tokenizer.is_fast:
            self._fast = tokenizer.backend_tokenizer
            self._fast.no_truncation()
            self._fast.no_padding()
        if are_chats:
            self._template(has_tools=False)
        self._unread = _Unread(layout, completions_only=completions_only)

    @property
    def silenced(self) -> int:
        """Rows so far with turns of the assistant's that are said to carry no loss."""
        return self._unread.silenced

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of the rows so far: what they say and nothing reads."""
        return self._unread.notes()

    @property
    def unmarked_template(self) -> str | None:
        """The template of chats whose turns are told apart by comparing, as neither it nor TRL
        marks them; None where turns are marked, or all of a row carries loss."""
        if not self._is_marking:
            return None
        template = self._template(has_tools=False)
        if _MARKS.search(template):
            return None
        return template

    def rendered(self, fields: Mapping[str, Any]) -> Rendered:
        """Return a row as text. Raises Broken."""
        if self._layout.kind == PREFERENCE:
            chosen, rejected = map(self._rendered, pair_of(fields, self._layout))
            row = replace(chosen, rejected=rejected)
        else:
            row = self._rendered(example_of(fields, self._layout))
        self._unread.see(fields, row)
        return row

    def _rendered(self, example: Example) -> Rendered:
        if isinstance(example.completion, str):
            assert isinstance(example.prompt, str)
            rendered = Rendered(example.prompt + example.completion, example)
            if self._completions_only:
                rendered = replace(rendered, prompt=example.prompt)
        else:
            rendered = self._of_chat(example)
        text = rendered.text
        if len(text) > CHARACTERS_MAX:
            most = f"at most {CHARACTERS_MAX:,}"
            raise Broken(f"{len(text):,} characters, of {most}: split it into rows")
        try:
            text.isascii() or text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise Broken(f"holds {half!r}, half of a surrogate pair, which is no text") from None
        return rendered

    def tokens(self, rows: Sequence[Rendered]) -> list[Tokens]:
        """Return the tokens of each row."""
        if self._layout.kind == PREFERENCE:
            chosen = self._all_tokens(rows)
            rejected = self._all_tokens([row.rejected for row in rows if row.rejected])
            return list(map(_paired, chosen, rejected))
        return self._all_tokens(rows)

    def _all_tokens(self, rows: Sequence[Rendered]) -> list[Tokens]:
        templated = iter(self._tokens([row for row in rows if row.is_templated], adds=False))
        others = iter(self._tokens([row for row in rows if not row.is_templated], adds=True))
        in_order = []
        for row in rows:
            if row.is_templated:
                in_order.append(next(templated))
            else:
                in_order.append(next(others))
        return in_order

    # Chats

    def _of_chat(self, example: Example) -> Rendered:
        assert isinstance(example.prompt, list)
        assert isinstance(example.completion, list)
        prompt = example.prompt
        said = prompt + example.completion
        turns = _without(said, set(LOSS_KEYS))
        silent = {index for index, turn in enumerate(said) if _is_silent(turn)}
        silent -= set(range(len(prompt)))
        if silent and (prompt or self._layout.kind == PREFERENCE):
            key = next(key for key in LOSS_KEYS if said[min(silent)].get(key, 1) == 0)
            raise Broken(f"turn {min(silent) + 1}: {key} is false, which is heeded in chats alone")
        template = self._template(has_tools=example.tools is not None)

        settings = self._special | example.options

        def render_marked(
            turns: Sequence[Any], *, tools: list[Any] | None = example.tools, **options: Any
        ) -> tuple[str, list[tuple[int, int]] | None]:
            from transformers.utils.chat_template_utils import render_jinja_template

            texts, marked = render_jinja_template(
                conversations=[turns], tools=tools, chat_template=template, **options, **settings
            )
            if not marked:
                return texts[0], None
            return texts[0], marked[0]

        def render(turns: Sequence[Any], **options: Any) -> str:
            return render_marked(turns, **options)[0]

        spans: list[tuple[int, int]] | None = None
        before: str | None = None
        try:
            is_noted = not prompt and (self._completions_only or bool(silent))
            if is_noted and _MARKS.search(template):
                text, spans = render_marked(turns, return_assistant_tokens_mask=True)
            else:
                text = render(turns)
            _check_said(turns, text)
            if is_noted and spans is None:
                spans = _spans_by_comparing(turns, text, render)
            elif self._layout.kind == PREFERENCE:
                before = render(prompt, add_generation_prompt=True)
            elif self._completions_only and prompt:
                before = _prompt(turns, len(prompt), text, render)
            self._unread.see_keys(turns, text, render, has_tools=example.tools is not None)
        except Broken:
            raise
        except Exception as error:
            # A template is code that was written for other rows.
            from jinja2 import TemplateError

            verb = "fails"
            if isinstance(error, TemplateError):
                verb = "refuses it"
            raise Broken(f"the chat template {verb}: {error}") from error
        if spans is not None and self._completions_only:
            spans = _without_silent(spans, turns, silent)
        elif spans is not None:
            if silent == _answers(turns):
                raise Broken(_ALL_SILENT)
            spans = _all_but(_without_silent(spans, turns, _answers(turns) - silent), len(text))
        return Rendered(text, example, before, spans, is_templated=True)

    def _template(self, *, has_tools: bool) -> str:
        """Return the chat template, of chats with loss on the assistant's turns alone one that
        marks these: the tokenizer's own, or TRL's for it."""
        if has_tools not in self._templates:
            tools: list[Any] | None = None
            if has_tools:
                tools = [{}]
            try:
                own = self._tokenizer.get_chat_template(tools=tools)
            except ValueError as error:
                name = self._tokenizer.name_or_path
                raise RowsError(
                    f"the tokenizer of '{name}' has no chat template, which these texts need: name "
                    "one that has with --set data.tokenizer=NAME (an instruct model's, say)"
                ) from error
            if self._is_marking and not _MARKS.search(own):
                from trl.chat_template_utils import get_training_chat_template

                # It has none for this template, or this one fails on what it tries.
                with suppress(Exception):
                    own = get_training_chat_template(self._tokenizer) or own
            self._templates[has_tools] = own
        return self._templates[has_tools]

    # Tokens

    def _tokens(self, rows: Sequence[Rendered], *, adds: bool) -> list[Tokens]:
        prompts = iter(self._ids([row.prompt for row in rows if row.prompt is not None], adds))
        texts = [row.text for row in rows]
        encodings: list[Any] = []
        if self._fast is not None and any(row.spans is not None for row in rows):
            encodings = self._fast.encode_batch(texts, add_special_tokens=adds)
            whole = _ids_of(encodings)
        else:
            whole = self._ids(texts, adds)
        tokens = []
        for index, (row, ids) in enumerate(zip(rows, whole, strict=True)):
            if row.spans is None:
                mask = np.ones(len(ids), np.int8)
            elif encodings:
                mask = _mask_of(row.text, row.spans, encodings[index])
            else:
                mask = self._slow_mask(row.text, row.spans, ids, adds)
            if row.prompt is not None:
                mask[: common_length(next(prompts), ids)] = 0
            if adds and self._end is not None and (not len(ids) or ids[-1] != self._end):
                ids = np.append(ids, np.int32(self._end))
                mask = np.append(mask, np.int8(1))
            tokens.append(Tokens(ids, mask))
        return tokens

    def _ids(self, texts: Sequence[str], adds: bool) -> list[NDArray[np.int32]]:
        if self._fast is not None:
            return _ids_of(self._fast.encode_batch_fast(list(texts), add_special_tokens=adds))
        ids = []
        for text in texts:
            encoding = self._tokenizer(text, add_special_tokens=adds, verbose=False)
            ids.append(np.asarray(encoding["input_ids"], np.int32))
        return ids

    def _slow_mask(
        self, text: str, spans: list[tuple[int, int]], ids: NDArray[np.int32], adds: bool
    ) -> NDArray[np.int8]:
        """Return the mask of a row by a tokenizer in Python, which does not map characters to
        tokens."""
        mask = np.zeros(len(ids), np.int8)
        for begin, end in spans:
            ids_before, ids_through = self._ids([text[:begin], text[:end]], adds)
            stop = len(ids)
            if end < len(text):
                stop = common_length(ids_through, ids)
            mask[common_length(ids_before, ids) : stop] = 1
        return mask


def _ids_of(encodings: Iterable[Any]) -> list[NDArray[np.int32]]:
    return [np.asarray(encoding.ids, np.int32) for encoding in encodings]


def _paired(chosen: Tokens, rejected: Tokens) -> Tokens:
    """Return a pair whose completions begin at the same token: the first that either has."""
    begin = min(int(chosen.mask.argmax()), int(rejected.mask.argmax()))
    chosen.mask[begin:] = 1
    rejected.mask[begin:] = 1
    return replace(chosen, rejected=rejected)


def _mask_of(text: str, spans: list[tuple[int, int]], encoding: Any) -> NDArray[np.int8]:
    """Return 1 for the tokens of a text's spans; one that lies across an edge belongs to it."""

    def token_at(character: int) -> int:
        # Some characters belong to no token, such as blanks that a tokenizer trims.
        for at in range(character, min(len(text), character + 64)):
            token = encoding.char_to_token(at)
            if token is not None:
                return int(token)
        return len(encoding)

    mask = np.zeros(len(encoding), np.int8)
    for begin, end in spans:
        last = encoding.char_to_token(end - 1)
        if last is None:
            stop = token_at(end)
        else:
            stop = last + 1
        mask[token_at(begin) : stop] = 1
    return mask


def _said(turn: Mapping[str, Any]) -> str:
    return str(turn.get("content") or "").strip()


def _answer(turn: Mapping[str, Any]) -> str:
    """Return what a turn says behind its thoughts."""
    return _said(turn).rpartition("</think>")[2].strip()


def _place(turn: Mapping[str, Any], text: str, first: int) -> tuple[int, int]:
    """Return where a turn's words begin and end, without thoughts that the template leaves out; -1
    and ``first`` where they are not there."""
    places = []
    for words in (_said(turn), _answer(turn)):
        begin = text.find(words, first)
        if words and begin >= 0:
            places.append((begin, begin + len(words)))
    # A later turn may say the same with its thoughts.
    return min(places, default=(-1, first))


def _check_said(turns: Sequence[Mapping[str, Any]], text: str) -> None:
    """Refuse a template that leaves out what is said; thoughts before an answer it may."""
    for number, turn in enumerate(turns, start=1):
        is_said = turn["role"] in ("user", "assistant") and not turn.get("tool_calls")
        if is_said and _answer(turn)[-32:] not in text:
            raise Broken(f"the chat template leaves out what turn {number} says")


def _prompt(
    turns: Sequence[Any], count: int, text: str, render: Callable[..., Any], *, clips: bool = False
) -> str:
    """Return what a turn's prompt is: the turns before it, with what prompts for it.

    Where a template prompts for a turn otherwise than it renders one, what both have in common is
    the prompt's; ``clips`` cuts it there.
    """
    if count:
        prompted: str = render(turns[:count], add_generation_prompt=True)
        if text.startswith(prompted):
            return prompted
        if text.startswith(render(turns[:count])):
            if clips:
                return prompted[: common_length(prompted, text)]
            return prompted
    # Some templates tell the turns before otherwise once this one follows. Its own words are looked
    # for, one turn after another, as an answer may repeat what was asked.
    begin = -1
    end = 0
    for turn in turns[: count + 1]:
        begin, end = _place(turn, text, end)
    if begin < 0:
        raise Broken(_UNTOLD)
    return text[:begin]


def _spans_by_comparing(
    turns: Sequence[Any], text: str, render: Callable[..., Any]
) -> list[tuple[int, int]]:
    """Return the assistant's turns by what a template without marks makes of the turns up to each,
    with what it closes them by."""
    spans = []
    for index, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        begin = len(_prompt(turns, index, text, render, clips=True))
        through = text
        if index + 1 < len(turns):
            through = render(turns[: index + 1])
        end = len(through)
        if not text.startswith(through):
            # Some leave an earlier turn's thoughts out: then its own words are looked for.
            found, end = _place(turn, text, begin)
            if found < 0:
                raise Broken(_UNTOLD)
            words = text[found:end]
            closing = through[through.rfind(words) + len(words) :]
            end += common_length(closing, text[end:])
        spans.append((begin, end))
    return spans


def _is_silent(turn: Mapping[str, Any]) -> bool:
    """Return whether a turn of the assistant's says that it carries no loss."""
    return turn["role"] == "assistant" and any(turn.get(key, 1) == 0 for key in LOSS_KEYS)


def _answers(turns: Sequence[Mapping[str, Any]]) -> set[int]:
    return {index for index, turn in enumerate(turns) if turn["role"] == "assistant"}


def _without_silent(
    spans: list[tuple[int, int]], turns: Sequence[Any], silent: set[int]
) -> list[tuple[int, int]]:
    """Return the spans that hold something, without those of turns that carry no loss."""
    answers = sorted(_answers(turns))
    if silent & set(answers):
        if len(spans) != len(answers):
            raise Broken(f"{_UNTOLD}, so that none can be without loss")
        spans = [spans[n] for n, index in enumerate(answers) if index not in silent]
        if not spans:
            raise Broken(_ALL_SILENT)
    spans = [(int(begin), int(end)) for begin, end in spans if begin < end]
    if not spans:
        raise Broken(_UNTOLD)
    return spans


def _all_but(spans: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """Return what is between some spans of a text."""
    between = []
    last_end = 0
    for begin, end in spans:
        if last_end < begin:
            between.append((last_end, begin))
        last_end = end
    if last_end < length:
        between.append((last_end, length))
    return between


# What rows say and is not read

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of turns in which datasets keep thoughts."""
_THINKING = re.compile(r"<think>(.*?)</think>", re.S)
_EMPTY_THOUGHTS = re.compile(
    r"[<\[]([\w:|]{0,20}(?:think|thought|reason)\w{0,20})[>\]]\s*[<\[]/\1[>\]]", re.IGNORECASE
)
_TRIED_MAX = 100
"""Rows that are rendered without a key of their turns, to see whether it is read."""
_NOTES = {
    "thoughts": "the chat template leaves thoughts out of what is supervised, in {count}",
    "empty thoughts": (
        "the chat template adds an empty <think></think>, or its like, that is supervised, in "
        "{count}: to answer without thoughts is learned"
    ),
    "JSON": (
        "turns that are written as JSON are trained on as text, as in TRL, in {count}: write them "
        "as lists"
    ),
}
"""Of examples of which something is to be told."""


class _Unread:
    """What rows say and is not read, and what a chat template makes of thoughts."""

    def __init__(self, layout: RowLayout, *, completions_only: bool) -> None:
        self._layout = layout
        self._completions_only = completions_only
        self._rows = 0
        self._tries: Counter[str] = Counter()
        self._tools_tried = 0
        self._reads_tools = False
        self._columns: dict[str, None] = {}
        """Those that hold something and are not read, in the order in which they were seen."""
        self._keys: dict[str, bool] = {}
        """Of turns, and whether the template reads each."""
        self._counts: Counter[str] = Counter()
        """Rows of which something is to be told."""

    def see(self, fields: Mapping[str, Any], row: Rendered) -> None:
        """Take a row in, with what it was read and rendered as."""
        self._rows += 1
        read = set(self._layout.columns.values())
        if isinstance(row.example.completion, str):
            for name in ("tools", "chat_template_kwargs"):
                read.discard(self._layout.columns.get(name, name))
        for column, value in fields.items():
            if column not in read and not is_nothing(value):
                self._columns[column] = None
        found = set(self._of_example(row))
        if row.rejected is not None:
            found.update(self._of_example(row.rejected))
        self._counts.update(found)

    def _of_example(self, rendered: Rendered) -> Iterator[str]:
        """Yield what is to be told of an example."""
        prompt: Any = rendered.example.prompt
        completion: Any = rendered.example.completion
        if isinstance(completion, str):
            if self._layout.kind != "text" and turns_in(completion):
                yield "JSON"
            return
        text = rendered.text
        written = ""
        for turn in prompt + completion:
            written += f"\n{turn.get('content')}"
            for key in LOSS_KEYS:
                is_other = turn["role"] != "assistant" and key in turn
                if is_other and bool(turn[key]) == self._completions_only:
                    self._keys[f"{key} (of {turn['role']})"] = False
        for turn in completion:
            if _is_silent(turn):
                yield "silent"
            elif turn["role"] == "assistant":
                is_left_out = False
                thoughts = _THINKING.findall(str(turn.get("content")))
                for key in _THOUGHTS:
                    if key in turn and self._keys.get(key) is False:
                        is_left_out = True
                    if isinstance(turn.get(key), str):
                        thoughts.append(turn[key])
                for thought in thoughts:
                    place = text.rfind(thought.strip()[-32:])
                    if place < 0 or not rendered.carries(place):
                        is_left_out = True
                if is_left_out:
                    yield "thoughts"
        found = _EMPTY_THOUGHTS.finditer(text)
        empty = [thoughts for thoughts in found if rendered.carries(thoughts.end() - 1)]
        # Those that the row has itself are not the template's.
        if empty and len(empty) > len(_EMPTY_THOUGHTS.findall(written)):
            yield "empty thoughts"

    def see_keys(
        self, turns: Sequence[Any], text: str, render: Callable[..., Any], *, has_tools: bool
    ) -> None:
        """See which keys of turns their template reads, and whether it does tools: what it renders
        without them differs."""

        def is_read(turns: Sequence[Any], **options: Any) -> bool:
            try:
                return bool(render(turns, **options) != text)
            except Exception:  # noqa: BLE001 - a template's code, which needs what is left out
                return True

        if has_tools and not self._reads_tools and self._tools_tried < _TRIED_MAX:
            self._tools_tried += 1
            self._reads_tools = is_read(turns, tools=None)
        keys = set[str]().union(*turns) - {"role", "content"}
        keys = {key for key in keys if not self._keys.get(key) and self._tries[key] < _TRIED_MAX}
        self._tries.update(keys)
        if not keys or not is_read(_without(turns, keys)):
            self._keys |= dict.fromkeys(keys, False)
            return
        for key in keys:
            self._keys[key] = is_read(_without(turns, {key}))

    @property
    def silenced(self) -> int:
        """Rows with turns of the assistant's that are said to carry no loss."""
        return self._counts["silent"]

    def notes(self) -> tuple[str, ...]:
        """Return what of that a person should know."""
        keys = [key for key, is_read in self._keys.items() if not is_read]
        columns = list(self._columns)
        if self._tools_tried and not self._reads_tools:
            columns.append("tools (by the chat template)")
        unread = []
        if columns:
            unread.append(f"columns not read: {names_shown(columns)}")
        if keys:
            unread.append(f"keys of turns not read: {names_shown(keys)}")
        notes = []
        if unread:
            notes.append("; ".join(unread))
        for key, note in _NOTES.items():
            if self._counts[key]:
                count = f"{self._counts[key]:,} of {self._rows:,} examples"
                notes.append(note.format(count=count))
        return tuple(notes)


def _without(turns: Sequence[Mapping[str, Any]], keys: set[str]) -> list[dict[str, Any]]:
    kept = []
    for turn in turns:
        kept.append({key: value for key, value in turn.items() if key not in keys})
    return kept


# Read and encoded


def encoded(rows: Iterable[Read], encoder: Encoder) -> Iterator[tuple[Place, Tokens | Broken]]:
    """Yield each row as tokens that carry loss, or why it is left out.

    Some thousand rows are read and rendered ahead: tokenizers let go of Python's lock, so one
    thread is enough to have both going.
    """
    ahead: deque[Future[list[tuple[Place, Tokens | Broken]]]] = deque()
    with ThreadPoolExecutor(max_workers=1) as thread:
        for batch in _batches(rows, encoder):
            ahead.append(thread.submit(_tokens_of, batch, encoder))
            if len(ahead) > 2:
                yield from ahead.popleft().result()
        for left in ahead:
            yield from left.result()


def _batches(
    rows: Iterable[Read], encoder: Encoder
) -> Iterator[list[tuple[Place, Rendered | Broken]]]:
    """Yield rows as texts, a thousand or two million characters at a time."""
    batch: list[tuple[Place, Rendered | Broken]] = []
    characters = 0
    for place, fields in rows:
        if isinstance(fields, Broken):
            batch.append((place, fields))
        else:
            try:
                row = encoder.rendered(fields)
            except Broken as broken:
                batch.append((place, broken))
            else:
                batch.append((place, row))
                characters += len(row.text)
        if len(batch) >= 1000 or characters >= 2_000_000:
            yield batch
            batch = []
            characters = 0
    yield batch


def _tokens_of(
    batch: list[tuple[Place, Rendered | Broken]], encoder: Encoder
) -> list[tuple[Place, Tokens | Broken]]:
    tokens = iter(encoder.tokens([row for _, row in batch if isinstance(row, Rendered)]))
    made: list[tuple[Place, Tokens | Broken]] = []
    for place, row in batch:
        if isinstance(row, Broken):
            made.append((place, row))
        else:
            made.append((place, _unless_empty(next(tokens))))
    return made


def _unless_empty(row: Tokens) -> Tokens | Broken:
    """Return a row, or why there is nothing to learn from its tokens."""
    if not all(member.loss_count for member in row.members):
        return Broken("no token of it carries loss")
    if row.rejected is not None and np.array_equal(row.ids, row.rejected.ids):
        return Broken("chosen and rejected are the same tokens")
    return row


def tokenized(
    name: str, tokenizer: Any, asked: ReadingOptions, *, completions_only: bool | None = None
) -> tuple[Any, list[tuple[Place, Broken]], tuple[str, ...]]:
    """Return a dataset's rows as tokens, with the columns `INPUT` and `MASK`, its broken rows, and
    what a person should know of it; a pair as two rows, where ``preference`` is asked for.

    Raises:
        RowsError: the dataset cannot be read, or no row of it can be trained on.
    """
    from datasets import Dataset

    source = DatasetSource(name)
    first, _, layout = first_rows(source, name, asked)
    if layout.kind == PREFERENCE != asked.format:
        raise RowsError(f"{name}: its rows are pairs of completions, and this trains on texts")
    only = on_completions(layout.kind, completions_only)
    encoder = Encoder(tokenizer, layout, completions_only=only)
    columns: dict[str, list[Any]] = {INPUT: [], MASK: []}
    broken: list[tuple[Place, Broken]] = []
    for place, row in encoded(chain(first, source), encoder):
        if isinstance(row, Broken):
            broken.append((place, row))
            continue
        for member in row.members:
            columns[INPUT].append(member.ids)
            columns[MASK].append(member.mask)
    if not columns[INPUT]:
        raise RowsError(all_broken(*broken[0], len(broken), name))
    return Dataset.from_dict(columns), broken, source.notes + layout.notes + encoder.notes
