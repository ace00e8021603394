"""Texts as tokens, and which of those carry loss.

Fast tokenizers take a batch at a time on all processors. Runs in the texts' child, with
transformers and without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from search_spaces.errors import InputError, words_of
from sweep.data.byte_level import ByteLevel
from sweep.data.rendering import Rendered, Spans

_LOOKED_AHEAD = 64
"""Characters that may belong to no token, such as blanks that a tokenizer trims."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A row's tokens."""

    ids: NDArray[np.int32]
    loss: NDArray[np.int8] | None
    """1 where a token carries loss; None where all do."""

    @property
    def mask(self) -> NDArray[np.int8]:
        """1 where a token carries loss."""
        return np.ones(len(self.ids), np.int8) if self.loss is None else self.loss

    @property
    def loss_count(self) -> int:
        """Tokens that carry loss: never the first, which nothing comes before to predict it."""
        return max(len(self.ids) - 1, 0) if self.loss is None else int(self.loss[1:].sum())


def load_tokenizer(directory: Path, *, name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a directory; code that it may bring is never run.

    Raises:
        InputError: transformers cannot read it.
    """
    try:
        return AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        # Each tokenizer's code, and the tokenizers library, raise errors of their own.
        raise InputError(
            f"tokenizer '{name}': transformers cannot read it: {words_of(error)}"
        ) from error


class Tokenizing:
    """A tokenizer as it is used for training: whole rows, special tokens as the model wants them.

    Rows that have been through a chat template have theirs from it. Others begin as the tokenizer
    begins them, and end with the end-of-sequence token, as TRL's SFT trainer has it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._end: int | None = tokenizer.eos_token_id
        self._fast: Any = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        self._byte_level = None if self._fast is None else ByteLevel.of(self._fast)

    def __call__(self, rows: Sequence[Rendered]) -> list[Tokens]:
        """Return the tokens of each row."""
        if self._fast is None:
            return [self._slowly(row) for row in rows]
        found: dict[int, Tokens] = {}
        for is_templated in (True, False):
            chosen = {i: row for i, row in enumerate(rows) if row.is_templated == is_templated}
            if chosen:
                found |= zip(chosen, self._fastly([*chosen.values()], is_templated), strict=True)
        return [found[index] for index in range(len(rows))]

    def _fastly(self, rows: Sequence[Rendered], is_templated: bool) -> list[Tokens]:
        adds = not is_templated
        found: list[Tokens | None] = [None] * len(rows)
        if all(row.spans is None for row in rows) or self._adds_up(adds):
            found = self._by_length(rows, adds)
        left = [row for row, tokens in zip(rows, found, strict=True) if tokens is None]
        others = iter(self._by_offsets(left, adds))
        return [next(others) if tokens is None else tokens for tokens in found]

    def _adds_up(self, adds: bool) -> bool:
        """Return whether a row's tokens are likely to be its text, one after another."""
        adds_more = adds and self._fast.num_special_tokens_to_add(False) > 0
        return self._byte_level is not None and not adds_more

    def _by_length(self, rows: Sequence[Rendered], adds: bool) -> list[Tokens | None]:
        """Return rows as tokens, of which lengths tell where they are; None where they do not.

        A batch in which most do not is the last that this is tried of.
        """
        texts = [row.text for row in rows]
        encoded = self._fast.encode_batch_fast(texts, add_special_tokens=adds)
        found = [
            self._told(np.asarray(encoding.ids, np.int32), row)
            for encoding, row in zip(encoded, rows, strict=True)
        ]
        if 2 * sum(tokens is None for tokens in found) > len(rows):
            self._byte_level = None
        return found

    def _told(self, ids: NDArray[np.int32], row: Rendered) -> Tokens | None:
        if row.spans is None:
            return self._ended(ids, None, row)
        assert self._byte_level is not None
        aligned = self._byte_level.aligned(row.text, ids)
        return None if aligned is None else self._ended(ids, _mask_of(aligned, row), row)

    def _by_offsets(self, rows: Sequence[Rendered], adds: bool) -> list[Tokens]:
        """Return rows as tokens, of which the library tells where they are."""
        texts = [row.text for row in rows]
        encoded = self._fast.encode_batch(texts, add_special_tokens=adds) if texts else []
        return [
            self._ended(encoding.ids, _mask_of(encoding, row), row)
            for encoding, row in zip(encoded, rows, strict=True)
        ]

    def _slowly(self, row: Rendered) -> Tokens:
        """Return the tokens of a row by a tokenizer that is Python, and knows no characters."""
        ids = self._ids(row.text, row)
        if row.spans is None:
            return self._ended(ids, None, row)
        mask = np.zeros(len(ids), np.int8)
        for begin, end in row.spans:
            first = _common_length(self._ids(row.text[:begin], row), ids)
            is_last = end >= len(row.text)
            last = len(ids) if is_last else _common_length(self._ids(row.text[:end], row), ids)
            mask[first:last] = 1
        return self._ended(ids, mask, row)

    def _ids(self, text: str, row: Rendered) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=not row.is_templated, verbose=False)
        return list(encoded["input_ids"])

    def _ended(
        self, ids: Sequence[int] | NDArray[np.int32], mask: NDArray[np.int8] | None, row: Rendered
    ) -> Tokens:
        """Return tokens with the one that ends a sequence, which is part of what is learned."""
        found = np.asarray(ids, np.int32)
        is_ended = len(found) > 0 and found[-1] == self._end
        if row.is_templated or self._end is None or is_ended:
            return Tokens(found, mask)
        ended = np.append(found, np.int32(self._end))
        return Tokens(ended, None if mask is None else np.append(mask, np.int8(1)))


def _mask_of(encoding: Any, row: Rendered) -> NDArray[np.int8] | None:
    if row.spans is None:
        return None
    mask = np.zeros(len(encoding), np.int8)
    for begin, end in _token_spans(encoding, row.spans, length=len(row.text)):
        mask[begin:end] = 1
    return mask


def _token_spans(encoding: Any, spans: Spans, *, length: int) -> list[tuple[int, int]]:
    """Return the tokens of each span of characters; one that lies across an edge belongs to it, as
    TRL has it."""
    found = []
    for begin, end in spans:
        first = _token_at(encoding, begin, length)
        last = encoding.char_to_token(end - 1)
        after = _token_at(encoding, end, length)
        found.append((first, max(after, -1 if last is None else last + 1)))
    return found


def _token_at(encoding: Any, character: int, length: int) -> int:
    """Return the first token at a character or behind it; the number of tokens where none is."""
    for at in range(character, min(length, character + _LOOKED_AHEAD)):
        token = encoding.char_to_token(at)
        if token is not None:
            return int(token)
    return len(encoding)


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
