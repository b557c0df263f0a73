"""A round's training: the cohort, the replies that came, and what a selector is to be told of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from fedentopt.errors import InputError
from fedentopt.nvflare.members import Sites
from fedentopt.nvflare.replies import as_array, check_model, check_reply, observation, shapes_of, usable_metrics
from fedentopt.selection import Cohort, Observation
from fedentopt.server.local_training import LocalTraining
from fedentopt.server.report import printable


@dataclass
class RoundSelection:
    """A round's cohort and what became of it: sites whose reply was used, and why the others' was not."""

    round: int
    cohort: Cohort
    answered: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def sites(self) -> list[str]:
        """The cohort's names, in the order picked."""
        return [str(site) for site in self.cohort.clients]


class Training:
    """Takes the replies of one round. `types` counts the kinds of all usable replies so far, `head` names the last
    layer, and `steps` says how all sites train, where the server knows.

    NVFlare averages whole models and differences as what the first one was, so one kind is used in a round: the one
    that most replies are of, this round's and those before, and of equally many the one that was sent. Until that is
    certain (in the first round, when more than half of the cohort have sent it) replies are held; `settle` decides when
    no more are awaited. In the same way a metric has one shape: in `shapes`, that which most replies of the round
    before had.
    """

    def __init__(
        self,
        selection: RoundSelection,
        members: Sites,
        types: Counter[Any],
        head: tuple[str, str | None] | None,
        loss_metric: str,
        steps: LocalTraining | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.selection, self.members = selection, members
        self.observations: dict[str, Observation] = {}
        self.told_no_loss: list[str] = []
        self._types, self._named, self._loss_metric, self._steps = types, head, loss_metric, steps
        self._head: tuple[str, str | None] | None = None
        self._type: Any = None  # of the replies that are used, once it is certain
        self._held: list[tuple[Callable[[FLModel], Any], FLModel, Observation | None]] = []
        self._awaited = len(selection.sites)
        self._shapes = dict(shapes or {})  # of metrics, as they are used
        self._told: dict[str, Counter[tuple[int, ...]]] = {}  # and as they were sent
        self._sent: FLModel | None = None
        self._start: dict[str, np.ndarray] = {}
        self._begin = time.monotonic()

    def begin(self, sent: FLModel) -> None:
        """Remember the model that the sites start from; one whose change a selector could not be told is refused."""
        self._head = check_model(self.members.selector, sent.params or {}, self.members.num_classes, self._named)
        self._sent = sent
        self._begin = time.monotonic()
        if self.members.selector.needs & {"head", "update"}:
            self._start = {name: as_array(value).copy() for name, value in sent.params.items()}

    def receive(self, use: Callable[[FLModel], Any], reply: FLModel) -> bool:
        """Check a reply, note it, and hand it on if it is usable, at once or when it is certain that its kind is; the
        result says whether it was used, or is held."""
        site = site_of(reply)
        self._awaited -= 1
        try:
            check_reply(self._sent, reply)
            seen = self._observe(site, reply)
            reply.metrics = usable_metrics(reply.metrics)
        except Exception as error:  # whatever a reply is made of, it is its site's failure
            self._fail(site, error)
            good = False
        else:
            self._types[reply.params_type] += 1
            for name, shape in shapes_of(reply.metrics).items():
                self._told.setdefault(name, Counter())[shape] += 1
            self._held.append((use, reply, seen))
            good = True
        if self._type is None and not self._is_certain():
            return good
        return self.settle() and good

    def settle(self) -> bool:
        """Hand on the replies that are held, those of the usual kind; whether the last of them was used."""
        if self._held and self._type is None:
            self._type = max(self._types, key=lambda kind: (self._types[kind], kind == self._sent_type))
        held, self._held = self._held, []
        used = [self._hand_on(*each) for each in held]
        return not used or used[-1]

    @property
    def _sent_type(self) -> Any:
        """The kind of the model that the sites were sent: of two that are equally common, the usual one."""
        return getattr(self._sent, "params_type", None) or ParamsType.FULL

    def _is_certain(self) -> bool:
        """Whether no reply that is still awaited could change which kind is the commonest."""
        first, second = [*(number for _, number in self._types.most_common(2)), 0, 0][:2]
        return first > second + self._awaited

    def _hand_on(self, use: Callable[[FLModel], Any], reply: FLModel, seen: Observation | None) -> bool:
        site = site_of(reply)
        try:
            if reply.params_type != self._type:
                raise InputError(f"the reply is of type {reply.params_type}, others' are {self._type}")
            reply.metrics = self._alike(reply.metrics)
            if use(reply) is False:
                raise InputError("the reply was not used")
        except Exception as error:
            self._fail(site, error)
            return False
        self.selection.answered.append(site)
        if seen is not None:
            self.observations[site] = seen
        return True

    def _alike(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The metrics without those of another shape than others' of the name."""
        odd = {
            name
            for name, shape in shapes_of(metrics).items()
            if shape != self._shapes.setdefault(name, self._told[name].most_common(1)[0][0])
        }
        return {name: value for name, value in metrics.items() if name not in odd}

    def usual_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the metrics that more than half of the replies that were used have alike."""
        commonest = {name: told.most_common(1)[0] for name, told in self._told.items()}
        return {name: shape for name, (shape, n) in commonest.items() if 2 * n > len(self.selection.answered)}

    def _fail(self, site: str, error: Exception) -> None:
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        self.selection.failed[site] = printable(f"{kind}{error}")

    def _observe(self, site: str, reply: FLModel) -> Observation | None:
        needs = self.members.selector.needs
        if not needs or site not in self.members.reports:
            return None
        seen = observation(
            needs,
            self._start,
            reply,
            samples=self.members.size(site),
            seconds=time.monotonic() - self._begin,
            head=self._head,
            loss_metric=self._loss_metric,
            travel=self._travel(site) if "head" in needs else None,
        )
        if seen is None:
            self.told_no_loss.append(site)
        return seen

    def _travel(self, site: str) -> float | None:
        """What a site's step sizes add up to: by all the samples it reports, since it trains on those, whatever number
        it is taken for when it is picked."""
        told = {"server-round": self.selection.round + 1}  # the first of a `LocalTraining` is 1
        return None if self._steps is None else self._steps.travel(self.members.reported_size(site), told)


def site_of(reply: FLModel) -> str:
    """Who sent it, as NVFlare says."""
    return str((reply.meta or {}).get("client_name", ""))
