"""What a label report looks like on the wire; the client writes it, the server reads it.

One MetricRecord `labels` with the counts, one ConfigRecord `client` with the stable client id and, where noise was
added, the epsilon it was drawn at, the number of the release and, where the unit of privacy is a person, how many
samples of one were counted at most (the noise has that scale over epsilon). Flower's averages of metrics never see it:
it answers a query, not a training message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict

from fedentopt.errors import InputError
from fedentopt.labels import validate_report
from fedentopt.selection import ClientId as ClientId
from fedentopt.server import report as server

ACTION = "label_counts"
MESSAGE_TYPE = f"{MessageType.QUERY}.{ACTION}"
CLIENT_ID, EPSILON, RELEASE, PER_PERSON = "client-id", "epsilon", "release", "samples-per-person"
LONGEST_ID = 200


@dataclass(frozen=True)
class Report(server.Report):
    """A client's label counts as it reports them.

    `release` goes up when the node's owner has new counts to tell. `samples_per_person` is None where the unit of
    privacy is a sample.
    """

    release: int = 1
    samples_per_person: int | None = None


def write_report(
    client: ClientId,
    counts: Sequence[int] | Sequence[float],
    epsilon: float | None,
    *,
    release: int = 1,
    samples_per_person: int | None = None,
) -> RecordDict:
    """The content of the reply."""
    about = ConfigRecord({CLIENT_ID: client})
    if epsilon is not None:
        about[EPSILON] = epsilon
        about[RELEASE] = release
        if samples_per_person is not None:
            about[PER_PERSON] = samples_per_person
    return RecordDict({"labels": MetricRecord({"label-counts": list(counts)}), "client": about})


def read_report(reply: Message, num_classes: int) -> Report:
    """The report in a reply, checked; a reply that holds none, or nonsense, is refused with the reason."""
    content = reply.content
    try:
        about = content.config_records["client"]
        raw_id = about[CLIENT_ID]
        counts = content.metric_records["labels"]["label-counts"]
    except KeyError as error:
        raise InputError(f"the reply holds no label report (missing {error})") from error
    client = normal_id(raw_id)
    epsilon = server.check_epsilon(f"client {client}", about.get(EPSILON))
    if not isinstance(counts, list):
        raise InputError(f"client {client}: label counts must be a list, not {type(counts).__name__}")
    try:
        numbers = np.asarray(counts, dtype=np.float64)
    except OverflowError as error:
        raise InputError(f"client {client}: a label count is too large") from error
    checked = validate_report(client, numbers, num_classes, noisy=epsilon is not None)
    release, persons = _whole(client, about, RELEASE), _whole(client, about, PER_PERSON)
    return Report(client, checked, epsilon, release=1 if release is None else release, samples_per_person=persons)


def _whole(client: ClientId, about: ConfigRecord, name: str) -> int | None:
    value = about.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise InputError(f"client {client}: {name} {value!r} is not a whole number from 1")
    return value


def normal_id(value: object) -> ClientId:
    """A client id in its one spelling: whole numbers as int, so that 3 and "3" are the same client."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip() and len(value) <= LONGEST_ID and value.isprintable():
        text = value.strip()
        if text.isascii() and text.isdigit() and str(int(text)) == text:
            return int(text)
        return text
    raise InputError(f"client-id: {value!r} is not accepted; accepted: a whole number or 1 to {LONGEST_ID} characters")


def id_order(client: ClientId) -> tuple[int, int, str]:
    """Sort key of client ids: numbers by value, then texts."""
    return (0, client, "") if isinstance(client, int) else (1, 0, client)
