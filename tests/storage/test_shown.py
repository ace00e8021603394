"""A study as tools for Optuna see it."""

from __future__ import annotations

from pathlib import Path

import pytest
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.trial import TrialState

from storage.reading import shown_storage
from storage.records import Errand, OutOfMemory
from tests.storage.builders import a_record, begun, open_it, run_one


def test_one_study_is_shown_with_what_tools_look_for(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sweep.db"
    for name in ("other", "mine"):
        with open_it(url, tmp_path, name=name) as study:
            run_one(study, batch=2)
            run_one(study, OutOfMemory(stage="forward"), batch=8)
    with shown_storage("mine", url=url) as storage:
        (shown,) = storage.get_all_studies()
        assert shown.study_name == "mine"
        number = storage.get_study_id_from_name("mine")
        assert storage.get_study_system_attrs(number) == {
            "study:metric_names": ["tokens_per_second"]
        }
        fitted, ran_out = storage.get_all_trials(number)
        assert storage.get_best_trial(number).number == fitted.number
    assert fitted.user_attrs.keys() == {"verdict", "tokens_per_second", "peak_gib"}
    assert ran_out.user_attrs["stage"] == "forward"
    assert fitted.system_attrs["constraints"][0] < 0 < ran_out.system_attrs["constraints"][0]


def test_it_is_seen_as_it_goes_on_and_without_what_measures_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sweep.db"
    with open_it(url, tmp_path) as study, shown_storage("study", url=url) as storage:
        number = storage.get_study_id_from_name("study")
        assert storage.get_all_trials(number) == []
        first = run_one(study)
        assert [t.state for t in storage.get_all_trials(number)] == [TrialState.COMPLETE]
        again = study.ask_again()
        errand = Errand(purpose="confirm", series=1, confirms=first.number)
        record = a_record(again.number, **errand.model_dump())
        study.tell(again, begun(study, again, record, errand=errand))
        assert [t.number for t in storage.get_all_trials(number)] == [first.number]


def test_nothing_can_be_written(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sweep.db"
    with open_it(url, tmp_path) as study:
        run_one(study)
    before = (tmp_path / "sweep.db").read_bytes()
    with shown_storage("study", url=url) as storage:
        number = storage.get_study_id_from_name("study")
        for write in (
            lambda: storage.delete_study(number),
            lambda: storage.create_new_trial(number),
            lambda: storage.set_study_user_attr(number, "a", 1),
            lambda: storage.set_study_system_attr(number, "a", 1),
            lambda: storage.set_trial_user_attr(1, "a", 1),
            lambda: storage.set_trial_state_values(1, TrialState.FAIL),
        ):
            with pytest.raises((StorageInternalError, UpdateFinishedTrialError)):
                write()
    assert (tmp_path / "sweep.db").read_bytes() == before
