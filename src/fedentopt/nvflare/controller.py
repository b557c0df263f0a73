"""Label-aware selection for NVFlare's model controllers.

    class LabelAwareFedAvg(LabelAware, FedAvg): ...        # FedAvg, Scaffold, and what descends from them

`LabelAware` overrides `sample_clients`: it asks sites it does not know for their label counts (task `label_counts`),
lets a selector of `fedentopt.selection` pick among the known sites that are connected, and returns their names.
Everything else is the controller's own. Around it, so that no site stops a federation:

- a training task ends after `train_timeout` seconds with the replies that came;
- a reply is checked (`replies`) before it is aggregated, a wrong one is left out and named in the log;
- a site that fails is left alone for a growing number of rounds (`server.backoff`);
- a round without a usable reply, or whose average is not finite, leaves the model as it was.

With a `state` name the server writes round, model, counts and memory after every round (`kept_state`); a job submitted
again under that name, after a restart, goes on with the next round and picks the cohorts it would have picked.

NVFlare builds controllers from JSON: every argument is a number, text, list or dict, and kept under its own name.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AlgorithmConstants, AppConstants
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_common.workflows.scaffold import Scaffold

from fedentopt.errors import InputError
from fedentopt.nvflare import state as states
from fedentopt.nvflare.census import Census
from fedentopt.nvflare.kept_state import KeptState
from fedentopt.nvflare.members import Sites
from fedentopt.nvflare.options import check_class, check_options, make_selector, read_local
from fedentopt.nvflare.replies import check_model, stays_finite
from fedentopt.nvflare.training import RoundSelection, Training, site_of
from fedentopt.own_hooks import check_attributes
from fedentopt.server.backoff import Backoff


class NoClientsError(RuntimeError):
    """Nobody to train with: the sites are gone, or none of them has told its label counts."""


class LabelAware(KeptState):
    """Mixin: the cohort is picked by label counts. Put it before the controller it joins.

    cohort_size     sites per round (M); it takes the place of num_clients
    num_classes     length of a label count vector (C)
    buffer_size     FedEntOpt's buffer (Q): sites that trained lately and are kept out for a while
    seed, target    of `EntropySelector`
    selector        another selector: its name, or package.module:Class, with `selector_args`
    size_cap        most samples a site is taken for when it is picked, times the median site's; 0: no limit
    exclude         names of sites that never train
    query_timeout   longest wait for label counts in seconds; a site that gave none before is waited for 10 s at most
    train_timeout   longest wait for a round's training in seconds; 0: NVFlare's own wait, for as long as a site lives
    node_timeout    longest wait for a connected site whose counts are known, in seconds; then the job ends
    state           name under which the server keeps its state across jobs
    head            names of the last layer's weight and bias, for selectors that need it; else the last that fit
    local           how all sites train (`server.local_training`): {"lr": 0.1, "epochs": 5, "batch_size": 32} or
                    {"lr": 0.1, "steps": 100}; HiCS-FL and DivFL then compare changes of last layers per step size
    loss_metric     the metric that is a site's training loss, for selectors that need it
    """

    poll_interval = 1.0  # seconds between two looks at who is connected
    _always_serialize_args = ("ignore_result_error",)

    def __init__(
        self,
        *args: Any,
        cohort_size: int,
        num_classes: int,
        buffer_size: int = 0,
        seed: int = 0,
        target: Sequence[float] | None = None,
        selector: str | None = None,
        selector_args: Mapping[str, Any] | None = None,
        size_cap: float = 10.0,
        exclude: Sequence[str] | None = None,
        query_timeout: int = 300,
        train_timeout: int = 3600,
        node_timeout: int = 600,
        state: str | None = None,
        head: Sequence[str] | None = None,
        local: Mapping[str, Any] | None = None,
        loss_metric: str = "loss",
        **kwargs: Any,
    ) -> None:
        check_class(type(self), KeptState, state)
        check_options(locals(), kwargs)
        kwargs["num_clients"] = cohort_size
        if kwargs.get("ignore_result_error") is None:
            kwargs["ignore_result_error"] = True  # a site's error is that site's failure
        made = make_selector(cohort_size, num_classes, buffer_size, seed, target, selector, selector_args)
        steps = read_local(local, made)
        super().__init__(*args, **kwargs)
        joined = dict(vars(self))
        self.cohort_size, self.num_classes, self.buffer_size, self.seed = cohort_size, num_classes, buffer_size, seed
        self.target, self.selector = None if target is None else list(target), selector
        self.selector_args = None if selector_args is None else dict(selector_args)
        self.size_cap = size_cap
        self.exclude = None if exclude is None else list(exclude)
        self.query_timeout, self.train_timeout, self.node_timeout = query_timeout, train_timeout, node_timeout
        self.state = None if state is None else states.check_name(state)
        self.head, self.loss_metric = None if head is None else list(head), loss_metric
        self.local = None if local is None else dict(local)

        self.steps = steps
        self.members = Sites(made, num_classes, size_cap)
        self.census = Census(num_classes, query_timeout)
        self.failing = Backoff()
        self.history: list[RoundSelection] = []
        self._open: Training | None = None  # the round whose cohort is training
        self._types: Counter[Any] = Counter()  # of replies so far
        self._shapes: dict[str, tuple[int, ...]] = {}  # of metrics, in the last round
        self._told_no_loss = False
        check_attributes(type(self), joined, vars(self))

    # --- the model that a job begins with
    def start_controller(self, fl_ctx: FLContext) -> None:
        """NVFlare's start; a model of the controller's own is looked at."""
        super().start_controller(fl_ctx)
        given: Any = getattr(self, "model", None)
        if given is not None:  # FedAvg then asks no persistor
            self._check_model(given.params if isinstance(given, FLModel) else given)

    def load_model(self) -> FLModel:
        """The persistor's model, looked at before any site is asked for anything."""
        model = super().load_model()
        if model is not None:
            self._check_model(model.params)
        return model

    def _check_model(self, params: Mapping[str, Any] | None) -> None:
        try:
            check_model(self.members.selector, params or {}, self.num_classes, self._named_head)
        except InputError as error:
            self.error(str(error))  # NVFlare may keep the text of exceptions to itself
            raise  # which ends the job

    @property
    def _named_head(self) -> tuple[str, str | None] | None:
        return None if self.head is None else (self.head[0], self.head[1] if len(self.head) > 1 else None)

    # --- a round
    def sample_clients(self, num_clients: int | None = None) -> list[str]:
        """The names of this round's sites, in the order picked; the number is `cohort_size`, whatever is asked for."""
        if self._unsaved is not None:  # a controller that stops early does not save every round
            self._save(self._unsaved)
        available = self._gather()
        cohort = self.members.select(available)
        if cohort.sample_limits is not None:
            raise InputError(
                f"selector: {type(self.members.selector).__name__} lets sites train on part of their data, which a "
                "task does not say; accepted: selectors of whole clients, such as fedentopt and random"
            )
        if cohort.weights is not None and not self.history:
            self.warning(
                f"{type(self.members.selector).__name__} defines weights for the average, which NVFlare's controllers "
                "do not take: sites weigh what their replies say"
            )
        selection = RoundSelection(self._rounds_done, cohort)
        self.history.append(selection)
        self._open = Training(
            selection, self.members, self._types, self._named_head, self.loss_metric, self.steps, self._shapes
        )
        names = selection.sites
        self.info(
            f"round {self._rounds_done}: cohort {names}, {cohort.entropy:.3f} bits, {cohort.classes_covered} classes"
        )
        if self.members.selector.falls_short(cohort, len(available)):
            self.warning(f"round {self._rounds_done}: cohort of {len(names)} instead of {self.cohort_size} sites")
        if cohort.released:
            self.info(f"released from the buffer early, since others are away: {list(cohort.released)}")
        return names

    def _gather(self) -> list[str]:
        """Learn the counts of unknown sites; return the connected ones that are known, those that failed last if any
        other is left."""
        deadline = time.monotonic() + self.node_timeout
        while True:
            connected = self._connected()
            unknown = [site for site in connected if site not in self.members.reports]
            self.members.take(self.census.ask(self, unknown, self._rounds_done, urgent=not self.members.reports))
            known = [site for site in connected if site in self.members.reports]
            available = [site for site in known if self.failing.over(site, self._rounds_done)]
            if available or known:
                return available or known
            if self.abort_signal.triggered:
                raise NoClientsError("the job was aborted")
            if time.monotonic() > deadline:
                raise NoClientsError(
                    f"round {self._rounds_done}: no site with known label counts is connected ({len(connected)} are)"
                )
            time.sleep(self.poll_interval)

    def _connected(self) -> list[str]:
        names = sorted(client.name for client in self.engine.get_clients())
        left_out = set(self.exclude or ())
        return [name for name in names if name not in left_out and not self.get_client_disconnect_time(name)]

    # --- training, as FedAvg (with a callback) and SCAFFOLD (waiting) send it
    def send_model(
        self,
        task_name: str = AppConstants.TASK_TRAIN,
        data: FLModel = None,
        targets: list[str] | None = None,
        min_responses: int | None = None,
        timeout: int = 0,
        callback: Callable[[FLModel], Any] | None = None,
    ) -> None:
        """NVFlare's, for a cohort with a time limit and with replies that were checked."""
        training = self._training(targets)
        if training is not None and callback is not None:
            timeout = timeout or self.train_timeout
            self.tell_rounds(data)
            training.begin(data)
            callback = partial(training.receive, callback)
        super().send_model(
            task_name=task_name,
            data=data,
            targets=targets,
            min_responses=min_responses,
            timeout=timeout,
            callback=callback,
        )

    def send_model_and_wait(
        self,
        task_name: str = AppConstants.TASK_TRAIN,
        data: FLModel = None,
        targets: list[str] | None = None,
        min_responses: int | None = None,
        timeout: int = 0,
    ) -> list[FLModel]:
        """NVFlare's, for a cohort with a time limit and with the replies that are usable."""
        training = self._training(targets)
        if training is not None:
            timeout = timeout or self.train_timeout
            self.tell_rounds(data)
            training.begin(data)
        results = super().send_model_and_wait(
            task_name=task_name, data=data, targets=targets, min_responses=min_responses, timeout=timeout
        )
        if training is None:
            return list(results)
        usable: list[FLModel] = []
        for result in results:
            training.receive(usable.append, result)
        training.settle()
        # In the order of the cohort, so that the sum does not depend on who was fastest.
        order = {name: place for place, name in enumerate(targets or ())}
        return sorted(usable, key=lambda result: order.get(site_of(result), len(order)))

    def _training(self, targets: Sequence[str] | None) -> Training | None:
        """The round's training where this is what is sent."""
        return self._open if self._open is not None and list(targets or ()) == self._open.selection.sites else None

    def get_num_standing_tasks(self) -> int:
        """NVFlare's; where nobody is awaited any more, replies that were held are handed on."""
        standing = int(super().get_num_standing_tasks())
        if not standing and self._open is not None:
            self._open.settle()
        return standing

    # --- after training
    def aggregate(self, results: list[FLModel], aggregate_fn: Callable[..., FLModel] | None = None) -> FLModel:
        """The joined controller's; where nobody's reply was usable, a model without parameters."""
        if results:
            return super().aggregate(results, aggregate_fn)
        return FLModel(params={}, meta={AlgorithmConstants.SCAFFOLD_CTRL_DIFF: {}, "nr_aggregated": 0})

    def _get_aggregated_result(self) -> FLModel:
        """FedAvg's; as `aggregate`."""
        if self._open is None or self._open.selection.answered:
            return super()._get_aggregated_result()
        return FLModel(params={}, meta={"nr_aggregated": 0}, current_round=self.current_round)

    def update_model(self, model: FLModel, aggr_result: FLModel) -> FLModel:
        """The joined controller's, unless there is nothing to take over; and the end of the round for the selector."""
        change = (aggr_result.meta or {}).get(AlgorithmConstants.SCAFFOLD_CTRL_DIFF) or {}
        before = model.params if aggr_result.params_type == ParamsType.DIFF else {}
        if not aggr_result.params:
            why = "no usable reply"
        elif not stays_finite(before, aggr_result.params):
            why = "the average is not finite"
        elif not stays_finite(getattr(self, "_global_ctrl_weights", {}), change):
            why = "the control terms would not be finite"
        else:
            why = ""
            model = super().update_model(model, aggr_result)
        if why:
            self.warning(f"round {self._rounds_done}: {why}, the model stays as it was")
            aggr_result.meta = {**(aggr_result.meta or {}), AlgorithmConstants.SCAFFOLD_CTRL_DIFF: {}}
        self._close_round()
        self._unsaved = model
        return model

    def _close_round(self) -> None:
        training, self._open = self._open, None
        if training is not None:
            last = training.selection
            self._shapes = training.usual_shapes() if last.answered else self._shapes
            for site in last.sites:
                if site in last.answered:
                    self.failing.answered(site)
                    continue
                reason = last.failed.setdefault(site, "no usable answer in time")
                until = self._rounds_done + 1 + self.failing.failed(site, self._rounds_done)
                self.warning(
                    f"round {last.round}: site {site} did not train: {reason} (picked again from round {until} on)"
                )
            selector = self.members.selector
            if selector.needs:
                seen = training.observations
                selector.observe({site: seen[site] for site in last.sites if site in seen})
            if training.told_no_loss and not self._told_no_loss:
                self._told_no_loss = True
                self.warning(
                    f"site {training.told_no_loss[0]} sends no metric {self.loss_metric!r}, which selector "
                    f"{selector.name} needs; it learns nothing of such sites"
                )
        self._rounds_done += 1


class LabelAwareFedAvg(LabelAware, FedAvg):
    """NVFlare's FedAvg with cohorts of maximum label entropy. Options: see `LabelAware` and NVFlare's `FedAvg`."""


class LabelAwareScaffold(LabelAware, Scaffold):
    """NVFlare's SCAFFOLD with cohorts of maximum label entropy. Options: see `LabelAware` and NVFlare's `Scaffold`."""
