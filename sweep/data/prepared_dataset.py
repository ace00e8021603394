"""A person's dataset as this process knows it: asked for, prepared by a child, read back.

transformers and datasets are imported in the child alone. What was prepared once is found again by
its fingerprint.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from qlora_sweep.search_spaces.dataset_choice import DatasetChoice, DatasetSummary
from qlora_sweep.search_spaces.documents import home_expanded
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, words_of
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.redaction import redact
from qlora_sweep.sweep.child_environment import child_environment
from qlora_sweep.sweep.data.files import (
    DatasetSource,
    RowsError,
    dataset_files,
    is_on_hub,
    is_saved,
    telling_files,
)
from qlora_sweep.sweep.data.kinds import ReadingOptions, first_rows, on_completions
from qlora_sweep.sweep.data.tokenizers import find_tokenizer
from qlora_sweep.sweep.paths import runs_directory
from qlora_sweep.sweep.subprocess_jobs import run_subprocess

SUMMARY = "texts.json"
BROKEN = "broken.jsonl"
TOKENS = "tokens"
LENGTHS = "lengths.npy"
LOSS_LENGTHS = "loss_lengths.npy"
BROKEN_KEPT = 10_000
"""Broken rows that are named; further ones are counted."""
_COMMAND = (sys.executable, "-P", "-m", "qlora_sweep.sweep.data")
"""Followed by this process's number."""
_ENCODING = ("transformers", "tokenizers", "trl", "jinja2")
_READERS = ("files.py", "kinds.py", "encoding.py")
"""Packages and our modules by which a row becomes the tokens that it does."""
_BROKEN_SHOWN = 3
_IS_ANOTHERS = 2
"""A tokenizer of so many times fewer tokens than a model has embeddings is not that model's."""

Progress = Callable[[str, int, int], None]
"""Hears what is done, how much of it, and of how much."""


@dataclass(frozen=True)
class DatasetRequest:
    """A dataset as a person names it, with the model that is to read it."""

    source: str
    """A file, a directory of files, or a hub id."""
    model: ModelSpec | None = None
    """Whose tokenizer is used unless another is named, and whose embeddings the tokens must have
    rows in; None where only a tokenizer is named."""
    text_column: str | None = None
    prompt_column: str | None = None
    completion_column: str | None = None
    format: str = "auto"
    completions_only: bool | None = None
    """None for what TRL has for rows of the kind."""
    tokenizer: str | None = None
    """A directory or hub id; None for the model's own."""

    @classmethod
    def of(cls, choice: DatasetChoice, model: ModelSpec | None) -> DatasetRequest:
        """Return the request for the dataset that a space or a command names."""
        options = choice.model_dump(exclude={"texts", "eval_fraction", "quality_tokens"})
        return cls(choice.texts, model, **options)

    @property
    def asked(self) -> ReadingOptions:
        """How its rows are to be read."""
        return ReadingOptions(
            self.format, self.text_column, self.prompt_column, self.completion_column
        )


@dataclass(frozen=True)
class PreparationRequest:
    """What the child is to prepare, in plain values."""

    source: str
    asked: ReadingOptions
    """How its rows are to be read."""
    completions_only: bool | None
    tokenizer: str
    """As it was named."""
    tokenizer_directory: str
    tokenizer_digest: str
    home: str
    """Directory that what is prepared is put into, by fingerprint."""
    content: str | None
    """Digest of the content; None where only the child can tell."""
    seen: list[list[int]] | None = None
    """What `seen` said before the content was looked at; None of a dataset of the hub."""

    def fingerprint(self, content: str, tokens: str) -> str:
        """Return what tells a dataset from any other, as a name of a directory.

        Args:
            content: digest of the dataset's content.
            tokens: digest of all its tokens.
        """
        options = [asdict(self.asked), self.completions_only]
        parts = [content, options, self.tokenizer_digest, tokens]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def note(self, content: str) -> Path:
        """Return the file that names the directory with what these versions make of it."""
        code = b"".join(Path(__file__).with_name(name).read_bytes() for name in _READERS)
        versions = [version(package) for package in _ENCODING]
        makers = json.dumps([hashlib.sha256(code).hexdigest(), versions])
        return Path(self.home) / f"{self.fingerprint(content, makers)}.name"


@dataclass(frozen=True)
class BrokenRow:
    """A row that cannot be trained on."""

    file: str
    line: int
    reason: str


