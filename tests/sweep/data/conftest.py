"""What tests of a dataset's tokens share."""

from __future__ import annotations

from typing import Any

import pytest

from qlora_sweep.search_spaces.models import load_model_spec


@pytest.fixture(scope="session")
def shipped() -> Any:
    """The demonstration's tokenizer, which whoever changes it puts right."""
    from qlora_sweep.sweep.data.preparing import load_tokenizer

    directory = load_model_spec("demo").tokenizer_path
    assert directory is not None
    return load_tokenizer(directory, name="demo")
