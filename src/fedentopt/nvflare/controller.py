"""Label-aware selection for NVFlare's model controllers.

    class LabelAwareFedAvg(LabelAware, FedAvg): ...        # FedAvg, Scaffold, and what descends from them

`LabelAware` overrides `sample_clients`: it asks sites it does not know for their label counts (task `label_counts`),
lets a selector of `fedentopt.selection` pick among the known sites that are connected, and returns their names.
Everything else is the controller's own. Around it, so that no site stops a federation:

- a training task ends after `train_timeout` seconds with the replies that came;
- a reply is checked (`replies`) before it is aggregated, a wrong one is left out and named in the log;
- a site that fails is left alone for a growing number of rounds (`members.Pauses`);
- a round without a usable reply, or whose average is not finite, leaves the model as it was.

With a `state` name the server writes round, model, counts and memory after every round (`state`); a job submitted again
under that name, after a restart, goes on with the next round and picks the cohorts it would have picked.

NVFlare builds controllers from JSON: every argument is a number, text, list or dict, and kept under its own name.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.app_constant import AlgorithmConstants, AppConstants
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_common.workflows.model_controller import ModelController
from nvflare.app_common.workflows.scaffold import Scaffold

from fedentopt.errors import InputError
from fedentopt.nvflare import state as states
from fedentopt.nvflare.members import Members, Pauses
from fedentopt.nvflare.replies import (
    SERVED,
    as_array,
    check_reply,
    find_head,
    observation,
    stays_finite,
    usable_metrics,
)
from fedentopt.nvflare.report import TASK, Report, read_report
from fedentopt.own_code import is_import_path, make_own
from fedentopt.selection import SELECTORS, Cohort, EntropySelector, Observation, Selector

MODEL, CONTROLS, MEMORY = "model", "controls", "memory"
EARLY_STOP = ("num_fl_rounds_without_improvement", "best_target_metric_value")
LONGEST_REASON = 300  # characters of a site's failure that reach the log
RETRY_SECONDS = 10  # longest wait for a site that gave no counts before: it must not hold up those that do


class NoClientsError(RuntimeError):
    """Nobody to train with: the sites are gone, or none of them has told its label counts."""


@dataclass
class RoundSelection:
    """A round's cohort and what became of it: sites whose reply was used, and why the others' was not."""

    round: int
    cohort: Cohort
    answered: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


class LabelAware(ModelController):
    """Mixin: the cohort is picked by label counts. Put it before the controller it joins.

    cohort_size     sites a round (M); it takes the place of num_clients
    num_classes     length of a label count vector (C)
    buffer_size     FedEntOpt's buffer (Q): sites that trained lately and are kept out for a while
    seed, target    of `EntropySelector`
    selector        another selector: its name, or package.module:Class, with `selector_args`
    exclude         names of sites that never train
    query_timeout   longest wait for label counts in seconds; a site that gave none before is waited for 10 s at most
    train_timeout   longest wait for a round's training in seconds; 0: NVFlare's own wait, for as long as a site lives
    node_timeout    longest wait for a connected site whose counts are known, in seconds; then the job ends
    state           name under which the server keeps its state across jobs
    head            names of the last layer's weight and bias, for selectors that need it; else the last that fit
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
        exclude: Sequence[str] | None = None,
        query_timeout: int = 300,
        train_timeout: int = 3600,
        node_timeout: int = 600,
        state: str | None = None,
        head: Sequence[str] | None = None,
        loss_metric: str = "loss",
        **kwargs: Any,
    ) -> None:
        self._check_joined(state)
        for name, value, least in (
            ("num_classes", num_classes, 1),
            ("query_timeout", query_timeout, 1),
            ("train_timeout", train_timeout, 0),
            ("node_timeout", node_timeout, 1),
        ):
            _check_whole(name, value, least)
        if kwargs.setdefault("num_clients", cohort_size) != cohort_size:
            raise InputError(
                f"num_clients: {kwargs['num_clients']!r} has no place here; cohort_size says how many sites train"
            )
        if kwargs.get("ignore_result_error") is None:
            kwargs["ignore_result_error"] = True  # a site's error is that site's failure
        made = _make_selector(cohort_size, num_classes, buffer_size, seed, target, selector, selector_args)
        beyond = ", ".join(sorted(made.needs - SERVED))
        if beyond:
            raise InputError(
                f"selector: {made.name} needs {beyond}, which NVFlare's sites are not asked for; accepted: selectors "
                f"that need nothing beyond label counts and {', '.join(sorted(SERVED))}"
            )
        if head is not None and (isinstance(head, str) or not 1 <= len(head) <= 2):
            raise InputError(f"head: {head!r} is not accepted; accepted: names of the last layer's weight and bias")
        super().__init__(*args, **kwargs)
        self.cohort_size, self.num_classes, self.buffer_size, self.seed = cohort_size, num_classes, buffer_size, seed
        self.target, self.selector = None if target is None else list(target), selector
        self.selector_args = None if selector_args is None else dict(selector_args)
        self.exclude = None if exclude is None else list(exclude)
        self.query_timeout, self.train_timeout, self.node_timeout = query_timeout, train_timeout, node_timeout
        self.state = None if state is None else states.check_name(state)
        self.head, self.loss_metric = None if head is None else list(head), loss_metric

        self.members = Members(made, num_classes)
        self.silent, self.failing = Pauses(), Pauses()
        self.history: list[RoundSelection] = []
        self._rounds_done = 0
        self._folder: Path | None = None
        self._restored: states.State | None = None
        self._open: RoundSelection | None = None  # the round whose cohort is training
        self._unsaved: FLModel | None = None
        self._start_model: dict[str, np.ndarray] = {}
        self._observations: dict[str, Observation] = {}
        self._told_no_loss = False
        self._types: Counter[Any] = Counter()  # of replies so far
        self._metric_shapes: dict[str, tuple[int, ...]] = {}

    @classmethod
    def _check_joined(cls, state: str | None) -> None:
        """Refuse controllers whose sites return something else than models, and states that would forget something."""
        joined = next((each for each in cls.__mro__ if not issubclass(each, LabelAware)), object)
        if not issubclass(joined, FedAvg | Scaffold):
            raise InputError(
                f"{cls.__name__}: {joined.__name__} cannot be joined; accepted: FedAvg, Scaffold and what descends "
                "from them"
            )
        if state is not None and joined not in (FedAvg, Scaffold):
            raise InputError(
                f"state: {joined.__name__} may remember more than is kept; accepted with a state: FedAvg, Scaffold"
            )

    # --- beginning, and going on
    def start_controller(self, fl_ctx: FLContext) -> None:
        """NVFlare's start, and the state of the job before where there is one."""
        super().start_controller(fl_ctx)
        if self.state is None:
            return
        try:
            self._folder = states.make_folder(Path(self.engine.get_workspace().get_root_dir()), self.state)
            found = states.load(self._folder)
            if found is not None:
                self._restore(found)
        except InputError as error:
            self._folder = None
            self.error(str(error))  # NVFlare may keep the text of exceptions to itself
            raise  # which ends the job

    def _restore(self, found: states.State) -> None:
        kind = found.meta["controller"]
        if kind != type(self).__name__:
            raise InputError(f"state: written by {kind}, but continued by {type(self).__name__}")
        if found.rounds > self.num_rounds:
            raise InputError(f"num_rounds: {self.num_rounds}, but the state is already at round {found.rounds}")
        self.members.load_state_dict(found.meta["members"], found.arrays[MEMORY])
        self.silent.load_state_dict(found.meta["silent"])
        self.failing.load_state_dict(found.meta["failing"])
        for name, value in found.meta["early_stop"].items():
            setattr(self, name, value)
        self._rounds_done = found.rounds
        self._restored = found
        self.start_round += found.rounds
        self.num_rounds -= found.rounds
        given: Any = getattr(self, "model", None)
        if given is not None:  # FedAvg with a model of its own asks no persistor
            params = given.params if isinstance(given, FLModel) else given
            self.model = FLModel(params_type=ParamsType.FULL, params=_fill(params, found.arrays[MODEL]))
        self.info(f"continuing after {found.rounds} round(s) of state {self.state!r}")

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

    # --- a round
    def sample_clients(self, num_clients: int | None = None) -> list[str]:
        """The names of this round's sites, in the order picked; the number is `cohort_size`, whatever is asked for."""
        if self._unsaved is not None:  # a controller that stops early does not save every round
            self._save(self._unsaved)
        available = self._gather()
        cohort = self.members.select(available)
        names = [str(client) for client in cohort.clients]
        self._open = RoundSelection(self._rounds_done, cohort)
        self.history.append(self._open)
        self._observations = {}
        self._metric_shapes = {}
        self.info(
            f"round {self._rounds_done}: cohort {names}, {cohort.entropy:.3f} bits, {cohort.classes_covered} classes"
        )
        if len(names) < self.cohort_size:
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
            self.members.take(self._ask([site for site in connected if site not in self.members.reports]))
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

    def _ask(self, sites: Sequence[str]) -> list[Report]:
        """Ask these sites for their counts, the ones that failed before after a pause; return what is usable."""
        nobody_known = not self.members.reports
        due = [site for site in sites if nobody_known or self.silent.over(site, self._rounds_done)]
        first = [site for site in due if not self.silent.has_failed(site)]
        again = [site for site in due if self.silent.has_failed(site)]
        found = []
        for group, seconds in ((first, self.query_timeout), (again, min(self.query_timeout, RETRY_SECONDS))):
            if group and not self.abort_signal.triggered:
                found += self._query(group, seconds)
        return sorted(found, key=lambda report: report.site)

    def _query(self, sites: Sequence[str], seconds: int) -> list[Report]:
        self.info(f"asking {len(sites)} site(s) for their label counts")
        answers: dict[str, Report | str] = {}

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            site = client_task.client.name
            try:
                answers[site] = read_report(site, client_task.result, self.num_classes)
            except Exception as error:  # an exception here would end the task for all
                answers[site] = str(error)[:LONGEST_REASON]
            client_task.result = None

        # A task of our own: what model controllers do with results (events, errors that end the job) is for models.
        task = Task(
            name=TASK,
            data=DXO(DataKind.APP_DEFINED, data={TASK: True}).to_shareable(),
            timeout=seconds,
            result_received_cb=received,
        )
        self.broadcast_and_wait(
            task=task, targets=list(sites), min_responses=0, fl_ctx=self.fl_ctx, abort_signal=self.abort_signal
        )
        found = []
        for site in sites:
            answer = answers.get(site, f"no answer within {seconds} s")
            if isinstance(answer, Report):
                self.silent.worked(site)
                found.append(answer)
            else:
                until = self.silent.failed(site, self._rounds_done)
                self.warning(f"site {site} is left out: {answer} (asked again from round {until} on)")
        return found

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
        if self._is_training(targets) and callback is not None:
            timeout = timeout or self.train_timeout
            self._remember_start(data)
            callback = partial(self._received, data, time.monotonic(), callback)
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
        training = self._is_training(targets)
        if training:
            timeout = timeout or self.train_timeout
            self._remember_start(data)
        begin = time.monotonic()
        results = super().send_model_and_wait(
            task_name=task_name, data=data, targets=targets, min_responses=min_responses, timeout=timeout
        )
        if not training:
            return list(results)
        usable = [result for result in results if self._received(data, begin, _accept, result)]
        # In the order of the cohort, so that the sum does not depend on who was fastest.
        order = {name: place for place, name in enumerate(targets or ())}
        return sorted(usable, key=lambda result: order.get(_site_of(result), len(order)))

    def _is_training(self, targets: Sequence[str] | None) -> bool:
        return self._open is not None and list(targets or ()) == [str(site) for site in self._open.cohort.clients]

    def _remember_start(self, data: FLModel) -> None:
        if self.members.selector.needs & {"head", "update"}:
            self._start_model = {name: as_array(value).copy() for name, value in data.params.items()}

    def _received(self, sent: FLModel, begin: float, use: Callable[[FLModel], Any], reply: FLModel) -> bool:
        """Check a reply, note it, and hand it on if it is usable; the result says whether it was used."""
        site, now = _site_of(reply), self._open
        try:
            self._check_type(reply)
            check_reply(sent, reply)
            seen = self._observe(site, reply, time.monotonic() - begin)
            reply.metrics = usable_metrics(reply.metrics, self._metric_shapes)
            if use(reply) is False:
                raise InputError("the reply was not used")
        except Exception as error:  # whatever a reply is made of, it is its site's failure
            if now is not None:
                kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
                now.failed[site] = f"{kind}{error}"[:LONGEST_REASON]
            return False
        if now is not None:
            now.answered.append(site)
        if seen is not None:
            self._observations[site] = seen
        return True

    def _check_type(self, reply: FLModel) -> None:
        """Refuse whole models among differences and the reverse: NVFlare averages them as what the first one was."""
        self._types[reply.params_type] += 1
        usual = self._types.most_common(1)[0][0]
        if reply.params_type != usual:
            raise InputError(f"the reply is of type {reply.params_type}, others' are {usual}")

    def _observe(self, site: str, reply: FLModel, seconds: float) -> Observation | None:
        needs = self.members.selector.needs
        if not needs or site not in self.members.reports:
            return None
        head: tuple[str, str | None] | None = None
        if "head" in needs:
            named = None if self.head is None else (self.head[0], self.head[1] if len(self.head) > 1 else None)
            head = find_head(self._start_model, self.num_classes, named)
        seen = observation(
            needs,
            self._start_model,
            reply,
            samples=self.members.size(site),
            seconds=seconds,
            head=head,
            loss_metric=self.loss_metric,
        )
        if seen is None and not self._told_no_loss:
            self._told_no_loss = True
            self.warning(
                f"site {site} sends no metric {self.loss_metric!r}, which selector {self.members.selector.name} needs; "
                "it learns nothing of such sites"
            )
        return seen

    # --- after training
    def aggregate(self, results: list[FLModel], aggregate_fn: Callable[..., FLModel] | None = None) -> FLModel:
        """The joined controller's; where nobody's reply was usable, a model without parameters."""
        if results:
            return super().aggregate(results, aggregate_fn)
        return FLModel(params={}, meta={AlgorithmConstants.SCAFFOLD_CTRL_DIFF: {}, "nr_aggregated": 0})

    def _get_aggregated_result(self) -> FLModel:
        """FedAvg's; as `aggregate`."""
        if self._open is None or self._open.answered:
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
        last, self._open = self._open, None
        if last is not None:
            for site in map(str, last.cohort.clients):
                if site in last.answered:
                    self.failing.worked(site)
                    continue
                reason = last.failed.setdefault(site, "no usable answer in time")
                until = self.failing.failed(site, self._rounds_done)
                self.warning(
                    f"round {last.round}: site {site} did not train: {reason} (picked again from round {until} on)"
                )
            if self.members.selector.needs:
                order = [str(site) for site in last.cohort.clients if str(site) in self._observations]
                self.members.selector.observe({site: self._observations[site] for site in order})
        self._rounds_done += 1

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
                    "silent": self.silent.state_dict(),
                    "failing": self.failing.state_dict(),
                    "early_stop": {name: _plain(getattr(self, name)) for name in EARLY_STOP if hasattr(self, name)},
                },
            ),
        )


