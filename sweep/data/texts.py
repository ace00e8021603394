"""A person's texts as this process knows them: asked for, prepared by a child, read back.

transformers and datasets are imported in the child alone. What was prepared once is found again by
its fingerprint.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from search_spaces.documents import home_expanded
from search_spaces.errors import EnvironmentFault, InputError, words_of
from search_spaces.models import ModelSpec
from search_spaces.texts import TextsChoice, TextsSummary
from sweep.child_environment import child_environment
from sweep.data import request as own
from sweep.data.files import is_on_hub, text_files
from sweep.data.first_rows import look_at
from sweep.data.request import BrokenRow, Progress, Question, content_of
from sweep.data.tokenizers import find_tokenizer
from sweep.paths import runs_directory
from sweep.subprocess_jobs import run_subprocess

_COMMAND = (sys.executable, "-P", "-m", "sweep.data")
"""Followed by this process's number."""
_BROKEN_SHOWN = 3


@dataclass(frozen=True)
class TextsRequest:
    """Texts as a person names them, with the model that is to read them."""

    source: str
    """A file, a directory of files, or a hub id."""
    model: ModelSpec | None = None
    """Whose tokenizer is used unless another is named, and whose embeddings the tokens must have
    rows in; None where only a tokenizer is named."""
    text_column: str | None = None
    format: str = "auto"
    completions_only: bool = False
    tokenizer: str | None = None
    """A directory or hub id; None for the model's own."""

    @classmethod
    def of(cls, choice: TextsChoice, model: ModelSpec | None) -> TextsRequest:
        """Return the request for the texts that a space or a command names."""
        return cls(
            choice.texts,
            model,
            choice.text_column,
            choice.format,
            choice.completions_only,
            choice.tokenizer,
        )


