"""Owns a whole study's rows in Optuna's tables, whatever is in them: deleted, or copied from
another database, in one transaction either way.

Knows nothing of what they mean, or of who may drive the study.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy
from optuna.storages._rdb import models
from sqlalchemy import select

_STUDIES, _TRIALS = models.StudyModel.__table__, models.TrialModel.__table__
_BEATS = models.TrialHeartbeatModel.__table__
_ROWS_AT_ONCE = 500


def delete_rows(connection: sqlalchemy.Connection, number: int) -> None:
    """Delete a study's rows from every table, be there in them what may: Optuna would read first
    what it deletes. All of it is the connection's transaction.
    """
    its_trials = select(_TRIALS.c.trial_id).where(_TRIALS.c.study_id == number)
    # Those that refer to another come first.
    for table in reversed(models.BaseModel.metadata.sorted_tables):
        if "study_id" in table.c:
            connection.execute(table.delete().where(table.c.study_id == number))
        elif "trial_id" in table.c:
            connection.execute(table.delete().where(table.c.trial_id.in_(its_trials)))


def copy_rows(name: str, *, source: sqlalchemy.Engine, target: sqlalchemy.Engine) -> None:
    """Put a study's rows in the place of those that are there, all of them or none.

    Args:
        name: of the study, which ``source`` has.
        source: of the same version of the tables.
        target: nobody else may write of that study meanwhile.
    """
    named = select(_STUDIES.c.study_id).where(_STUDIES.c.study_name == name)
    with source.connect() as reading, target.begin() as writing:
        old = writing.execute(named).scalar()
        if old is not None:
            delete_rows(writing, old)
        number = reading.execute(named).scalar_one()
        studies = {number: _inserted(writing, _STUDIES, {"study_name": name})}
        trials = dict[int, int]()
        for row in _rows(reading, select(_TRIALS).where(_TRIALS.c.study_id == number)):
            trials[row["trial_id"]] = _inserted(writing, _TRIALS, _moved(_TRIALS, row, studies))
        for table in models.BaseModel.metadata.sorted_tables:
            # Nobody is at work on a trial here.
            if table not in (_STUDIES, _TRIALS, _BEATS):
                _copy_table(table, number, studies, trials, reading=reading, writing=writing)


def _copy_table(
    table: sqlalchemy.Table,
    number: int,
    studies: Mapping[int, int],
    trials: Mapping[int, int],
    *,
    reading: sqlalchemy.Connection,
    writing: sqlalchemy.Connection,
) -> None:
    """Copy the rows of a study's, or of its trials', with the numbers that those have there."""
    if "study_id" in table.c:
        wanted, numbers = select(table).where(table.c.study_id == number), studies
    elif "trial_id" in table.c:
        its_trials = select(_TRIALS.c.trial_id).where(_TRIALS.c.study_id == number)
        wanted, numbers = select(table).where(table.c.trial_id.in_(its_trials)), trials
    else:
        return
    for rows in reading.execute(wanted).mappings().partitions(_ROWS_AT_ONCE):
        writing.execute(table.insert(), [_moved(table, row, numbers) for row in rows])


def _rows(
    connection: sqlalchemy.Connection, wanted: sqlalchemy.Select[Any]
) -> Iterator[sqlalchemy.RowMapping]:
    # As they were made: a trial's place among the others is its number's.
    yield from connection.execute(wanted.order_by(_TRIALS.c.trial_id)).mappings()


def _moved(
    table: sqlalchemy.Table, row: sqlalchemy.RowMapping, numbers: Mapping[int, int]
) -> dict[str, Any]:
    """Return a row without its own number, and of whom it is there."""
    own = {column.name for column in table.primary_key}
    whose = "study_id" if "study_id" in table.c else "trial_id"
    kept = {str(name): value for name, value in row.items() if name not in own}
    return {**kept, whose: numbers[row[whose]]}


def _inserted(
    connection: sqlalchemy.Connection, table: sqlalchemy.Table, row: Mapping[str, Any]
) -> int:
    key = connection.execute(table.insert().values(row)).inserted_primary_key
    assert key is not None, "of one row"
    return int(key[0])
