"""An NVFlare server in one process, whose sites are functions: NVFlare's own controllers run on it, no sockets.

A site is `f(task_name, model) -> Shareable | None`; None stands for a site that never answers.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.abstract.model import ModelLearnable, ModelLearnableKey, make_model_learnable
from nvflare.app_common.abstract.model_persistor import ModelPersistor
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

Site = Callable[[str, Any], Shareable | None]


class MemoryPersistor(ModelPersistor):
    """Keeps the model it was given last; another one is what a new job begins with."""

    def __init__(self, start: Mapping[str, np.ndarray]) -> None:
        super().__init__()
        self.model = {name: np.array(value) for name, value in start.items()}
        self.saved = 0

    def load_model(self, fl_ctx: FLContext) -> ModelLearnable:
        return make_model_learnable(copy.deepcopy(self.model), {})

    def save_model(self, model: ModelLearnable, fl_ctx: FLContext) -> None:
        self.model = dict(model[ModelLearnableKey.WEIGHTS])
        self.saved += 1


class FakeServer:
    """Runs a controller's job over the sites. `away` names sites that NVFlare deems disconnected."""

    def __init__(self, folder: Path, sites: Mapping[str, Site], start: Mapping[str, np.ndarray]) -> None:
        for name in ("startup", "local"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self.workspace = Workspace(root_dir=str(folder), site_name="server")
        self.sites = dict(sites)
        self.persistor = MemoryPersistor(start)
        self.away: set[str] = set()
        self.asked: list[tuple[str, tuple[str, ...], int]] = []  # task, targets, timeout
        self.panics: list[str] = []
        self.abort = Signal()

    def run(self, controller: Any) -> Any:
        """One job to its end; what NVFlare would have ended it for is in `panics`."""
        manager = FLContextManager(engine=self, identity_name="server", job_id="job")
        with manager.new_context() as fl_ctx:
            fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, self.workspace, private=True)
            controller.communicator = self
            try:
                controller.initialize(fl_ctx)
                controller.control_flow(self.abort, fl_ctx)
            except Exception as error:  # as NVFlare's server does it
                self.panics.append(str(error))
            finally:
                controller.stop_controller(fl_ctx)
        return controller

    # --- what a controller asks of its engine
    def get_clients(self) -> list[Client]:
        return [Client(name, name) for name in reversed(self.sites)]  # in no order that a selection may rely on

    def get_component(self, name: str) -> Any:
        return self.persistor if name == "persistor" else None

    def get_workspace(self) -> Workspace:
        return self.workspace

    def get_cell(self) -> None:
        return None

    @contextlib.contextmanager
    def new_context(self) -> Iterator[FLContext]:
        yield FLContextManager(engine=self, identity_name="server", job_id="job").new_context()

    def fire_event(self, event: str, fl_ctx: FLContext) -> None:
        if event == EventType.FATAL_SYSTEM_ERROR:
            self.panics.append(str(fl_ctx.get_prop(FLContextKey.EVENT_DATA)))
            self.abort.trigger(True)

    # --- and of its communicator
    def broadcast(
        self,
        task: Task,
        fl_ctx: FLContext,
        targets: list[str],
        min_responses: int = 1,
        wait_time_after_min_received: int = 0,
    ) -> None:
        self.asked.append((task.name, tuple(targets), task.timeout))
        for name in targets:
            reply = self.sites[name](task.name, _model(task))
            if reply is None:
                assert task.timeout, f"task {task.name} would wait for {name} without end"
                continue
            answered = ClientTask(client=Client(name, name), task=task)
            answered.result = reply
            task.result_received_cb(client_task=answered, fl_ctx=fl_ctx)

    def broadcast_and_wait(
        self, task: Task, fl_ctx: FLContext, targets: list[str], min_responses: int = 1,
        wait_time_after_min_received: int = 0, abort_signal: Signal | None = None,
    ) -> None:  # fmt: skip
        self.broadcast(task, fl_ctx, targets, min_responses)

    def get_num_standing_tasks(self) -> int:
        return 0

    def get_client_disconnect_time(self, name: str) -> float | None:
        return 1.0 if name in self.away else None


def _model(task: Task) -> FLModel | None:
    return None if task.name == "label_counts" else FLModelUtils.from_shareable(task.data)
