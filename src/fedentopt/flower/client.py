"""The client's side: one line of a ClientApp answers the server's question for label counts.

    app = ClientApp()
    app.query("label_counts")(label_report(load_labels, num_classes=10))

`load_labels(context)` gives the labels this node holds; they stay in the process. What leaves is a vector of counts
with Laplace noise of scale 1/epsilon, drawn once with OpenDP's secure sampler and kept (`kept_report`), at the
epsilon of `budget`. The unit of privacy is one sample added to or removed from the node's data.

Node config, set by the node's owner:
    label-epsilon         a number, or "none" for true counts; where it is not set, the environment variable
                          FEDENTOPT_LABEL_EPSILON of the node's process (simulated nodes have no config of their own)
    label-report-file     absolute path of the file that keeps the report across runs
    label-report-changed  what to do when the labels changed since the report was drawn: "refuse" (default), "keep"
                          (go on sending the old report) or "redraw" (spends epsilon again)
    client-id             the node's stable name; `partition-id` stands in for it, then Flower's node id. The file keeps
                          one report a name, and one for a node that its owner has not named
Run config, set by the app: label-epsilon

A refusal is an error reply whose reason the server logs. Reasons never quote labels, counts or paths: Flower would
send the text of any exception to the server, so exceptions are caught here and told to the node's log only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message

from fedentopt.errors import InputError
from fedentopt.flower.budget import KEY, settle_epsilon
from fedentopt.flower.kept_report import KeptReport, open_report_file
from fedentopt.flower.report import ClientId, normal_id, write_report
from fedentopt.labels import label_counts
from fedentopt.privacy import secure_laplace

VARIABLE = "FEDENTOPT_LABEL_EPSILON"
FILE_KEY = "label-report-file"
CHANGED_KEY = "label-report-changed"
STATE_KEY = "fedentopt.label-report"
UNNAMED = ""  # place in the file of a node without a name; no name is empty
REFUSED = 700  # error code of a refusal; Flower's own codes are below 100

log = logging.getLogger("flwr")

Handler = Callable[[Message, Context], Message]


def label_report(load_labels: Callable[[Context], Any], num_classes: int | Callable[[Context], int]) -> Handler:
    """Make the function that answers `query.label_counts`.

    In: `load_labels(context)`, the node's labels as whole numbers from 0 to C-1 (array, tensor or list), and C, or
    a function of the context that gives C. Out: a handler for `ClientApp.query`. The handler answers with a report,
    or with an error whose reason says what the node's owner would have to change.
    """

    def answer(message: Message, context: Context) -> Message:
        try:
            client = client_id(context)
            owner = context.node_config.get(KEY, os.environ.get(VARIABLE))
            epsilon = settle_epsilon(context.run_config.get(KEY), owner)
            counts = _count(load_labels, num_classes, context)
            if epsilon is None:
                content = write_report(client, counts.tolist(), None)
            else:
                report = _kept_or_drawn(counts, epsilon, context)
                content = write_report(client, list(report.counts), report.epsilon)
        except InputError as refusal:
            log.warning("label report refused: %s", refusal)
            return Message(Error(code=REFUSED, reason=f"label report refused: {refusal}"), reply_to=message)
        except Exception:
            log.exception("label report failed")
            reason = "label report failed on this node; its log says why"
            return Message(Error(code=REFUSED, reason=reason), reply_to=message)
        return Message(content, reply_to=message)

    return answer


def client_id(context: Context) -> ClientId:
    """The node's stable name: `client-id`, else `partition-id`, else Flower's node id.

    Flower's node id stays the same across restarts only for nodes with a registered key.
    """
    name = _name(context)
    return f"node-{context.node_id}" if name is None else name


def _name(context: Context) -> ClientId | None:
    """What the node's owner calls it, if anything."""
    for key in ("client-id", "partition-id"):
        if key in context.node_config:
            return normal_id(context.node_config[key])
    return None


