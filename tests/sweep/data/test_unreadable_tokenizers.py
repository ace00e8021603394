"""Tokenizers that transformers cannot read here: what is missing, or never run, is named."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.sweep.data.tokenizers import why_unreadable
from tests.lazy import lazily
from tests.tables import cases

preparing = lazily("qlora_sweep.sweep.data.preparing")

SENTENCEPIECE = b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02\n"
TIKTOKEN = b"IQ== 0\nIg== 1\n"
NOT_HERE = {
    name: importlib.util.find_spec(name) is None
    for name in ("sentencepiece", "tiktoken", "mistral_common")
}


@pytest.mark.parametrize(
    ("file", "content", "package"),
    [
        ("tokenizer.model", SENTENCEPIECE, "sentencepiece"),
        ("tokenizer.model.v3", SENTENCEPIECE, "sentencepiece"),
        ("sentencepiece.bpe.model", SENTENCEPIECE, "sentencepiece"),
        ("tokenizer.model", TIKTOKEN, "tiktoken"),
        ("tekken.json", b"{}", "mistral-common"),
    ],
)
def test_the_package_that_reads_its_file_is_to_be_installed(
    tmp_path: Path, file: str, content: bytes, package: str
) -> None:
    if not NOT_HERE[package.replace("-", "_")]:
        pytest.skip(f"{package} is installed here")
    (tmp_path / file).write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    assert f"pip install {package}" in str(why_unreadable(tmp_path))


@pytest.mark.parametrize(
    ("file", "named"),
    cases(
        """
        tokenizer_config.json | {AutoTokenizer: [tokenization_own.OwnTokenizer, null]}
        tokenizer_config.json | [tokenization_own.OwnTokenizer, null]
        config.json | {AutoTokenizer: [tokenization_own.OwnTokenizer, null]}
        """
    ),
)
def test_code_of_its_own_is_never_run(tmp_path: Path, file: str, named: object) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "tokenization_own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "OwnTokenizer"}')
    known = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / file).write_text(json.dumps({**known, "auto_map": named}))
    with pytest.raises(InputError, match="never run"):
        preparing.load_tokenizer(tmp_path, name="own")
    assert not ran.exists()


def test_a_tokenizer_json_needs_none_of_them(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer.model").write_bytes(SENTENCEPIECE)
    with pytest.raises(InputError, match="transformers cannot read it"):
        preparing.load_tokenizer(tmp_path, name="own")