@dataclass(frozen=True)
class PreparedTexts:
    """Texts as tokens on the disk."""

    directory: Path
    summary: TextsSummary
    """With the source as it was named now; it may have been another when they were prepared."""
    prepared_as: str
    """The source as it was named then."""

    def lengths(self) -> NDArray[np.int32]:
        """Return the tokens of each row, in order, mapped from the disk."""
        return self._mapped(own.LENGTHS)

    def loss_lengths(self) -> NDArray[np.int32]:
        """Return each row's tokens that carry loss, in order, mapped from the disk."""
        return self._mapped(own.LOSS_LENGTHS)

    def broken(self) -> list[BrokenRow]:
        """Return the rows that cannot be trained on: the first ten thousand of them."""
        try:
            text = (self.directory / own.BROKEN).read_text(encoding="utf-8")
            rows = [BrokenRow(**json.loads(line)) for line in text.splitlines()]
        except (OSError, ValueError, TypeError) as error:
            raise EnvironmentFault(_gone(self.directory, error)) from error
        return [replace(row, file=self._named(row.file)) for row in rows]

    def _named(self, file: str) -> str:
        """Return a file as it is called where its source is named as it is now."""
        inside = file.removeprefix(self.prepared_as)
        return f"{self.summary.source}{inside}" if inside != file else file

    def notes(self, model: ModelSpec | None = None) -> tuple[str, ...]:
        """Return what a person should know of these texts, for this model: broken rows, rows
        longer than its positions, a tokenizer that knows more tokens than it has."""
        summary = self.summary
        found = [f"{summary.source}: {note}" for note in summary.notes]
        if summary.broken:
            found.append(_of_broken(summary, self.broken()))
        if model is None:
            return tuple(found)
        limit = model.max_positions
        if limit is not None and summary.longest > limit:
            longer = int(np.count_nonzero(self.lengths() > limit))
            found.append(
                f"{summary.source}: {_rows(longer)} longer than the {limit:,} positions of model "
                f"'{model.name}' (up to {summary.longest:,} tokens), and cut at no more than that"
            )
        if summary.tokenizer_size > model.vocab_size:
            found.append(
                f"tokenizer '{summary.tokenizer}' knows {summary.tokenizer_size:,} tokens, and "
                f"model '{model.name}' has embeddings for {model.vocab_size:,}; the largest in "
                f"these texts is {summary.largest_token:,}, so they can be trained on"
            )
        return tuple(found)

    def _mapped(self, name: str) -> NDArray[np.int32]:
        try:
            return np.load(self.directory / name, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise EnvironmentFault(_gone(self.directory, error)) from error


def _of_broken(summary: TextsSummary, rows: list[BrokenRow]) -> str:
    """Return how many rows are broken, and the first few of them."""
    few = "; ".join(
        f"{'' if row.file == summary.source else f'{row.file}: '}line {row.line}: {row.reason}"
        for row in rows[:_BROKEN_SHOWN]
    )
    more = (
        f"; and {summary.broken - _BROKEN_SHOWN:,} more" if summary.broken > _BROKEN_SHOWN else ""
    )
    of = summary.rows + summary.broken
    return (
        f"{summary.source}: {summary.broken:,} of {of:,} rows are broken and left out: {few}{more}"
    )


def _rows(count: int) -> str:
    return f"{count:,} rows are" if count > 1 else "one row is"


def _gone(directory: Path, error: Exception) -> str:
    return f"the prepared texts in {directory} cannot be read ({words_of(error)}): remove it"


def texts_directory() -> Path:
    """Return where prepared texts are kept, each under its fingerprint."""
    return runs_directory() / ".texts"


def prepare_texts(request: TextsRequest, *, on_progress: Progress | None = None) -> PreparedTexts:
    """Return texts as tokens, prepared now or before.

    Args:
        request: which, and how they are to be read.
        on_progress: hears what is done, how much of it, and of how much.

    Raises:
        InputError: the texts, an option, the tokenizer or the model are not right, or do not go
            together.
        EnvironmentFault: something cannot be read, or the hub cannot be reached.
        OSError: something cannot be written.
    """
    tell = on_progress or (lambda _what, _done, _of: None)
    question = _question(request, tell)
    directory = None if question.content is None else _known(question, question.content)
    if directory is None:
        directory = _ask(question, tell)
    summary = _summary(directory)
    named = summary.model_copy(update={"source": request.source})
    if request.model is not None:
        require_vocabulary(named, request.model)
    return PreparedTexts(directory, named, summary.source)


def open_prepared(directory: Path) -> PreparedTexts:
    """Return texts that were prepared before. Raises EnvironmentFault where they are gone."""
    summary = _summary(directory)
    return PreparedTexts(directory, summary, summary.source)


def require_vocabulary(summary: TextsSummary, model: ModelSpec) -> None:
    """Refuse tokens that the model has no embeddings for.

    A tokenizer that knows more tokens than the model is fine where those do not occur.

    Raises:
        InputError: one occurs.
    """
    if summary.largest_token >= model.vocab_size:
        raise InputError(
            f"{summary.source}: token {summary.largest_token:,} of tokenizer '{summary.tokenizer}' "
            f"({summary.tokenizer_size:,} tokens) occurs, and model '{model.name}' has embeddings "
            f"for {model.vocab_size:,}: name the model's own tokenizer"
        )


def _question(request: TextsRequest, tell: Progress) -> Question:
    tokenizer = find_tokenizer(request.tokenizer, request.model)
    content = seen = None
    if not is_on_hub(request.source):
        look_at(request)
        files = text_files(request.source)
        try:
            seen = own.seen(files)
            content = content_of(_telling_names(files, request.source), on_progress=tell)
        except OSError as error:
            raise EnvironmentFault(
                f"{request.source}: cannot be read: {words_of(error)}"
            ) from error
    return Question(
        source=request.source,
        format=request.format,
        text_column=request.text_column,
        completions_only=request.completions_only,
        tokenizer=tokenizer.name,
        tokenizer_directory=str(tokenizer.directory),
        tokenizer_digest=tokenizer.digest,
        home=str(texts_directory().absolute()),
        content=content,
        seen=seen,
    )


def _telling_names(files: list[tuple[str, Path]], source: str) -> Iterator[tuple[str, Path]]:
    """Yield files with their names in a directory, which tell splits apart; a file of its own has
    but its ending."""
    named = home_expanded(source)
    for _, path in files:
        inside = "" if path == named else str(path.relative_to(named))
        yield inside or "".join(path.suffixes), path


def _known(question: Question, content: str) -> Path | None:
    """Return where these texts were prepared before; None where they were not."""
    directory = Path(question.home) / question.fingerprint(content)
    if not own.is_whole(directory):
        return None
    try:
        _summary(directory)
    except EnvironmentFault:
        return None
    return directory


def _summary(directory: Path) -> TextsSummary:
    try:
        text = (directory / own.SUMMARY).read_text(encoding="utf-8")
        return TextsSummary.model_validate_json(text)
    except (OSError, ValueError, ValidationError) as error:
        raise EnvironmentFault(_gone(directory, error)) from error


def _ask(question: Question, tell: Progress) -> Path:
    """Have texts prepared by a child."""
    answer = run_subprocess(
        _COMMAND,
        question.to_json(),
        on_news=lambda news: tell(news["what"], news["done"], news["of"]),
        environment=child_environment(with_hub_token=question.content is None),
        name="the texts' process",
    )
    return Path(answer["prepared"])
