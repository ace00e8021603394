"""What the page says of model types is what came of them, and none of transformers is missing."""

from __future__ import annotations

import pytest

from tests.bench import families


def test_the_page_has_what_was_tried() -> None:
    text = families.PAGE.read_text(encoding="utf-8")
    assert text == families.page(text, families.made(map(families.read, families.DEVICES)))


def test_every_type_of_transformers_was_tried_and_says_what_came_of_it() -> None:
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    types = families.read("cpu")["types"]
    assert types.keys() == auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    for kind, found in types.items():
        assert any(found[key] for key in ("targets", "decoder", "refused")), kind
        for of in found["targets"].values():
            assert of["refused"] or (of["planned"] and of["trained"]), kind


def test_an_outcome_of_several_types_is_one_row() -> None:
    of = {"refused": "", "planned": "yes", "error": 0.004, "trained": "yes"}
    other = of | {"error": -0.03}
    whole = dict.fromkeys(("speed", "faithful", "merged", "exported"), "yes")
    common = {"decoder": "", "refused": "", "quantization": "nf4", "seconds": 60.0, **whole}
    types = {
        "one": {**common, "targets": {"qv": of, "attention": of}},
        "two": {**common, "targets": {"qv": other, "attention": other}},
        "wide": {**common, "targets": {}, "decoder": "one", "merged": ""},
        "none": {**common, "targets": {}, "refused": "model type 'none' is odd", "merged": ""},
    }
    stamp = {"versions": {"torch": "2.0"}, "measured_on": None, "date": "2026-11-29"}
    page = families.made([{"stamp": stamp, "types": types}, {"stamp": {}, "types": {}}])
    assert "| one, two | nf4 | qv, attention | yes | 3.0% | yes |" in page
    assert "| one, two | yes | yes | yes | yes |" in page
    assert "| wide (one) | its text decoder is trained" in page
    assert "| none | this type is odd |" in page
    assert "two -3.0%" in page
    assert "one -" not in page
