"""What lengths of tokens say of where they are is what the library says, or nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers, processors

from search_spaces.models import load_model_spec
from sweep.data.byte_level import Aligned, ByteLevel
from sweep.data.rendering import Rendered
from sweep.data.tokenizing import Tokenizing, load_tokenizer

PLAIN = (
    "<|user|>Where is the kettle?<|assistant|>In the hall.</s>",
    "In  the   hall \n\n a\u00a0b ",
    "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{HOURGLASS}\N{GRINNING FACE} 12345 </s> x",
)
ODD = (*PLAIN, "  blank first", "cafe\N{COMBINING ACUTE ACCENT} hall", "")


def demo() -> Tokenizer:
    directory = load_model_spec("demo").tokenizer_path
    assert directory is not None
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def trimming(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)


def composing(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC()])


def unsplit(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trimming(tokenizer)


def in_sequence(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def stripping(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("hall", lstrip=True, rstrip=True)])


def aligned(tokenizer: Tokenizer, text: str) -> Aligned | None:
    byte_level = ByteLevel.of(tokenizer)
    assert byte_level is not None
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return byte_level.aligned(text, np.asarray(ids, np.int32))


CHANGES = [str, trimming, composing, unsplit, in_sequence, stripping]


@pytest.mark.parametrize("change", CHANGES)
def test_every_character_is_in_the_token_that_the_library_says(
    change: Callable[[Tokenizer], object],
) -> None:
    tokenizer = demo()
    change(tokenizer)
    for text in ODD:
        theirs = tokenizer.encode(text, add_special_tokens=False)
        ours = aligned(tokenizer, text)
        if ours is not None:
            assert len(ours) == len(theirs)
            expected = [theirs.char_to_token(at) for at in range(len(text))]
            assert [ours.char_to_token(at) for at in range(len(text))] == expected


@pytest.mark.parametrize("change", CHANGES[:-1])
def test_lengths_tell_where_tokens_are_bytes(change: Callable[[Tokenizer], object]) -> None:
    tokenizer = demo()
    change(tokenizer)
    assert all(aligned(tokenizer, text) is not None for text in PLAIN)


def test_lengths_tell_nothing_where_tokens_are_no_bytes_of_the_text() -> None:
    composes, strips, unknown = demo(), demo(), demo()
    composing(composes)
    assert aligned(composes, ODD[4]) is None
    stripping(strips)
    assert aligned(strips, "In the hall.") is None
    unknown.normalizer = normalizers.Lowercase()
    assert ByteLevel.of(unknown) is None
    unknown.normalizer = None
    unknown.pre_tokenizer = pre_tokenizers.Metaspace()
    assert ByteLevel.of(unknown) is None


def test_rows_of_which_lengths_tell_nothing_are_masked_among_the_others() -> None:
    directory = load_model_spec("demo").tokenizer_path
    assert directory is not None
    loaded = load_tokenizer(directory, name="demo")
    composing(loaded.backend_tokenizer)
    rows = [Rendered(text, ((2, len(text)),), True) for text in ODD if text]
    together = Tokenizing(loaded)(rows)
    for row, tokens in zip(rows, together, strict=True):
        theirs = loaded.backend_tokenizer.encode(row.text, add_special_tokens=False)
        first = next(at for at, (_, end) in enumerate(theirs.offsets) if end > 2)
        assert tokens.ids.tolist() == theirs.ids
        assert tokens.mask.tolist() == [0] * first + [1] * (len(theirs.ids) - first)
