"""Owns what a sampler remembers of a study's trials, so that each is looked at once.

Knows nothing of how a sampler chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from weakref import ref

import optuna
from optuna.trial import FrozenTrial


class Tried:
    """The identities of what a study's trials were of, kept up from one choice to the next.

    Args:
        identity_of: says what a trial was of; None for one that says nothing.
    """

    def __init__(self, identity_of: Callable[[FrozenTrial], str | None]) -> None:
        self._identity_of = identity_of
        self._study: Callable[[], optuna.Study | None] = lambda: None
        self._settled = 0
        """Trials from the first on that have ended: they stay what they are."""
        self._known: set[str] = set()

    def follows(self, study: optuna.Study) -> bool:
        """Whether it is this study's trials that are remembered."""
        return self._study() is study

    def besides(self, study: optuna.Study, trial: FrozenTrial) -> Set[str]:
        """Return the identities of every other trial of a study."""
        if not self.follows(study):
            self._study, self._settled, self._known = ref(study), 0, set()
        trials = study.get_trials(deepcopy=False)
        while self._settled < len(trials) and trials[self._settled].state.is_finished():
            identity = self._identity_of(trials[self._settled])
            self._known |= set() if identity is None else {identity}
            self._settled += 1
        open_ones = (t for t in trials[self._settled :] if t.number != trial.number)
        running = {i for other in open_ones if (i := self._identity_of(other)) is not None}
        return self._known | running if running else self._known
