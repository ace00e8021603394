"""The check of density: what is counted, and what fails."""

import pytest

from tests import density

OCCURRENCES = {
    "conditional expressions": "a = b if c else d",
    "comprehensions": "a = [b for b in c]",
    "tuple assignments": "a, b = c, d",
    "displays with starred items": "a = [*b, c]",
}


@pytest.mark.parametrize("kind", density.LIMITS)
class TestLimits:
    def measured(self, kind: str, times: int) -> dict[str, density.Density]:
        text = f"{OCCURRENCES[kind]}\n" * times
        return {"room/file.py": density.measure(text, "room/file.py")}

    def test_one_is_allowed_in_a_small_file(self, kind):
        assert density.faults(self.measured(kind, 1)) == []

    def test_more_fail_with_the_line_of_each(self, kind):
        (fault,) = density.faults(self.measured(kind, 3))
        assert kind in fault
        assert str(density.LIMITS[kind]) in fault
        assert all(f"room/file.py:{line}" in fault for line in (1, 2, 3))

    def test_as_many_as_the_limits_share_of_the_tokens(self, kind):
        plain = "value = 1\n" * 3_000
        allowed = density.measure(plain, "file.py").allowed(kind)
        assert allowed == -(-density.LIMITS[kind] * 9_000 // 10_000)
        for times, is_dense in ((allowed, False), (2 * allowed, True)):
            text = plain + f"{OCCURRENCES[kind]}\n" * times
            assert (kind in density.measure(text, "file.py").excesses()) is is_dense


@pytest.mark.parametrize(
    ("text", "tokens", "statements"),
    [
        ('"""Docstring."""\n\nimport os\n\n# A comment.\na = 1\n', 3, 1),
        ("a = f'{b} and {c:{d}}'\n", 3, 1),
        ("a = (\n    1,\n    2,\n)\n", 8, 1),
        ("if a:\n    b = 1\n", 6, 2),
    ],
)
def test_layout_and_imports_are_not_counted(text, tokens, statements):
    measured = density.measure(text, "file.py")
    assert (measured.tokens, measured.statements) == (tokens, statements)


@pytest.mark.parametrize("text", ["first, *rest = values", "a, b = both()", "f(*a)", "a = {**b}"])
def test_what_is_plain_is_not_counted(text):
    assert not any(density.measure(text, "file.py").places.values())


def test_a_room_is_held_to_the_limits_beside_its_files(tmp_path):
    room = tmp_path / "sweep" / "export"
    room.mkdir(parents=True)
    for number in range(4):
        (room / f"file_{number}.py").write_text("a, b = c, d\n")
    vendored = room / "vendor"
    vendored.mkdir()
    (vendored / "theirs.py").write_text("a, b = c, d\n" * 10)
    (fault,) = density.faults(density.survey(tmp_path))
    assert fault.startswith("sweep/export/: 4 tuple assignments")