@dataclass(frozen=True)
class PreparedDataset:
    """A dataset as tokens on the disk."""

    directory: Path
    summary: DatasetSummary
    """With the source as it was named now; it may have been another when it was prepared."""
    prepared_as: str
    """The source as it was named then."""

    def lengths(self) -> NDArray[np.int32]:
        """Return the tokens of each row, in order, mapped from the disk."""
        return self._mapped(LENGTHS)

    def loss_lengths(self) -> NDArray[np.int32]:
        """Return each row's tokens that carry loss, in order, mapped from the disk."""
        return self._mapped(LOSS_LENGTHS)

    def broken(self) -> list[BrokenRow]:
        """Return the rows that cannot be trained on, the first ten thousand of them, each with its
        file as it is called where the source is named as it is now."""
        try:
            text = (self.directory / BROKEN).read_text(encoding="utf-8")
            rows = [BrokenRow(**json.loads(line)) for line in text.splitlines()]
        except (OSError, ValueError, TypeError) as error:
            raise _gone(self.directory, error) from error
        renamed = []
        for row in rows:
            if row.file.startswith(self.prepared_as):
                name = row.file.removeprefix(self.prepared_as)
                row = replace(row, file=f"{self.summary.source}{name}")
            renamed.append(row)
        return renamed

    def notes(self, model: ModelSpec | None = None) -> tuple[str, ...]:
        """Return what a person should know of this dataset, for this model: broken rows, rows
        longer than its positions, a tokenizer that knows more tokens than it has."""
        summary = self.summary
        found = [f"{summary.source}: {note}" for note in summary.notes]
        if summary.broken:
            found.append(self._broken_words())
        if model is None:
            return tuple(found)
        limit = model.max_positions
        if limit is not None and summary.longest > limit:
            longer = int(np.count_nonzero(self.lengths() > limit))
            which = "one row is"
            if longer > 1:
                which = f"{longer:,} rows are"
            found.append(
                f"{summary.source}: {which} longer than the {limit:,} positions of model "
                f"'{model.name}' (up to {summary.longest:,} tokens), and cut at no more than that"
            )
        is_own = summary.tokenizer == model.name
        if not is_own and _IS_ANOTHERS * summary.tokenizer_size < model.vocab_size:
            found.append(
                f"tokenizer '{summary.tokenizer}' knows {summary.tokenizer_size:,} tokens, and "
                f"model '{model.name}' has {model.vocab_size:,}: it is not the model's, so that "
                "lengths, what is cut and what an epoch takes are a rough count"
            )
        if summary.tokenizer_size > model.vocab_size:
            found.append(
                f"tokenizer '{summary.tokenizer}' knows {summary.tokenizer_size:,} tokens, and "
                f"model '{model.name}' has embeddings for {model.vocab_size:,}; the largest in "
                f"these texts is {summary.largest_token:,}, so they can be trained on"
            )
        return tuple(found)

    def _broken_words(self) -> str:
        """Return how many rows are broken, and the first few of them."""
        summary = self.summary
        reasons = []
        for row in self.broken()[:_BROKEN_SHOWN]:
            reason = f"line {row.line}: {row.reason}"
            if row.file != summary.source:
                reason = f"{row.file}: {reason}"
            reasons.append(reason)
        if summary.broken > _BROKEN_SHOWN:
            reasons.append(f"and {summary.broken - _BROKEN_SHOWN:,} more")
        return (
            f"{summary.source}: {summary.broken:,} of {summary.rows + summary.broken:,} rows are "
            f"broken and left out: {'; '.join(reasons)}"
        )

    def _mapped(self, name: str) -> NDArray[np.int32]:
        try:
            return np.load(self.directory / name, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise _gone(self.directory, error) from error


def _gone(directory: Path, error: Exception) -> EnvironmentFault:
    return EnvironmentFault(
        f"the prepared texts in {directory} cannot be read ({words_of(error)}): remove it"
    )


@contextlib.contextmanager
def translated(name: str) -> Iterator[None]:
    """Say what is wrong with a dataset as errors of ours."""
    try:
        yield
    except RowsError as error:
        raise InputError(redact(str(error))) from error
    except ConnectionError as error:
        raise EnvironmentFault(redact(str(error))) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InputError(f"{name}: a link that leads to itself") from error
        raise EnvironmentFault(f"{name}: cannot be read: {words_of(error)}") from error


def text_files(name: str) -> list[tuple[str, Path]]:
    """Return the files of a dataset that is here, each with the name that a person would use.

    Raises:
        InputError: there is no such file or directory, or nothing in it can be read as texts.
        EnvironmentFault: it is there and cannot be read.
    """
    with translated(name):
        return dataset_files(name)


def look_at(request: DatasetRequest) -> None:
    """Refuse a dataset in one file here whose first rows show that nothing can be trained on it.

    Takes milliseconds; whoever prepares it imports for seconds first.
    """
    name = request.source
    if len(text_files(name)) > 1 or is_saved(name):
        return
    with translated(name):
        _, _, layout = first_rows(DatasetSource(name), name, request.asked)
        on_completions(layout.kind, request.completions_only)


def dataset_directory() -> Path:
    """Return where prepared datasets are kept, each under its fingerprint."""
    return runs_directory() / ".texts"


def prepare_dataset(
    request: DatasetRequest, *, on_progress: Progress | None = None
) -> PreparedDataset:
    """Return a dataset as tokens, prepared now or before.

    Args:
        request: which, and how it is to be read.
        on_progress: hears what is done, how much of it, and of how much.

    Raises:
        InputError: the dataset, an option, the tokenizer or the model are not right, or do not go
            together.
        EnvironmentFault: something cannot be read, or the hub cannot be reached.
        OSError: something cannot be written.
    """
    tell = on_progress or (lambda _what, _done, _of: None)
    source = request.source
    is_here = not is_on_hub(source)
    content = None
    seen_before = None
    if is_here:
        look_at(request)
    tokenizer = find_tokenizer(request.tokenizer, request.model)
    if is_here:
        with translated(source):
            seen_before = seen(source)
            content = content_of(source, on_progress=tell)
    question = PreparationRequest(
        source=source,
        asked=request.asked,
        completions_only=request.completions_only,
        tokenizer=tokenizer.name,
        tokenizer_directory=str(tokenizer.directory),
        tokenizer_digest=tokenizer.digest,
        home=str(dataset_directory().absolute()),
        content=content,
        seen=seen_before,
    )
    directory = noted(question.note(str(content)))
    if not is_here or not is_whole(directory):
        answer = run_subprocess(
            _COMMAND,
            asdict(question),
            on_news=lambda news: tell(news["what"], news["done"], news["of"]),
            environment=child_environment(with_hub_token=not is_here),
            name="the texts' process",
        )
        directory = Path(answer["prepared"])
    found = open_prepared(directory)
    summary = replaced(found.summary, source=request.source)
    if request.model is not None:
        require_vocabulary(summary, request.model)
    return replace(found, summary=summary)


def open_prepared(directory: Path) -> PreparedDataset:
    """Return what was prepared before. Raises EnvironmentFault where it is gone."""
    try:
        text = (directory / SUMMARY).read_text(encoding="utf-8")
        summary = DatasetSummary.model_validate_json(text)
    except (OSError, ValueError, ValidationError) as error:
        raise _gone(directory, error) from error
    return PreparedDataset(directory, summary, summary.source)


def noted(note: Path) -> Path:
    """Return the directory that a note names; the note, which is none, where nothing is noted."""
    with contextlib.suppress(OSError, ValueError):
        return note.parent / note.read_text(encoding="utf-8")
    return note


def is_whole(directory: Path) -> bool:
    """Return whether all that there is of a prepared dataset is in a directory."""
    if not all((directory / name).exists() for name in (BROKEN, TOKENS, LENGTHS, LOSS_LENGTHS)):
        return False
    with contextlib.suppress(EnvironmentFault):
        open_prepared(directory)
        return True
    return False


def require_vocabulary(summary: DatasetSummary, model: ModelSpec) -> None:
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


def seen(name: str) -> list[list[int]]:
    """Return size and time of each file of a dataset: they differ once a file was written to."""
    stats = map(Path.stat, telling_files(name))
    return [[stat.st_size, stat.st_mtime_ns] for stat in stats]


def content_of(name: str, *, on_progress: Progress) -> str:
    """Return a digest of a dataset's files and the order they are read in, blind to where they lie.

    Names inside a directory count, as they tell splits apart; of a single file its ending does.

    Raises:
        RowsError: there is no such dataset.
        OSError: a file cannot be read.
    """
    files = telling_files(name)
    named = home_expanded(name)
    total = sum(path.stat().st_size for path in files) // 10**6
    done = 0
    hashed = hashlib.sha256()
    for path in files:
        on_progress("MB looked at", done // 10**6, total)
        inside = str(path.relative_to(named))
        if path == named:
            inside = "".join(path.suffixes)
        with path.open("rb") as file:
            hashed.update(f"{inside}\0".encode())
            hashed.update(hashlib.file_digest(file, "sha256").digest())
            done += file.tell()
    return hashed.hexdigest()