def _count(
    load_labels: Callable[[Context], Any], num_classes: int | Callable[[Context], int], context: Context
) -> np.ndarray:
    try:
        classes = num_classes(context) if callable(num_classes) else num_classes
        return label_counts(np.asarray(load_labels(context)), classes)
    except Exception as error:
        log.exception("the labels of this node could not be counted")
        raise InputError("this node could not count its labels; its log says why") from error


def _kept_or_drawn(counts: np.ndarray, epsilon: float, context: Context) -> KeptReport:
    """The report to send: the kept one while it holds, a new draw where there is none or the owner wants one."""
    in_state = _from_state(context)
    path = context.node_config.get(FILE_KEY)
    if path is None:
        if in_state is None:
            log.info(
                "this node keeps its label report for this run only; set %s in the node config, or every run draws "
                "new noise and spends epsilon again",
                FILE_KEY,
            )
        report = _current(in_state, counts, epsilon, context)
    else:
        try:
            where = Path(str(path)).expanduser()
            if not where.is_absolute():
                raise InputError(f"{FILE_KEY}: {path!r} is not an absolute path")
            with open_report_file(where) as file:
                # Never by Flower's node id: the SuperLink gives that, and a new one must not bring a new draw.
                name = _name(context)
                place = UNNAMED if name is None else str(name)
                kept = file.get(place)
                report = _current(kept or in_state, counts, epsilon, context)
                if report is not kept:
                    file.put(place, report)
        except _Refusal:
            raise
        except (OSError, InputError) as error:
            log.exception("the file that keeps this node's label report cannot be used")
            raise InputError(f"{FILE_KEY}: this node cannot read or write it; its log says why") from error
    context.state[STATE_KEY] = ConfigRecord(report.to_dict())
    return report


class _Refusal(InputError):
    """A refusal whose text may leave the node."""


def _current(kept: KeptReport | None, counts: np.ndarray, epsilon: float, context: Context) -> KeptReport:
    """The kept report if it may be sent, else a new draw, else a refusal."""
    changed = context.node_config.get(CHANGED_KEY, "refuse")
    if changed not in ("refuse", "keep", "redraw"):
        raise _Refusal(f"{CHANGED_KEY}: {changed!r} is not accepted; accepted: refuse, keep, redraw")
    if kept is None:
        return KeptReport.of(secure_laplace(counts, epsilon), epsilon, counts, None)
    if len(kept.counts) != len(counts):
        # Also where the owner wants changed labels drawn again: the number of classes is the app's to say.
        raise _Refusal(
            f"the kept report has {len(kept.counts)} classes, this app counts {len(counts)}; "
            f"one {FILE_KEY} serves one data set"
        )
    same = kept.describes(counts)
    if not same and changed == "redraw":
        report = KeptReport.of(secure_laplace(counts, epsilon), epsilon, counts, kept)
        log.warning("labels changed: drew report number %d, epsilon spent: %g", report.draws, report.epsilon_spent)
        return report
    if epsilon < kept.epsilon:
        # Drawing again for every smaller epsilon asked for would let a server collect draws.
        raise _Refusal(
            f"a report drawn at epsilon {kept.epsilon:g} is kept and epsilon {epsilon:g} is asked for; the node's "
            f"owner can discard the kept report ({FILE_KEY}) to have a new one drawn"
        )
    if not same and changed == "refuse":
        raise _Refusal(
            f'the labels changed since the kept report was drawn; the node\'s owner can set {CHANGED_KEY}="keep" '
            'to go on sending it or "redraw" to draw a new one, which spends epsilon again'
        )
    if not same:
        log.warning("labels changed since the label report was drawn (%s); the old report is sent", kept.drawn)
    return kept


def _from_state(context: Context) -> KeptReport | None:
    record = context.state.config_records.get(STATE_KEY)
    return KeptReport.from_dict(record) if record is not None else None
