"""Which token a character lies in, of byte-level tokenizers: told by how long tokens are.

The library tells it too, and then keeps a table of every byte of every text, for a fifth of the
time that tokens take. Where tokens are a text's bytes, one after another, adding them up says the
same; where they are not, the sum shows it, and the library is asked.
"""

from __future__ import annotations

import json
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers

_SPACE = ord(" ")


@dataclass(frozen=True, slots=True)
class Aligned:
    """A text and its tokens, asked as the library's own encodings are."""

    text: bytes
    characters: str
    ends: list[int]
    """The byte behind each token."""
    trims: bool

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.ends)

    def char_to_token(self, character: int) -> int | None:
        """Return the first token that a character lies in; None of a blank that is trimmed."""
        is_narrow = len(self.text) == len(self.characters)
        at = character if is_narrow else len(self.characters[:character].encode())
        token = bisect_right(self.ends, at)
        is_blank = self.trims and self.text[at] == _SPACE
        return None if is_blank and self._is_trimmed(at, token) else token

    def _is_trimmed(self, at: int, token: int) -> bool:
        """Return whether a blank begins or ends its token: such belong to none."""
        begin, end = self.ends[token - 1] if token else 0, self.ends[token]
        return not (self.text[begin:at].strip(b" ") and self.text[at + 1 : end].strip(b" "))


class ByteLevel:
    """A tokenizer whose tokens are bytes of the text."""

    def __init__(self, sizes: NDArray[np.int32], *, composes: bool, trims: bool) -> None:
        self._sizes, self._composes, self._trims = sizes, composes, trims

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ByteLevel | None:
        """Return what tells the tokens of a tokenizer; None where they may be no bytes."""
        normalizing, splitting, closing = (
            list(_steps(part))
            for part in (
                tokenizer.normalizer,
                tokenizer.pre_tokenizer,
                tokenizer.post_processor,
            )
        )
        bytes_of = [step for step in splitting if step["type"] == "ByteLevel"]
        trims = any(step["type"] == "ByteLevel" and step["trim_offsets"] for step in closing)
        is_known = (
            _types(normalizing) <= {"NFC"}
            and _types(splitting) <= {"ByteLevel", "Split", "Digits"}
            and _types(closing) <= {"ByteLevel", "TemplateProcessing"}
            and len(bytes_of) == 1
            and not bytes_of[0]["add_prefix_space"]
            and _is_plain(tokenizer.model)
        )
        if not is_known:
            return None
        return cls(_sizes(tokenizer), composes=bool(normalizing), trims=trims)

    def aligned(self, text: str, ids: NDArray[np.int32]) -> Aligned | None:
        """Return a text with its tokens; None where they are not its bytes."""
        if self._composes and not unicodedata.is_normalized("NFC", text):
            return None
        if self._trims and text.startswith(" "):
            # Whether a first token's blank is its own, the library decides by more than this knows.
            return None
        data = text.encode()
        ends = np.cumsum(self._sizes[ids])
        if not len(ends) or ends[-1] != len(data):
            return None
        return Aligned(data, text, ends.tolist(), self._trims)


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield what a part of a tokenizer does, one thing after another."""
    waiting = [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop(0)
        inside = next((step[key] for key in _INSIDE if key in step), None)
        if inside is None:
            yield step
        else:
            waiting = [*inside, *waiting]


_INSIDE = ("normalizers", "pretokenizers", "processors")
"""Where a sequence keeps what it is of."""


def _types(steps: list[dict[str, Any]]) -> set[str]:
    return {step["type"] for step in steps}


def _is_plain(model: Any) -> bool:
    """Return whether a model's tokens are what they are of, and not marked as parts of words."""
    return isinstance(model, models.BPE) and not (
        model.byte_fallback or model.continuing_subword_prefix or model.end_of_word_suffix
    )


def _sizes(tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Return the bytes of each token; 0 of one that may stand for others than its own."""
    alphabet = frozenset(pre_tokenizers.ByteLevel.alphabet())
    added = tokenizer.get_added_tokens_decoder()
    known = tokenizer.get_vocab(with_added_tokens=False)
    sizes = np.zeros(max([*known.values(), *added], default=0) + 1, np.int32)
    for token, number in known.items():
        sizes[number] = len(token) if alphabet.issuperset(token) else 0
    for number, its in added.items():
        content = its.content
        is_exact = not (its.lstrip or its.rstrip) and content == content.strip()
        sizes[number] = len(content.encode()) if is_exact else 0
    # What is not known may be of any length.
    unknown = known.get(tokenizer.model.unk_token or "")
    if unknown is not None:
        sizes[unknown] = 0
    return sizes
