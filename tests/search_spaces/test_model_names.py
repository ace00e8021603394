"""Models by name, and configs that are refused before anything is built from them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.search_spaces.linears import is_tied, parameters
from qlora_sweep.search_spaces.models import (
    SIZES,
    ModelSpec,
    load_model_spec,
    shipped_models,
    translate,
)
from tests.search_spaces.small import SMALL
from tests.tables import cases

GOOD: dict[str, Any] = {"model_type": "llama", **SMALL, "max_position_embeddings": 256}


def write_config(directory: Path, config: object) -> str:
    text = config if isinstance(config, str) else json.dumps(config)
    (directory / "config.json").write_text(text)
    return str(directory)


def test_a_directory_is_a_model_and_its_remote_code_is_never_run(tmp_path: Path) -> None:
    config = {**GOOD, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    spec = load_model_spec(write_config(tmp_path, config))
    assert (spec.source, spec.path) == ("directory", tmp_path)
    assert (spec.hidden_layers, spec.vocab_size, spec.max_positions) == (2, 700, 256)
    assert "auto_map" not in spec.config
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize(
    "sizes",
    [
        {"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 128},
        {"model_type": "mpt", "n_layers": 3, "d_model": 64, "n_heads": 4, "max_seq_len": 128},
        # The kinds of its layers are listed, and no number of them is saved.
        {key: value for key, value in GOOD.items() if key != "num_hidden_layers"}
        | {"model_type": "nemotron_h", "layers_block_type": ["mlp"] * 3}
        | {"max_position_embeddings": 128},
        # An explicit head_dim need not divide the hidden size.
        {**GOOD, "num_hidden_layers": 3, "num_attention_heads": 5, "num_key_value_heads": 5}
        | {"max_position_embeddings": 128, "head_dim": 16},
    ],
)
def test_a_config_may_call_its_sizes_by_its_own_words(
    tmp_path: Path, sizes: dict[str, Any]
) -> None:
    spec = load_model_spec(write_config(tmp_path, {**sizes, "vocab_size": 100}))
    assert (spec.hidden_layers, spec.hidden_size, spec.max_positions) == (3, 64, 128)


GEMMA = {"hidden_size": 2560, "num_hidden_layers": 34, "model_type": "gemma3_text"}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (
            {"model_type": "qwen3_vl", "text_config": {**GOOD, "model_type": "qwen3_vl_text"}},
            "qwen3",
        ),
        # Written before transformers nested it.
        ({**GOOD, "model_type": "qwen2_5_vl", "vision_config": {"depth": 1}}, "qwen2"),
        # Its other sizes are those of transformers' class.
        ({"model_type": "gemma3", "text_config": GEMMA}, "gemma3_text"),
    ],
)
def test_a_vision_language_models_decoder_is_a_model(
    tmp_path: Path, config: dict[str, Any], kind: str
) -> None:
    spec = load_model_spec(write_config(tmp_path, config))
    sizes = config.get("text_config", config)
    assert (spec.model_type, spec.is_part) == (kind, True)
    assert (spec.hidden_layers, spec.hidden_size) == tuple(
        sizes[key] for key in ("num_hidden_layers", "hidden_size")
    )
    assert not load_model_spec(write_config(tmp_path, GOOD)).is_part


@pytest.mark.parametrize("kind", ["gemma3_text", "granite", "llama", "ministral3", "qwen3"])
def test_sizes_that_a_nested_config_leaves_out_are_those_of_transformers(
    tmp_path: Path, kind: str
) -> None:
    from transformers import CONFIG_MAPPING

    saw = "gemma3" if kind == "gemma3_text" else "llava"
    nested = {"model_type": saw, "text_config": {"model_type": kind}}
    spec = load_model_spec(write_config(tmp_path, nested))
    own = CONFIG_MAPPING[kind]
    for key in SIZES:
        assert spec.config.get(key) == getattr(own, key, None), key


def test_the_fingerprint_is_blind_to_what_does_not_shape_the_model(tmp_path: Path) -> None:
    spec = load_model_spec(write_config(tmp_path, {**GOOD, "transformers_version": "4.1"}))
    same = load_model_spec(write_config(tmp_path, dict(reversed(GOOD.items()))))
    other = load_model_spec(write_config(tmp_path, {**GOOD, "vocab_size": 101}))
    assert spec.fingerprint == same.fingerprint
    assert spec.fingerprint != other.fingerprint


LIES = """
{model_type: null} | model_type must name the architecture, got null
{is_encoder_decoder: true} | only decoder models
# Sizes at the top level of such a config are read by nobody.
{model_type: qwen3_5} | write its text_config (model_type 'qwen3_5_text')
{hidden_size: "64"} | hidden_size must be a whole number from 1 to 16,777,216
{intermediate_size: [64, 0]} | intermediate_size must be a whole number from 1 to 16,777,216, got 0
{hidden_size: true} | got true
{vocab_size: 100000000} | got 100000000
{hidden_size: 66} | hidden_size 66 is not a multiple of num_attention_heads 4
{num_key_value_heads: 3} | heads 4 is not a multiple of num_key_value_heads 3
{rope_parameters: yarn} | rope_parameters must be an object or null
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not valid JSON"),
        ("[1]", "must be a JSON object, got [1]"),
        ("[" * 100_000, "not valid JSON"),
        ('{"model_type": "gpt2", "n_embd": 12}', "num_hidden_layers is missing"),
        ('{"model_type": "llava", "text_config": {"vocab_size": 9}}', "a multimodal model"),
        *((json.dumps(GOOD | changes), message) for changes, message in cases(LIES)),
    ],
)
def test_a_config_that_lies_is_refused_by_file_key_and_value(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        load_model_spec(write_config(tmp_path, text))
    assert str(tmp_path / "config.json") in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    cases(
        r"""
        mistral-7b | unknown model 'mistral-7b'; did you mean 'mistral-7b-v0.3'?
        "bad\u0000name" | unknown model
        ./nowhere | "model './nowhere': no such directory"
        ~nobody-of-that-name/x | no such directory
        "{here}" | "config.json: no such file; a model's directory needs"
        "{here}/file" | "is a file: name the directory"
        """
    ),
)
def test_what_names_no_model_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").write_text("{}")
    with pytest.raises(InputError) as caught:
        load_model_spec(name.replace("{here}", str(tmp_path)))
    assert message in str(caught.value)


