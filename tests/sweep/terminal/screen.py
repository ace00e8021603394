"""A terminal that draws what is written to it, with the escapes that a live panel uses."""

from __future__ import annotations

import io
import re

_TOKEN = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])|(\r\n|\n|\r)|([^\x1b\r\n]+)")


class Screen(io.StringIO):
    """A stream that says it is a terminal, and keeps what a person would see on it.

    Lines that would be longer than the terminal is wide are an error: one would break the redraw.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.pictures: list[str] = []
        """What was seen after each synchronized update."""
        self._lines = [""]
        self._row = self._column = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for private, numbers, letter, end, plain in _TOKEN.findall(text):
            if plain:
                self._put(plain)
            elif end:
                self._end(end)
            else:
                self._obey(private, numbers, letter)
        return super().write(text)

    @property
    def seen(self) -> str:
        return "\n".join(line.rstrip() for line in self._lines).rstrip()

    def _put(self, plain: str) -> None:
        line = self._lines[self._row].ljust(self._column)
        line = line[: self._column] + plain + line[self._column + len(plain) :]
        assert len(line) <= self.width, f"{len(line)} columns of {self.width}: {line!r}"
        self._lines[self._row] = line
        self._column += len(plain)

    def _end(self, end: str) -> None:
        self._column = 0
        if "\n" in end:
            self._row += 1
            self._lines += [""] * (self._row + 1 - len(self._lines))

    def _obey(self, private: str, numbers: str, letter: str) -> None:
        if private:
            if (numbers, letter) == ("2026", "l"):
                self.pictures.append(self.seen)
        elif letter == "A":
            self._row -= int(numbers or 1)
            assert self._row >= 0, "above the first line"
        elif letter == "K":
            assert numbers == "2", "only whole lines are erased"
            self._lines[self._row] = ""
        else:
            assert letter == "m", f"an escape that is not known: {numbers}{letter}"
