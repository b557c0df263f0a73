"""The client's side: a few lines of a ClientApp answer for the node's labels and give away no more than the answer.

    app = ClientApp(mods=[discreet])                          # what goes wrong is told to the node's log alone
    labels = label_report(load_labels, num_classes=10)
    app.query("label_counts")(labels)

    @app.train()
    def train(message, context):
        ...
        metrics = MetricRecord({"num-examples": labels.weight(context, samples)})
        content = RecordDict({"arrays": arrays, "metrics": metrics, "client": labels.about(context)})

`load_labels(context)` gives the labels this node holds; they stay in the process. What leaves is a vector of counts
with discrete Laplace noise, drawn once per release and kept (`fedentopt.release`, which lists the owner's settings).
The unit of privacy is one sample added to or removed from the node's data, or with `samples_per_person` one person.

On a real node everything that decides about the answer is in the node config: `load_labels` is called with a context
that has no run config, no state and neither Flower's node id nor its run id, since all of these come from the server
side (`owner_context`). `client-id` is the node's stable name; `partition-id` stands in for it, then Flower's node id.
The file keeps one set of answers per name, and one for a node that its owner has not named.

A simulated node has no owner, no file and no secrets: it draws once per run, at the smaller one of `label-epsilon` in
the run config and the environment variable FEDENTOPT_LABEL_EPSILON, which a real node does not read.

A refusal is an error reply, and every refusal of a real node reads alike: Flower would send the text of any exception
to the server, so exceptions are caught here and told to the node's log only.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict

from fedentopt.errors import InputError
from fedentopt.flower.report import RELEASE, ClientId, normal_id, write_report
from fedentopt.labels import label_counts
from fedentopt.privacy import check_sensitivity, clip_persons
from fedentopt.release import Draw, OwnerSettings, draw_counts, example_weight, read_epsilon, release_counts
from fedentopt.release.owner import EPSILON, NONE

VARIABLE = "FEDENTOPT_LABEL_EPSILON"
STATE_KEY = "fedentopt.label-report"
UNNAMED = ""  # place in the file of a node without a name; no name is empty
REFUSED = 700  # error code of a refusal; Flower's own codes are below 100
REFUSAL = "refused by this node; its log says why"

log = logging.getLogger("flwr")


class LabelReport:
    """Answers `query.label_counts`, and says what may stand for the number of samples. Made by `label_report`."""

    def __init__(
        self,
        load_labels: Callable[[Context], Any],
        num_classes: int | Callable[[Context], int],
        load_persons: Callable[[Context], Any] | None = None,
        samples_per_person: int | None = None,
    ) -> None:
        if (load_persons is None) != (samples_per_person is None):
            raise InputError("samples_per_person: needs load_persons, and the other way round; accepted: both or none")
        if samples_per_person is not None:
            check_sensitivity(samples_per_person, "samples_per_person")
        self._load_labels, self._num_classes = load_labels, num_classes
        self._load_persons, self._most = load_persons, samples_per_person

    def __call__(self, message: Message, context: Context) -> Message:
        """The reply to the server's question; its content is not read."""
        try:
            owner = owner_settings(context)
            name = client_id(context)
            if owner.epsilon is None:
                content = write_report(name, self._count(context).tolist(), None)
            else:
                draw = self._draw(context, owner)
                content = write_report(
                    name, draw.counts, draw.epsilon, release=draw.release, samples_per_person=draw.samples_per_person
                )
        except Exception as error:
            return _refuse(message, "label report", error)
        return Message(content, reply_to=message)

    def weight(self, context: Context, samples: int) -> int:
        """What to send as `num-examples` from a node that trained or evaluated on `samples`: the owner's choice.

        With noise that is the total of the noisy counts unless the owner says otherwise, drawn now where the server
        never asked for them. Raises, with a text that may leave the node, where the owner's settings do not serve.
        """
        try:
            owner = owner_settings(context)
            noisy = owner.epsilon is not None and owner.weight in (None, "noisy")
            return example_weight(owner, samples, self._draw(context, owner) if noisy else None)
        except Exception as error:
            log.exception("num-examples: this node cannot say what stands for its number of samples")
            raise InputError(_reason(error)) from None

    def about(self, context: Context) -> ConfigRecord:
        """What to send as the record `client` of a training reply: the number of the owner's release.

        A server that knows an earlier one asks for the counts again. Raises as `weight` does.
        """
        try:
            return ConfigRecord({RELEASE: owner_settings(context).release})
        except Exception as error:
            log.exception("client: this node cannot say which release of its counts is the current one")
            raise InputError(_reason(error)) from None

    def _draw(self, context: Context, owner: OwnerSettings) -> Draw:
        """The kept answer or the first one."""
        if owner.file is None and simulated():
            record = context.state.config_records.get(STATE_KEY)
            if record is None:
                drawn = draw_counts(self._count(context), owner, self._most)
                record = ConfigRecord({key: value for key, value in drawn.to_dict().items() if value is not None})
                context.state[STATE_KEY] = record
            return Draw.from_dict(record)
        # By the owner's name, never by Flower's node id: the SuperLink gives that, and a new one must not bring a draw.
        name = _name(context)
        place = UNNAMED if name is None else str(name)
        return release_counts(lambda: self._count(context), owner, name=place, samples_per_person=self._most)

    def _count(self, context: Context) -> np.ndarray:
        """The true counts, of clipped persons where there are persons."""
        own = owner_context(context)
        labels = np.asarray(self._load_labels(own))
        if self._load_persons is not None and self._most is not None:
            labels = clip_persons(labels, self._load_persons(own), self._most)
        return label_counts(labels, self._num_classes(own) if callable(self._num_classes) else self._num_classes)


