"""What a training reply says about the last layer: which arrays it is, how they moved, and how far they could have.

The last layer is the last array with C rows (or, as Keras keeps it, C columns) that has the vector of C numbers beside
it which is its bias; without any bias, the only array of such a shape. Or it is named, by its arrays ("fc.weight",
"fc.bias") or by what their names begin with ("fc").

With it goes the travel, what the step sizes of local training add up to (`server.local_training`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from fedentopt.audit import FURTHEST
from fedentopt.errors import InputError
from fedentopt.flower.exchange import Answer
from fedentopt.flower.replies import arrays_of, enough_to_tell, metrics_of
from fedentopt.flower.report import ClientId
from fedentopt.selection import Head, Observation
from fedentopt.server.local_training import CENSUS, LocalTraining, is_positive

ABOUT = "client"
"""ConfigRecord of a reply in which a client says, under `census`, that it did as those keys say."""
MOST_TRAVEL = 10.0


@dataclass
class Heads:
    """Reads last layers from replies. `named` are their arrays, or what the names of these begin with."""

    num_classes: int
    named: str | Sequence[str] = ()
    local: LocalTraining = field(default_factory=LocalTraining)
    travel_key: str = "train_travel"
    names: tuple[str, str | None] | None = None
    """Weight and bias, once the start model is known."""
    known: bool = False
    """Whether the steps of any client have been known."""
    lacking: set[int] = field(default_factory=set)
    """Nodes whose steps are not."""
    uncounted: set[int] = field(default_factory=set)
    """Nodes that said 1 sample, heard before anybody said more."""

    def find(self, start: ArrayRecord) -> tuple[str, str | None]:
        """Find the last layer in the start model; one that cannot be found is refused, before a round is spent."""
        self.names = head_names(start, self.num_classes, self.named)
        return self.names

    def change(self, answer: Answer, sent: ArrayRecord) -> Head:
        """How a client moved its last layer."""
        assert answer.reply is not None
        weight, bias = self.names or self.find(sent)
        arrays = arrays_of(answer.reply.content)
        moved = change_of(arrays, sent, weight)
        if moved.shape[0] != self.num_classes:
            moved = moved.T
        return Head(moved, None if bias is None else change_of(arrays, sent, bias))

    def known_travel(self, answer: Answer, samples: float) -> float | None:
        """What a client's steps add up to where the server knows that of everybody, so that changes of clients and of
        rounds can be told by the same measure; else None, of everybody."""
        return self.local.travel(samples, _config(answer)) if self.local.complete else None

    def travels(
        self, answers: Sequence[Answer], samples: Mapping[int, float], *, clients: int, followed: bool = False,
        reported: bool = False,
    ) -> dict[int, float]:  # fmt: skip
        """What the steps of each of these clients add up to, by node; those of which that is unknown are left out.

        `samples` are numbers of samples by node. `followed`: all do as a census asks, not only those that say so. Where
        it is known of none of enough of the `clients` there are (see `enough_to_tell`), the run ends with one sentence.
        `reported`: they come from label reports too, so that 1 is what some client claims, and not how nodes weigh.
        """
        nodes, enough = {answer.node_id for answer in answers}, enough_to_tell(clients)
        ones = not reported and all(number == 1 for number in samples.values())
        uncounted = self.local.batch_size is not None and ones
        if uncounted and not self.known:  # later, a cohort that says so does not end the run
            self.uncounted |= nodes
        if uncounted and not self.known and len(self.uncounted) >= enough:
            raise InputError(
                'local: batch_size, but every reply says 1 sample (nodes with num-examples="uniform"), so that steps '
                f"cannot be counted; accepted: steps, or no batch_size and clients that send {self.travel_key!r}"
            )
        found: dict[int, float] = {}
        told: dict[int, float] = {}
        for answer in answers:
            assert answer.reply is not None
            own = self.local.travel(samples[answer.node_id], _config(answer), followed or _followed(answer))
            word = metrics_of(answer.reply.content).get(self.travel_key)
            if own is not None:
                found[answer.node_id] = own
            elif is_positive(word):
                told[answer.node_id] = float(word)
        if told:
            most = MOST_TRAVEL * float(np.median([*found.values(), *told.values()]))
            found |= {node: min(travel, most) for node, travel in told.items()}
        self.known = self.known or (bool(found) and not uncounted)
        self.lacking |= nodes - found.keys()
        if not self.known and len(self.lacking) >= enough:
            raise InputError(
                "local: the sizes of clients' steps are not known, without which a change of the last layer says "
                "nothing about labels; accepted: local=LocalTraining(lr=..., epochs=..., batch_size=..., "
                f"momentum=...), or clients that send the metric {self.travel_key!r}"
            )
        return found

    def state_dict(self) -> dict[str, Any]:
        """Whether steps have been known, and by what. JSON-serialisable."""
        return {"known": self.known, "local": asdict(self.local), "travel_key": self.travel_key}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from `state_dict()`: what was known by the same settings need not be shown again, or those who happen
        to train first after a stop could end the run."""
        self.known = state is not None and dict(state) == {**self.state_dict(), "known": True}

    def labelled(
        self, told: Sequence[tuple[ClientId, Answer]], sent: ArrayRecord, samples: Mapping[ClientId, float], *,
        clients: int, untrained: bool, followed: bool = False, reported: bool = False,
    ) -> dict[ClientId, Observation]:  # fmt: skip
        """Observations that labels can be read from, of clients whose good answers these are, among all `clients`.

        A bias cannot move further than its steps add up to; one that says it did, which would also spoil what is read
        from others, is taken for as far as that. A change that is not finite is left out, and so is one that cannot be
        read since the client says it took next to no steps.
        """
        by_node = {answer.node_id: samples[client] for client, answer in told}
        answers = [answer for _, answer in told]
        travels = self.travels(answers, by_node, clients=clients, followed=followed, reported=reported)
        found: dict[ClientId, Observation] = {}
        for client, answer in told:
            travel = travels.get(answer.node_id)
            head = None if travel is None else _within(self.change(answer, sent), travel)
            if head is not None:
                number = max(1, round(samples[client]))
                found[client] = Observation(number, head=head, travel=travel, untrained=untrained)
        return found


