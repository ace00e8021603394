"""The pretrained model of the tests is there, or it is said how it comes there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real_model import VARIABLE, MissingModelError, real_model


def test_a_directory_that_is_named_is_the_model_or_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(MissingModelError, match=VARIABLE):
        real_model()
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert real_model() == tmp_path