def label_report(
    load_labels: Callable[[Context], Any],
    num_classes: int | Callable[[Context], int],
    *,
    load_persons: Callable[[Context], Any] | None = None,
    samples_per_person: int | None = None,
) -> LabelReport:
    """Make the function that answers `query.label_counts`.

    In: `load_labels(context)`, the node's labels as whole numbers from 0 to C-1 (array, tensor or list), and C, or
    a function of the context that gives C. For privacy per person, `load_persons(context)`, whose each sample is, in
    the same order, and `samples_per_person`, the most samples of one person that are counted: noise grows with it. Out:
    a handler for `ClientApp.query`. All functions get the context of `owner_context`.
    """
    return LabelReport(load_labels, num_classes, load_persons, samples_per_person)


def discreet(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """A mod for a ClientApp: an exception of its functions becomes a refusal that says nothing to the server."""
    try:
        return call_next(message, context)
    except Exception as error:
        return _refuse(message, message.metadata.message_type, error)


def owner_context(context: Context) -> Context:
    """The context without what comes from the server's side, for loading a real node's data: its node config alone.

    A simulated node's context is returned as it is.
    """
    if simulated():
        return context
    return Context(0, 0, dict(context.node_config), RecordDict(), _Withheld())


def owner_settings(context: Context) -> OwnerSettings:
    """What the node's owner decided: the node config; for a simulated node, the run config and the environment too."""
    config = dict(context.node_config)
    if simulated() and EPSILON not in config:
        words = [
            read_epsilon(context.run_config.get(EPSILON), "run config"),
            read_epsilon(os.environ.get(VARIABLE), VARIABLE),
        ]
        numbers = [word for word in words if isinstance(word, float)]
        if numbers or NONE in words:
            config[EPSILON] = min(numbers, default=NONE)
    return OwnerSettings.read(config)


def client_id(context: Context) -> ClientId:
    """The node's stable name: `client-id`, else `partition-id`, else Flower's node id.

    Flower's node id stays the same across restarts only for nodes with a registered key.
    """
    name = _name(context)
    return f"node-{context.node_id}" if name is None else name


def simulated() -> bool:
    """Whether this process is an actor of Flower's simulation, which a server of real nodes cannot make it."""
    ray = sys.modules.get("ray")
    if ray is None or "flwr.simulation.ray_transport.ray_actor" not in sys.modules or not ray.is_initialized():
        return False
    return ray.get_runtime_context().get_actor_id() is not None


class _Withheld(dict[str, Any]):
    """An empty run config that says why it is empty."""

    def __missing__(self, key: str) -> Any:
        raise InputError(
            f"run config {key!r}: what a node counts is not the server's to say; set {key} in the node config"
        )


def _name(context: Context) -> ClientId | None:
    """What the node's owner calls it, if anything."""
    for key in ("client-id", "partition-id"):
        if key in context.node_config:
            return normal_id(context.node_config[key])
    return None


def _refuse(message: Message, what: str, error: Exception) -> Message:
    log.error("%s refused", what, exc_info=error)
    return Message(Error(code=REFUSED, reason=_reason(error)), reply_to=message)


def _reason(error: Exception) -> str:
    """What the server is told: of a real node, always the same."""
    return f"{REFUSAL}: {error}" if simulated() else REFUSAL
