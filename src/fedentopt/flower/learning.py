"""What selector and audit learn from replies: losses before a cohort is picked, and after training what it showed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from fedentopt.audit import Suspicion
from fedentopt.flower import replies
from fedentopt.flower.enrolment import Enrolment, told_name
from fedentopt.flower.exchange import Answer, exchange
from fedentopt.flower.federation import Federation
from fedentopt.flower.feedback import Feedback, parameters_of
from fedentopt.flower.identity import describe
from fedentopt.flower.progress import RoundSelection
from fedentopt.flower.report import ClientId, id_order

SOURCES = {
    "loss": ("loss_key", "loss_rms_key"),
    "seconds": ("seconds_key",),
    "candidate_loss": ("candidate_loss_keys",),
}
"""Options of `Feedback` that name where a need is read."""

log = logging.getLogger("flwr")


class Learning:
    """Brings what replies say to the selector and to the audit. `pretrained`: somebody trained the start model."""

    def __init__(self, federation: Federation, feedback: Feedback, *, pretrained: bool) -> None:
        self.federation, self.census, self.roster = federation, federation.census, federation.roster
        self.feedback, self.heads, self.watch = feedback, feedback.heads, federation.roster.watch
        self.selector = feedback.selector
        self.has_trained = bool(pretrained)
        """Whether anybody has trained the model that is sent."""
        self.infers = bool(getattr(self.selector, "labels_from_heads", False))
        self.reads_labels = self.infers or self.watch is not None
        """Whether somebody takes the change of last layers for labels."""
        self._reasons: dict[ClientId, str] = {}

    @property
    def reader(self) -> str:
        """Who does, as a message names it."""
        name = getattr(self.selector, "name", type(self.selector).__name__)
        return f"selector: {name!r}" if self.watch is None else f"audit: {self.watch.policy}"

    def identity(self) -> dict[str, Any]:
        """What makes a run another one. One that merely watches, or learns nothing, is the same run."""
        policy = "off" if self.watch is None else self.watch.policy
        if not self.infers and policy in ("off", "warn"):
            return {}
        return {"audit": policy, "local": asdict(self.heads.local), "pretrained": self.has_trained}

    def sources(self) -> dict[str, Any]:
        """From where in replies, and in which unit, what steers picks is read: learnt from elsewhere it would not
        compare with what is known."""
        needs = self.feedback.needs
        names = [name for need, names in SOURCES.items() if need in needs for name in names]
        found: dict[str, Any] = {name: getattr(self.feedback, name) for name in names}
        if "head" in needs or (self.watch is not None and self.watch.policy != "warn"):
            found |= {"head": self.heads.names, "local": asdict(self.heads.local)}
            if self.reads_labels:
                found["travel_key"] = self.heads.travel_key
        return describe(found)

    def begin(self, start: ArrayRecord) -> None:
        """Look at the start model: what cannot be read from it is refused before a round is spent."""
        self.feedback.parameters = parameters_of(start)
        if self.reads_labels or "head" in self.feedback.needs:
            self.heads.find(start)

    def candidate_losses(
        self, server_round: int, arrays: ArrayRecord, available: Sequence[ClientId], grid: Grid,
        keys: tuple[str, str], timeout: float,
    ) -> dict[ClientId, float] | None:  # fmt: skip
        """What the clients whom the selector names say about the current model; None where it names nobody.

        `keys` name the records of arrays and config in a message.
        """
        wanted = self.selector.candidates(available) if "candidate_loss" in self.feedback.needs else None
        if wanted is None:
            return None
        nodes = [self.census.node_of(client) for client in wanted.ids]
        log.info("configure_train: asking %d candidates for the loss of the current model", len(nodes))
        messages = self.feedback.questions(wanted, nodes, arrays, server_round, keys)
        answers = exchange(grid, messages, timeout, self.federation.clock)
        key = self.feedback.weight_key
        judged = replies.judge(answers, lambda reply: replies.check_metrics(reply.content, key), key, {}, None)
        told = self.census.by_client(judged)
        for client, answer in told:
            if answer.is_silence:  # asked in every round, it would hold up each of them
                self.federation.backoff.failed(client, server_round)
            if answer.failure is not None:
                log.warning("round %d: candidate %s told no loss: %s", server_round, client, answer.failure)
        return self.feedback.losses(told)

    def learn(self, answers: Sequence[Answer], sent: ArrayRecord, entry: RoundSelection) -> None:
        """Tell selector and audit about the clients that trained in a round, and note whom that makes suspects."""
        told = self.census.by_client(answers)
        labelled = None
        if self.reads_labels:
            good = [(client, answer) for client, answer in told if answer.failure is None and answer.reply is not None]
            key = self.feedback.weight_key
            samples = self.roster.samples({client: replies.weight_of(answer, key) for client, answer in good})
            labelled = self.heads.labelled(
                good, sent, samples, clients=len(self.selector.clients), untrained=not self.has_trained,
                reported=not self.roster.nobody_reports,
            )  # fmt: skip
        if self.watch is not None and labelled:
            self.roster.believe(self.watch.observe(labelled))
            self.watch.tell(entry.round, self.census.node_of)
            self.note_suspects(entry)
        self.feedback.observe(told, sent, labelled if self.infers else None)

    def suspects(self) -> dict[ClientId, Suspicion]:
        """The clients whose label reports do not fit what their training shows, and why."""
        return {} if self.watch is None else self.watch.suspects()

    def note_suspects(self, entry: RoundSelection) -> None:
        """Write down in a round's record who is suspected at present."""
        found = self.suspects()
        entry.suspects = tuple(sorted({*self.roster.capped(), *found}, key=id_order))
        # One text for all the records that have it: for thousands of suspects over hundreds of rounds they fill memory.
        told = {client: str(why) for client, why in found.items()}
        same = {client: why for client, why in self._reasons.items() if told.get(client) == why}
        entry.suspicions = self._reasons = told | same

    def turn_away(self, answers: Sequence[Answer]) -> list[Answer]:
        """Where nobody gives a name before it trains: the same answers, of which those in an excluded name failed."""
        return [
            answer if name is None else replace(answer, problem=f"client {name!r} is excluded on this server")
            for answer in answers
            for name in [self._excluded_name(answer)]
        ]

    def drop_excluded(self, answers: Sequence[Answer]) -> None:
        """Forget those that were turned away, and ask their nodes no more."""
        for client, answer in self.census.by_client(answers):
            name = self._excluded_name(answer)
            if name is not None:
                self.census.leave_out(answer.node_id, name)
                self.federation.drop([client], "excluded")

    def _excluded_name(self, answer: Answer) -> ClientId | None:
        if not isinstance(self.census, Enrolment) or answer.reply is None or answer.reply.has_error():
            return None
        name = told_name(answer.reply)
        return name if name in self.census.exclude else None

    def welcome_back(self, answers: Sequence[Answer], grid: Grid) -> None:
        """Where nobody gives a name before it trains: let known clients that came back on other nodes be known.

        One whose old node was asked in this round too, and went away in the middle of it, is back when it next trains.
        """
        if not isinstance(self.census, Enrolment):
            return
        online: set[int] | None = None
        for client, answer in self.census.by_client(answers):
            if answer.failure is None and answer.reply is not None and told_name(answer.reply) not in (None, client):
                online = {*grid.get_node_ids(), *(one.node_id for one in answers)} if online is None else online
                back = self.census.returning(client, answer.reply, online)
                if back is not None:
                    self.federation.drop([client], f"is known as {back}")
                    self.census.move(back, answer.node_id)
