"""What pydantic refuses is said by file, line, key and value, however deep it stands."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, StrictInt, model_validator

from search_spaces.documents import ContradictionError, Document, known_key, parse_yaml, validate
from search_spaces.errors import InputError

Note = Annotated[str, AfterValidator(partial(known_key, known=("size",)))]


class Wheel(BaseModel):
    model_config = ConfigDict(extra="forbid")

    inches: StrictInt = 28
    spokes: StrictInt | None = None


class Bicycle(BaseModel):
    model_config = ConfigDict(extra="forbid")

    maker: str
    front: Wheel = Wheel()
    spares: list[Wheel] = []
    fits: dict[str, Wheel] = {}
    notes: dict[
        Annotated[str, AfterValidator(lambda key: known_key(key, known=("size",)))], Any
    ] = {}

    @model_validator(mode="after")
    def _same_size(self) -> Bicycle:
        if self.notes.get("size", self.front.inches) != self.front.inches:
            raise ContradictionError("size and wheel differ", "notes", "size")
        return self


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "maker: A\nfront:\n  inches: big\n",
            "line 3: front.inches must be a whole number",
        ),
        (
            "maker: A\nfront:\n  inch: 28\n",
            "line 3: unknown key 'inch' under front; did you mean",
        ),
        (
            "maker: A\nspares:\n- inches: 28\n- inches: no\n",
            "line 4: spares.1.inches must be a",
        ),
        (
            "maker: A\nspares:\n- {}\n- spoke: 2\n",
            "line 4: unknown key 'spoke'; did you mean",
        ),
        (
            "maker: A\nfits:\n  me:\n    spoke: 2\n",
            "line 4: unknown key 'spoke' under me; did",
        ),
        (
            "maker: A\nnotes:\n  sise: 2\n",
            "line 3: unknown key 'sise' under notes; did",
        ),
        ("maker: A\nnotes:\n  size: 26\n", "line 3: size and wheel differ"),
        ("front:\n  inches: 28\n", "bike.yaml: maker is missing"),
        # A key misspelt is why another is missing.
        ("makr: A\n", "line 1: unknown key 'makr'; did you mean 'maker'?"),
        ("maker: A\nfront:\n  inches: '28'\n", "got '28'; YAML reads it as text"),
        ("maker: A\nfront: 28\n", "line 2: front must map keys to values, got 28"),
    ],
)
def test_a_fault_is_named_by_line_key_and_value(text: str, message: str) -> None:
    document = parse_yaml(text, label="bike.yaml")
    with pytest.raises(InputError) as caught:
        validate(Bicycle, document.values, document)
    assert str(caught.value).startswith("bike.yaml: ")
    assert message in str(caught.value)


def test_what_is_no_yaml_gets_no_hint_of_what_yaml_reads() -> None:
    with pytest.raises(InputError, match=r"^line 3: inches must be a whole number, got '28'$"):
        validate(Wheel, {"inches": "28"}, Document("line 3"))
