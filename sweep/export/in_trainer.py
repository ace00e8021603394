"""What a file for another trainer would need there, and the best that the trainer can do instead.

A trial is of the step that a study measured; what a file makes of it in its trainer is predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qlora_sweep.reports import format as units
from qlora_sweep.search_spaces.config import TrialConfig, as_options
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.gpus import find_gpu, match_product
from qlora_sweep.search_spaces.kinds import TrainerName
from qlora_sweep.search_spaces.loading import with_fixed
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.preference import TIE
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.search_spaces.trainer_spaces import for_trainer
from qlora_sweep.search_spaces.trainers import TRAINERS, Trainer
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.ranking import rank_study
from qlora_sweep.storage.records import TrialRecord, Verdict
from qlora_sweep.sweep.planning.candidates import own_space
from qlora_sweep.sweep.planning.survey import survey
from qlora_sweep.sweep.predict.building import build_forecaster, shapes_of_study
from qlora_sweep.sweep.predict.forecast import Forecast, Forecaster
from qlora_sweep.sweep.predict.memory.prediction import Fit
from qlora_sweep.sweep.predict.memory.predictor import MemoryPredictor

_TASK_KEYS = ("lora_rank", "target_modules", "seq_len")
"""Settings that say what is trained: the best that a trainer can do has those of the trial."""


@dataclass(frozen=True)
class Best:
    """The best that a trainer can do of what a study trains."""

    forecast: Forecast
    """Of its configuration, in that trainer."""
    trial: TrialRecord | None
    """The trial that measured it; None where it is only predicted."""

    @property
    def words(self) -> str:
        """The configuration, where it comes from, and what is predicted of it."""
        origin = "predicted"
        if self.trial is not None:
            origin = f"trial {self.trial.number}"
        config = self.forecast.config
        options = " ".join(as_options(config.changes_from(TrialConfig(trainer=config.trainer))))
        return f"{origin}: {figures(self.forecast)} ({options})"


def figures(forecast: Forecast) -> str:
    """Return what is predicted of a configuration: its memory of the budget, and its speed."""
    memory = forecast.memory
    assert memory is not None, "its memory is predicted"
    budget = forecast.forecaster.budget_bytes
    needed = memory.peak_allocated_bytes
    if not memory.is_likely(budget):
        needed = memory.needed_bytes(budget)
    words = f"{units.gib(needed)} of {units.gib(budget)}"
    if forecast.tokens_per_second is None:
        return words
    return f"{words}, {units.rate(forecast.tokens_per_second)} tokens/s"


class InTrainer:
    """A study's trials as another trainer would train them.

    Args:
        snapshot: the study, of a GPU.
        name: the trainer.
        predictor: of the model's memory on the study's GPU.

    Raises:
        EnvironmentFault: the study's dataset is not on this machine any more.
    """

    def __init__(
        self, snapshot: StudySnapshot, name: TrainerName, predictor: MemoryPredictor
    ) -> None:
        self._snapshot = snapshot
        self.name: TrainerName = name
        self.trainer: Trainer = TRAINERS[name]
        self._model = ModelSpec.from_json(snapshot.definition.model)
        # Speed is of the GPU that the study is for, whatever stood in for it.
        target = replaced(snapshot.definition.target, emulated_on=None)
        self._gpu = find_gpu(target.gpu)
        try:
            shapes = shapes_of_study(snapshot.definition)
        except EnvironmentFault as error:
            raise EnvironmentFault("the study's dataset is not on this machine any more") from error
        self.forecaster: Forecaster = build_forecaster(
            self._model, target, shapes=shapes, predictor=predictor
        )

    def forecast(self, config: TrialConfig) -> Forecast:
        """Return what is predicted of what the trainer's file trains in a configuration's place."""
        run = self.trainer.as_run(config, model=self._model, half=self._gpu.half)
        return self.forecaster.expect(run.changed(trainer=self.name))

    def why_unknown(self, config: TrialConfig) -> str | None:
        """Return why nothing is predicted of that; None where it is."""
        if config.method not in self.trainer.runs["method"]:
            return f"{self.trainer.label}'s loss of pairs is not predicted"
        forecast = self.forecast(config)
        has_dataset = self.forecaster.shapes is not None
        kind = self._model.model_type
        why = self.trainer.unmeasured(forecast.config, kind, has_dataset=has_dataset)
        if why is None and forecast.memory is None:
            why = "; ".join(forecast.notes)
        return why

    def is_too_large(self, config: TrialConfig) -> bool:
        """Whether that is predicted to run out of memory."""
        memory = self.forecast(config).memory
        if memory is None:
            return False
        budget = self.forecaster.budget_bytes
        return memory.fits(budget) is Fit.NO or not memory.is_likely(budget)

    def best(self, config: TrialConfig) -> Best | None:
        """Return the best that the trainer can do of what a configuration trains: the fastest of
        the trials that it can run as they are, unless more is predicted of another configuration of
        the study's space than a tie; None where nothing fits."""
        measured = self._measured_best(config)
        planned = self._planned_best(config)
        if measured is None or planned is None:
            return measured or planned
        if _speed(planned) > _speed(measured) * (1.0 + TIE):
            return planned
        return measured

    def _measured_best(self, config: TrialConfig) -> Best | None:
        found: list[Best] = []
        for record in rank_study(self._snapshot).records:
            if record.verdict is not Verdict.FITS or not _is_same_task(record.config, config):
                continue
            if any(self.trainer.lacks(record.config, self._model)):
                continue
            forecast = self.forecast(record.config)
            if forecast.violation is None and forecast.fit is Fit.YES:
                found.append(Best(forecast, record))
        return max(found, key=_speed, default=None)

    def _planned_best(self, config: TrialConfig) -> Best | None:
        """Return what is predicted to be best of the study's space, or of the GPU's own where
        nothing of that fits."""
        fixed = {key: getattr(config, key) for key in _TASK_KEYS}
        if config.effective_batch_size is not None:
            fixed["effective_batch_size"] = config.effective_batch_size
        space = self._snapshot.definition.space
        found = self._recommended(space, fixed)
        if found is not None or config.method != "sft":
            # A GPU's own space trains on texts.
            return found
        try:
            own, _ = own_space(self._gpu.name, space.model)
        except InputError:
            # The model is not here any more.
            return None
        return self._recommended(own, fixed)

    def _recommended(self, space: SearchSpace, fixed: Mapping[str, Any]) -> Best | None:
        try:
            typed = {**fixed, "trainer": self.name}
            supported = for_trainer(space, self._model, is_preset=True, fixed_settings=typed).space
            searched = with_fixed(supported, fixed)
            if isinstance(searched, TrialConfig):
                forecast: Forecast | None = self.forecaster.expect(searched)
            else:
                forecast = survey(searched, self.forecaster).recommended
        except InputError:
            # Nothing of the space is what the trainer can run, or nothing of it is predicted.
            return None
        if forecast is None or forecast.fit is not Fit.YES:
            return None
        return Best(forecast, None)


def _speed(best: Best) -> float:
    return best.forecast.tokens_per_second or 0.0


def _is_same_task(one: TrialConfig, other: TrialConfig) -> bool:
    return all(getattr(one, key) == getattr(other, key) for key in _TASK_KEYS)


def is_predicted(snapshot: StudySnapshot) -> bool:
    """Whether the GPU of a study is one whose memory and speed are predicted."""
    target = snapshot.definition.target
    return target.is_on_gpu and match_product(target.gpu) is not None
