"""A figure becomes a picture by plotly's image engine, or says what is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from reports.images import picture_of, write_image
from search_spaces.errors import EnvironmentFault, InputError
from tests.reports.synthetic import fits, plausible_study, snapshot


def test_a_picture_has_the_values_of_the_trials_and_labels_their_front() -> None:
    picture = picture_of(plausible_study(), "front")
    drawn = [trace for trace in picture.data if trace.meta == "front"]
    assert all(isinstance(x, float) for x in drawn[0].x)
    texts = [annotation.text for annotation in picture.layout.annotations]
    assert any("×" in text for text in texts)
    assert picture.layout.paper_bgcolor == "#ffffff"


def test_a_figure_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(InputError, match=r"figure 'pie' is not in .* there are: .*front"):
        picture_of(plausible_study(), "pie")


def test_without_the_engine_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Only the engine: what plotly itself looks up on the way stays there.
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: None if name == "kaleido" else found(name, package),
    )
    with pytest.raises(EnvironmentFault, match=r"pip install 'qlora-sweep\[images\]'"):
        write_image(snapshot([fits(0, 8_000.0)]), tmp_path / "front.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(
    importlib.util.find_spec("kaleido") is None, reason="plotly's image engine is not installed"
)
@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<svg")])
def test_a_picture_is_written_where_the_engine_is(
    suffix: str, begins: bytes, tmp_path: Path
) -> None:
    path = tmp_path / f"front{suffix}"
    write_image(plausible_study(), path)
    assert path.read_bytes().startswith(begins)