class LabelAwareFedAvg(LabelAware, FedAvg):
    """NVFlare's FedAvg with cohorts of maximum label entropy. Options: see `LabelAware` and NVFlare's `FedAvg`."""


class LabelAwareScaffold(LabelAware, Scaffold):
    """NVFlare's SCAFFOLD with cohorts of maximum label entropy. Options: see `LabelAware` and NVFlare's `Scaffold`."""


def _make_selector(
    cohort_size: int,
    num_classes: int,
    buffer_size: int,
    seed: int,
    target: Sequence[float] | None,
    selector: str | None,
    settings: Mapping[str, Any] | None,
) -> Selector:
    if selector is None:
        if settings:
            raise InputError("selector_args: given without a selector; accepted: buffer_size, seed and target")
        made = EntropySelector(cohort_size, buffer_size, seed, target)
        if made.target is not None and made.target.size != num_classes:
            raise InputError(f"target: {made.target.size} weights; accepted: {num_classes}, one for each class")
        return made
    if buffer_size != 0 or target is not None:
        raise InputError("selector: give either a selector or buffer_size and target, which would build one")
    if not isinstance(selector, str):
        raise InputError(f"selector: {selector!r}; accepted: a name ({', '.join(SELECTORS.names)}) or module:Class")
    if is_import_path(selector):
        own = make_own("selector", selector, cohort_size, seed=seed, **(settings or {}))
    else:
        try:
            own = SELECTORS.get(selector)(cohort_size, seed=seed, **(settings or {}))
        except TypeError as error:
            raise InputError(f"selector_args: {error}") from error
    if not isinstance(own, Selector):
        raise InputError(f"selector: {selector} gives a {type(own).__name__}; accepted: a Selector")
    return own


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
    return value.item() if hasattr(value, "item") else value


def _site_of(result: FLModel) -> str:
    return str((result.meta or {}).get("client_name", ""))


def _accept(reply: FLModel) -> bool:
    return True


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name}: {value!r} is not accepted; accepted: a whole number of at least {least}")
