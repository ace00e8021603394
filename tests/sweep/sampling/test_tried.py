from __future__ import annotations

import optuna
from optuna.distributions import IntDistribution
from optuna.trial import FrozenTrial, TrialState

from sweep.sampling.tried import Tried

X = {"x": IntDistribution(0, 9)}


class Counting:
    """Says what a trial was of, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, trial: FrozenTrial) -> str | None:
        self.asked += 1
        return str(trial.params["x"]) if "x" in trial.params else None


def ask(study: optuna.Study, x: int) -> optuna.Trial:
    study.enqueue_trial({"x": x})
    return study.ask(X)


def frozen(study: optuna.Study, trial: optuna.Trial) -> FrozenTrial:
    return study.get_trials(deepcopy=False)[trial.number]


def test_every_other_trial_counts_and_each_that_ended_is_looked_at_once() -> None:
    identity, study = Counting(), optuna.create_study()
    tried = Tried(identity)
    for x in range(5):
        trial = ask(study, x)
        assert tried.besides(study, frozen(study, trial)) == set(map(str, range(x)))
        study.tell(trial, state=TrialState.FAIL)
    assert identity.asked == 4
    outside = study.ask()
    study.tell(outside, 1.0)
    running, asking = ask(study, 7), ask(study, 8)
    known = {*"01234"}
    assert tried.besides(study, frozen(study, asking)) == known | {"7"}
    assert tried.besides(study, frozen(study, running)) == known | {"8"}
    study.tell(asking, 1.0)
    assert tried.besides(study, frozen(study, running)) == known | {"8"}
    study.tell(running, 1.0)
    last = ask(study, 9)
    assert tried.besides(study, frozen(study, last)) == known | {"7", "8"}


def test_what_another_study_tried_is_none_of_its() -> None:
    tried, first, second = Tried(Counting()), optuna.create_study(), optuna.create_study()
    first.tell(ask(first, 1), 1.0)
    assert tried.besides(first, frozen(first, ask(first, 2))) == {"1"}
    assert tried.besides(second, frozen(second, ask(second, 3))) == set()
