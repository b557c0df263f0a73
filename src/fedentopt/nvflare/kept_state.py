"""What a label-aware controller keeps across jobs: taken from it after each round, given back to the next one.

NVFlare's hooks around a job (its start, the model it begins with, the model it saves) are where this happens; where it
lies on disk and how is `state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.workflows.model_controller import ModelController

from fedentopt.errors import InputError
from fedentopt.nvflare import state as states
from fedentopt.nvflare.census import Census
from fedentopt.nvflare.members import Sites
from fedentopt.nvflare.replies import as_array
from fedentopt.server.backoff import Backoff
from fedentopt.server.local_training import LocalTraining
from fedentopt.server.state_files import kept_alone

MODEL, CONTROLS, MEMORY = "model", "controls", "memory"
AVERAGING = ("aggregator", "aggregation_weights", "exclude_vars", "fedprox_mu")
"""Options of NVFlare's FedAvg that make a study another one; how long it runs and what else is written may change."""
PATIENCE = 30.0  # seconds: the job of a server that was killed notices that by itself
EARLY_STOP = ("num_fl_rounds_without_improvement", "best_target_metric_value")


class KeptState(ModelController):
    """The part of a controller that goes on where the job before stood. `state` is the name it is kept under."""

    state: str | None
    head: list[str] | None
    loss_metric: str
    steps: LocalTraining | None
    members: Sites
    census: Census
    failing: Backoff
    _rounds_done = 0
    _folder: Path | None = None
    _held: ExitStack | None = None  # keeps other jobs away from the folder
    _restored: states.State | None = None
    _unsaved: FLModel | None = None  # the model after a round whose state is not on disk yet
    _all_rounds: tuple[int, int] | None = None  # first and number of all rounds, where this job has the rest of them

    def start_controller(self, fl_ctx: FLContext) -> None:
        """NVFlare's start, and the state of the job before where there is one."""
        super().start_controller(fl_ctx)
        if self.state is None:
            return
        try:
            self._folder = states.make_folder(Path(self.engine.get_workspace().get_root_dir()), self.state)
            self._held = ExitStack()
            self._held.enter_context(kept_alone(self._folder, "state", PATIENCE))
            found = states.load(self._folder)
            if found is not None:
                self._restore(found)
        except InputError as error:
            self._folder = None
            self.error(str(error))  # NVFlare may keep the text of exceptions to itself
            raise  # which ends the job

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """NVFlare's end; the state is another job's to continue from here on."""
        super().stop_controller(fl_ctx)
        if self._held is not None:
            self._held.close()

    def _restore(self, found: states.State) -> None:
        kind = found.meta["controller"]
        if kind != type(self).__name__:
            raise InputError(f"state: written by {kind}, but continued by {type(self).__name__}")
        if found.rounds > self.num_rounds:
            raise InputError(
                f"num_rounds: {self.num_rounds}, but the state is already at round {found.rounds}; accepted: at least "
                "that many, or another state"
            )
        if "head" in self.members.selector.needs and found.meta.get("local", False) != (self.steps is not None):
            with_, now = ("with", "without") if found.meta.get("local", False) else ("without", "with")
            raise InputError(
                f"local: the state was written {with_} it and is continued {now} it, and changes of last layers cannot "
                "be compared across that; accepted: as it was, or another state"
            )
        before = found.meta.get("settings")  # none in states of versions that did not look
        for name, here in self._settings().items():
            if before is not None and here != before[name]:
                raise InputError(
                    f"{name}: {here!r}, but the state was written with {before[name]!r}; accepted: the same, or "
                    "another state"
                )
        self.members.load_state_dict(found.meta["members"], found.arrays[MEMORY])
        self.census.pauses.load_state_dict(states.read_pauses(found.meta["silent"]))
        self.failing.load_state_dict(states.read_pauses(found.meta["failing"]))
        for name, value in found.meta["early_stop"].items():
            setattr(self, name, value)
        self._rounds_done = found.rounds
        self._restored = found
        self._all_rounds = self.start_round, self.num_rounds
        self.start_round += found.rounds
        self.num_rounds -= found.rounds
        given: Any = getattr(self, "model", None)
        if given is not None:  # FedAvg with a model of its own asks no persistor
            params = given.params if isinstance(given, FLModel) else given
            self.model = FLModel(params_type=ParamsType.FULL, params=_fill(params, found.arrays[MODEL]))
        self.info(f"continuing after {found.rounds} round(s) of state {self.state!r}")

    def _settings(self) -> dict[str, Any]:
        """What else a study is continued with as it was begun, as JSON holds it."""
        needs = self.members.selector.needs
        learnt: dict[str, Any] = {
            "head": self.head if "head" in needs else None,
            "loss_metric": self.loss_metric if "loss" in needs else None,
        }
        return learnt | {name: _plain(getattr(self, name, None)) for name in AVERAGING}

    def initialize(self, fl_ctx: FLContext) -> None:
        """NVFlare's, then SCAFFOLD's control terms as they were."""
        super().initialize(fl_ctx)
        controls = getattr(self, "_global_ctrl_weights", None)
        if self._restored is not None and controls is not None:
            self._global_ctrl_weights = _fill(controls, self._restored.arrays[CONTROLS], "control terms")

    def load_model(self) -> FLModel:
        """The persistor's model, with the numbers of the state where there is one."""
        model = super().load_model()
        if self._restored is None or model is None:
            return model
        try:
            model.params = _fill(model.params, self._restored.arrays[MODEL])
        except InputError as error:
            self._folder = None
            self.error(str(error))
            raise
        learnable = make_model_learnable(weights=model.params, meta_props=model.meta)
        self.fl_ctx.set_prop(AppConstants.GLOBAL_MODEL, learnable, private=True, sticky=True)
        return model

    def tell_rounds(self, model: FLModel) -> None:
        """Let sites be told the rounds of the whole study and not of this job: scripts decay step sizes by them."""
        if self._all_rounds is not None:
            model.start_round, model.total_rounds = self._all_rounds

    def save_model(self, model: FLModel) -> None:
        """The persistor's save, then the state, so that a state never speaks of a model that was not kept."""
        super().save_model(model)
        if self._unsaved is not None:
            self._save(model if self._unsaved is model else self._unsaved)

    def _save(self, model: FLModel) -> None:
        self._unsaved = None
        if self._folder is None:
            return
        controls = getattr(self, "_global_ctrl_weights", None) or {}
        states.save(
            self._folder,
            states.State(
                rounds=self._rounds_done,
                arrays={
                    MODEL: {name: as_array(value) for name, value in model.params.items()},
                    CONTROLS: {name: as_array(value) for name, value in controls.items()},
                    MEMORY: self.members.selector.arrays(),
                },
                meta={
                    "controller": type(self).__name__,
                    "members": self.members.state_dict(),
                    "local": self.steps is not None,
                    "settings": self._settings(),
                    "silent": states.write_pauses(self.census.pauses.state_dict()),
                    "failing": states.write_pauses(self.failing.state_dict()),
                    "early_stop": {name: _plain(getattr(self, name)) for name in EARLY_STOP if hasattr(self, name)},
                },
            ),
        )


def _fill(own: Mapping[str, Any], saved: Mapping[str, np.ndarray], what: str = "model") -> dict[str, Any]:
    """The saved numbers in the types of `own`; another model is refused, naming the difference."""
    shapes = {name: as_array(value).shape for name, value in own.items()}
    if what == "model" and shapes:
        for name in [*shapes, *saved]:
            before = saved[name].shape if name in saved else None
            if shapes.get(name) != before:
                raise InputError(f"state: holds another model: {name} is {before}, not {shapes.get(name)}")
    return {
        name: own[name].new_tensor(array) if hasattr(own.get(name), "new_tensor") else array
        for name, array in saved.items()
    }


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__qualname__