def head_names(arrays: ArrayRecord, num_classes: int, named: str | Sequence[str] = ()) -> tuple[str, str | None]:
    """Names of the last layer's weight and bias (None without one): those given, or found by their shapes."""
    names = list(arrays)
    shapes = {name: tuple(arrays[name].shape) for name in names}
    if named:
        return _named(names, shapes, num_classes, [named] if isinstance(named, str) else list(named))
    fits = [name for name in names if len(shapes[name]) == 2 and num_classes in shapes[name]]
    pairs = {name: bias for name in fits if (bias := _bias_of(names, shapes, name, num_classes)) is not None}
    how = "name it, for instance head=('fc.weight', 'fc.bias') or head='fc'"
    if not fits:
        raise InputError(f"head: no array of the model has {num_classes} rows (num_classes); {how}")
    if not pairs:
        if len(fits) > 1:
            raise InputError(
                f"head: {' and '.join(fits[-2:])} both have {num_classes} rows or columns and no bias; {how}"
            )
        return fits[0], None
    last = list(pairs)[-1]
    after = [name for name in fits[fits.index(last) + 1 :] if shapes[name][0] == num_classes]
    if after:
        raise InputError(f"head: {last} has {num_classes} rows and a bias, but {after[0]} comes after it; {how}")
    return last, pairs[last]


def _named(
    names: Sequence[str], shapes: Mapping[str, tuple[int, ...]], num_classes: int, given: Sequence[str]
) -> tuple[str, str | None]:
    if len(given) == 1 and given[0] not in shapes:
        given = [name for name in names if _stem(name) == given[0]] or given
    for name in given:
        if name not in shapes:
            raise InputError(f"head: {name!r} is no array of the model; accepted: {', '.join(names[-6:])}")
    weights = [name for name in given if len(shapes[name]) == 2 and num_classes in shapes[name]]
    biases = [name for name in given if shapes[name] == (num_classes,)]
    if len(weights) != 1 or len(weights) + len(biases) != len(given) or len(biases) > 1:
        shown = ", ".join(f"{name} {shapes[name]}" for name in given)
        raise InputError(
            f"head: {shown}; accepted: a weight with {num_classes} rows or columns (num_classes) and, where there is "
            "one, its bias"
        )
    return weights[0], biases[0] if biases else None


def _bias_of(names: Sequence[str], shapes: Mapping[str, tuple[int, ...]], weight: str, num_classes: int) -> str | None:
    """The vector beside a weight: behind it, or before it where names of the same layer stand in alphabetical order."""
    place = names.index(weight)
    stem = _stem(weight)
    behind = names[place + 1] if place + 1 < len(names) else None
    if behind is not None and shapes[behind] == (num_classes,) and _stem(behind) == stem:
        return behind
    before = names[place - 1] if place else None
    if before is not None and stem and shapes[before] == (num_classes,) and _stem(before) == stem:
        return before
    return None


def _stem(name: str) -> str:
    """The layer's name in an array's."""
    return name[: max(name.rfind("."), name.rfind("/"), 0)]


def _within(head: Head, travel: float) -> Head | None:
    part = head.weight if head.bias is None else head.bias
    if not np.isfinite(part).all():
        return None
    furthest = float(np.abs(part).max())
    if head.bias is None:
        most = float(np.finfo(np.float32).max) / max(1, part.shape[1])  # of which the means of rows are finite
        return head if furthest <= min(most, FURTHEST * travel) else None
    return head if furthest <= travel else Head(head.weight, head.bias * (travel / furthest))


def change_of(arrays: ArrayRecord, sent: ArrayRecord, name: str) -> np.ndarray:
    """How training moved an array, in single precision; what that does not hold is infinite, and selectors leave such
    clients out."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(arrays[name].numpy().astype(np.float32) - sent[name].numpy().astype(np.float32))


def _config(answer: Answer) -> Mapping[str, Any]:
    """What a client was told."""
    return {key: value for record in answer.message.content.config_records.values() for key, value in record.items()}


def _followed(answer: Answer) -> bool:
    """Whether a client says that it did the census as it was asked."""
    assert answer.reply is not None
    about = answer.reply.content.config_records.get(ABOUT)
    return about is not None and bool(about.get(CENSUS))