def test_a_hub_model_keeps_the_directory_of_its_snapshot(tmp_path: Path) -> None:
    write_config(tmp_path, GOOD)
    spec = load_model_spec("org/m", fetch=lambda _: tmp_path / "config.json")
    assert (spec.name, spec.source, spec.path) == ("org/m", "hub", tmp_path)


REQUEST = httpx.Request("HEAD", "https://hub.example/org/m")
NOT_FOUND = httpx.Response(404, request=REQUEST)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (RepositoryNotFoundError("no", response=NOT_FOUND), InputError, "is not on the hub, or is"),
        (GatedRepoError("no", response=NOT_FOUND), InputError, "gated"),
        (OfflineModeIsEnabled("no"), EnvironmentFault, "HF_HUB_OFFLINE is set"),
        (httpx.ConnectError("no route"), EnvironmentFault, "cannot be reached (no route)"),
    ],
)
def test_a_failed_request_says_what_it_means(
    error: Exception, kind: type[Exception], message: str
) -> None:
    found = translate(error, name="org/m")
    assert type(found) is kind
    assert "org/m" in str(found)
    assert message in str(found)


FETCH = """
import sys
from qlora_sweep.search_spaces.models import load_model_spec
for name in ("org/kept", "org/another"):
    try:
        print(load_model_spec(name).vocab_size)
    except Exception as error:
        print(type(error).__name__, error)
print("torch" in sys.modules)
"""


def test_offline_a_hub_model_comes_from_the_cache_or_not_at_all(tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--org--kept"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    (repo / "snapshots" / "abc").mkdir(parents=True)
    write_config(repo / "snapshots" / "abc", GOOD)
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", FETCH]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    kept, another, has_torch = done.stdout.splitlines()
    assert kept == "700"
    assert another.startswith("EnvironmentFault model 'org/another' is not in the local cache")
    assert has_torch == "False"


def test_every_shipped_model_has_the_size_that_its_page_says_was_published() -> None:
    page = Path(__file__).parents[2].joinpath("docs/models.md").read_text(encoding="utf-8")
    for model in shipped_models():
        size = parameters(model)
        cells = rf"^\| {re.escape(model.name)} \| {model.model_type} \| {size:,} \|"
        row = re.search(f"{cells}(.*)", page, re.MULTILINE)
        assert (row is None) is (model.name == "demo"), model.name
        for source in re.findall(r"\[(.+?)\]", row[1]) if row else ():
            assert f"\n[{source}]: https://" in page


@pytest.mark.parametrize(
    ("name", "is_one"), [("gemma-3-1b", True), ("qwen3-4b", True), ("phi-4", False)]
)
def test_a_head_that_is_the_embedding_counts_once(name: str, is_one: bool) -> None:
    spec = load_model_spec(name)
    assert is_tied(spec) is is_one
    unsaid = {k: v for k, v in spec.config.items() if k != "tie_word_embeddings"}
    # Gemma's is where its config says nothing; the published one does not.
    assert is_tied(ModelSpec(name, "directory", unsaid)) is name.startswith("gemma")
