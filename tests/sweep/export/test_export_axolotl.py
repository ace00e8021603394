"""axolotl drops keys that it does not know without a word: every one of ours is in its schema.

The keys of its schema are test data, read from the version that is named there by
`tests/exports/axolotl_on_cpu.py --keys`; `make test-exports` holds them to what is installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from search_spaces.config import TrialConfig
from sweep.export.formats import export
from sweep.export.trainer_files import TRIED
from tests.sweep.export.studies import a_study, some_texts
from tests.sweep.export.test_export_formats import CONFIGS

KNOWN = json.loads(Path("tests/exports/axolotl_keys.json").read_text(encoding="utf-8"))
KINDS: tuple[Any, ...] = ("text", "instruction", "prompt-completion", "messages", "conversations")


def unknown(text: str) -> set[str]:
    values = yaml.safe_load(text)
    found = set(values) - set(KNOWN["config"]) - set(KNOWN["liger"])
    for dataset in values["datasets"]:
        found |= set(dataset) - set(KNOWN["dataset"])
        if isinstance(dataset["type"], dict):
            found |= set(dataset["type"]) - set(KNOWN["dataset.type"])
    return found


def test_the_schema_is_of_the_version_that_the_file_names() -> None:
    assert KNOWN["axolotl"] == TRIED["axolotl"].versions
    assert unknown(export(a_study(), format="axolotl").replace("lora_r:", "lora_rank:"))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.key()[:0])
def test_every_key_of_a_configuration_is_in_the_schema(config: TrialConfig) -> None:
    assert unknown(export(a_study(config), format="axolotl")) == set()


@pytest.mark.parametrize("packing", ["none", "packed", "grouped"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_texts_is_in_the_schema(kind: Any, packing: Any) -> None:
    study = a_study(TrialConfig(packing=packing), texts=some_texts(kind, completions_only=True))
    text = export(study, format="axolotl")
    assert unknown(text) == set()
    values = yaml.safe_load(text)
    assert values["sample_packing"] is (packing == "packed")
    assert values.get("group_by_length", False) is (packing == "grouped")
    assert values["train_on_inputs"] is False


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2"])
def test_it_packs_with_every_attention(attention: Any) -> None:
    text = export(a_study(TrialConfig(attention=attention)), format="axolotl")
    assert yaml.safe_load(text)["sample_packing"] is True
    assert "does not pack" not in text
