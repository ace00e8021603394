from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from storage import mapping
from storage.database import close, open_for_writing
from storage.records import Crashed, OutOfMemory, PrunedSlow
from storage.sampler_view import OnDemand, SearchStorage
from storage.study import OpenStudy
from storage.urls import parse_url
from tests.storage.builders import (
    DISTRIBUTIONS,
    a_definition,
    a_measurement,
    open_it,
    run_one,
)

OUTCOMES = (
    None,
    OutOfMemory(stage="forward"),
    PrunedSlow(measurement=a_measurement(500.0)),
    Crashed(phase="attach"),
)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/sweep.db"


def a_study_of_all_sorts(url: str, home: Path, **changes: Any) -> OpenStudy:
    study = open_it(url, home, **changes)
    for outcome in OUTCOMES:
        run_one(study, outcome)
    study.ask(DISTRIBUTIONS)
    study.study.enqueue_trial({"micro_batch_size": 2})
    return study


def shown(trial: FrozenTrial) -> dict[str, Any]:
    """All there is of a trial."""
    values = {name.strip("_"): value for name, value in vars(trial).items()}
    return values | {"user_attrs": dict(trial.user_attrs)}


@pytest.mark.parametrize(
    "objectives", [["tokens_per_second"], ["tokens_per_second", "peak_memory"]]
)
def test_the_view_shows_of_every_trial_what_optuna_shows(
    url: str, tmp_path: Path, objectives: list[str]
) -> None:

    with a_study_of_all_sorts(
        url, tmp_path, definition=a_definition(objectives=objectives)
    ) as study:
        name = study.name
        seen = study.study.get_trials(deepcopy=False)
    plain = RDBStorage(url)
    theirs = optuna.load_study(study_name=name, storage=plain).get_trials(deepcopy=False)
    assert [trial.state for trial in theirs].count(TrialState.RUNNING) == 1
    again = open_for_writing(parse_url(url))
    ours = optuna.load_study(study_name=name, storage=again).get_trials(deepcopy=False)
    assert list(map(shown, ours)) == list(map(shown, theirs)) == list(map(shown, seen))
    assert [list(trial.params) for trial in ours] == [list(trial.params) for trial in theirs]
    assert [trial.constraints for trial in ours] == [trial.constraints for trial in theirs]
    close(again)
    close(plain)


def test_no_attribute_of_a_trial_that_the_driver_knows_is_fetched_for_a_sampler(
    url: str, tmp_path: Path
) -> None:
    a_study_of_all_sorts(url, tmp_path).close()
    statements: list[str] = []
    with open_it(url, tmp_path) as study:
        listen_to(study._storage, statements)
        seen = study.study.get_trials(deepcopy=False)
        assert not [text for text in statements if "trial_user_attributes" in text] or all(
            "trial_id IN" in text for text in statements if "trial_user_attributes" in text
        )
        ended = [trial for trial in seen if trial.state.is_finished()]
        assert [mapping.record_of(trial) for trial in ended] == list(study.records())
        assert all(isinstance(trial.user_attrs, OnDemand) for trial in ended)
        assert ended[0].user_attrs["verdict"] == "fits"
        assert isinstance(copy.deepcopy(ended[0]).user_attrs, dict)


def test_an_attribute_that_is_no_json_and_a_state_that_nobody_knows_cost_only_themselves(
    url: str, tmp_path: Path
) -> None:
    a_study_of_all_sorts(url, tmp_path).close()
    storage = open_for_writing(parse_url(url))
    with storage.engine.begin() as connection:
        connection.exec_driver_sql(
            "UPDATE trial_user_attributes SET value_json = '{torn' WHERE trial_id = 1 "
            "AND key = 'record'"
        )
        connection.exec_driver_sql("UPDATE trials SET state = 'DREAMT' WHERE trial_id = 2")
    trials = optuna.load_study(study_name="study", storage=storage).get_trials(deepcopy=False)
    assert [trial.number for trial in trials] == list(range(len(OUTCOMES) + 2))
    assert "record" not in trials[0].user_attrs
    assert trials[0].user_attrs["verdict"] == "fits"
    assert trials[1].state is TrialState.FAIL
    close(storage)


def test_what_is_written_together_is_there_or_is_not(url: str, tmp_path: Path) -> None:
    with a_study_of_all_sorts(url, tmp_path) as study:
        storage = study._storage
        open_one = storage.get_trial(len(OUTCOMES) + 1)
        commits: list[object] = []
        sqlalchemy.event.listen(storage.engine, "commit", commits.append)

        def killed_between() -> None:
            with storage.together():
                storage.set_trial_user_attr(open_one._trial_id, "a", 1)
                raise RuntimeError("killed")

        with pytest.raises(RuntimeError, match="killed"):
            killed_between()
        assert commits == []
        assert "a" not in storage.get_trial(open_one._trial_id).user_attrs
        commits.clear()
        with storage.together():
            storage.set_trial_user_attr(open_one._trial_id, "a", 1)
            storage.set_trial_user_attr(open_one._trial_id, "b", 2)
            assert storage.get_trial(open_one._trial_id).user_attrs["a"] == 1
        assert len(commits) == 1
        assert storage.get_trial(open_one._trial_id).user_attrs.keys() >= {"a", "b"}


def listen_to(storage: SearchStorage, statements: list[str]) -> None:
    @sqlalchemy.event.listens_for(storage.engine, "before_cursor_execute")
    def _(_c: object, _cursor: object, statement: str, *_rest: object) -> None:
        statements.append(statement)
