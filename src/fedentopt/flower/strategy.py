"""Label-aware selection for Flower's strategies.

    strategy = FedEntOpt(cohort_size=10, buffer_size=50, num_classes=10, seed=0)      # FedAvg
    class EntAdam(LabelAware, FedAdam): ...                                            # any FedAvg-derived strategy

`LabelAware` overrides `configure_train`: before it selects, it asks unknown nodes for their label counts (`census`),
lets a selector of `fedentopt.selection` pick the cohort among the known clients that are online, and hands exactly
that cohort to the strategy it is mixed into, which then does whatever it does there (FedProx adds its mu, FedAdam
remembers the model). Aggregation is untouched, which Flower's privacy accounting insists on; replies are looked at
before they get there (`replies`), so that no client stops a run.

Selection is seeded and depends on client ids, counts, who is online and who joined when, never on Flower's random node
ids or on the order in which replies arrive.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, FedXgbBagging, Result

from fedentopt.audit import Suspicion
from fedentopt.errors import InputError
from fedentopt.flower import identity, loop, replies, stand_ins
from fedentopt.flower.audit import watch_for
from fedentopt.flower.census import Census, listed
from fedentopt.flower.cohort_grid import in_order, only
from fedentopt.flower.enrolment import Enrolment
from fedentopt.flower.exchange import Answer, Clock
from fedentopt.flower.federation import Federation, NoClientsError
from fedentopt.flower.feedback import Feedback
from fedentopt.flower.heads import Heads
from fedentopt.flower.learning import Learning
from fedentopt.flower.options import check_class, check_options, make_selector
from fedentopt.flower.progress import Callback, Progress, RoundSelection, guarded
from fedentopt.flower.report import ClientId
from fedentopt.flower.roster import Roster
from fedentopt.own_hooks import check_attributes
from fedentopt.randomness import generator, key
from fedentopt.selection import Cohort, EntropySelector, Selector
from fedentopt.server.local_training import LocalTraining

__all__ = ["FedEntOpt", "LabelAware", "NoClientsError", "RoundSelection"]

log = logging.getLogger("flwr")


class LabelAware(FedAvg):
    """Mixin: the cohort is picked by label counts. Put it before the strategy it joins.

    cohort_size       clients per round (M)
    num_classes       length of a label count vector (C)
    buffer_size       FedEntOpt's buffer (Q): clients that trained lately and are kept out for a while
    seed, target, release  of `EntropySelector`
    selector          another selector of `fedentopt.selection`, instead of buffer_size, seed, target and release
    size_cap          most samples a client is taken for, as a multiple of the median client; None: no limit
    weight_cap        largest weight of a reply, as a multiple of what is usual (see `replies`); None: no limit
    exclude           clients that never train; "node-<id>" for a node by Flower's id
    replacements      most clients per round that are asked to stand in for ones that failed
    query_timeout     longest wait for a node's label counts, in seconds
    query_attempts    how often running a node may fail to give them before it is asked no more; None: always again
    query_pause       seconds before a node that failed is asked again; doubles each time, up to ten minutes
    query_patience    seconds without an answer after which a round goes on without the nodes that are still silent
    refresh_every     rounds after which known clients are asked again; 0: only when they announce new counts
    forget_after      rounds after which a client that is away is forgotten; None: never
    bind_names        True: a client id stays with the node that first came under it; or {client id: node id}
    node_timeout      longest wait for `min_available_nodes` nodes to be online, in seconds
    evaluate_by       who evaluates: "seed" (drawn with the seed) or "labels" (as even as a cohort)
    audit             "off", or what becomes of label reports that do not fit what training shows: "warn", "replace",
                      "quarantine" (see `audit`)
    local, pretrained, travel_key   how clients train, whether the start model was trained before, and the metric by
                      which they say how far: what audit and `inferred` read labels with (see `heads`)
    head              arrays of the last layer, or what their names begin with; found by shape where it is not named
    loss_key, loss_rms_key, seconds_key, candidate_loss_keys   see `feedback`
    checkpoint_dir    folder for the checkpoint after each round; `start` continues from it
    settings          what else makes this run what it is (an app's run config): continued with others, it is refused
    metrics_file      file for a line of JSON after each round
    callbacks         functions that are handed the same after each round
    strategy_options  everything else goes to the strategy, except fraction_train and min_train_nodes, which
                      cohort_size replaces
    """

    def __init__(
        self,
        *,
        cohort_size: int,
        num_classes: int,
        buffer_size: int = 0,
        seed: int = 0,
        target: Sequence[float] | None = None,
        release: str = "fifo",
        selector: Selector | None = None,
        size_cap: float | None = 10.0,
        weight_cap: float | None = 10.0,
        exclude: Iterable[ClientId] = (),
        replacements: int = 0,
        query_timeout: float = 300.0,
        query_attempts: int | None = None,
        query_pause: float = 5.0,
        query_patience: float = 30.0,
        refresh_every: int = 0,
        forget_after: int | None = None,
        bind_names: bool | Mapping[ClientId, int] = False,
        node_timeout: float = 600.0,
        evaluate_by: str = "seed",
        audit: str = "off",
        local: LocalTraining | Mapping[str, Any] | None = None,
        pretrained: bool = False,
        travel_key: str = "train_travel",
        head: str | Sequence[str] = (),
        loss_key: str = "train_loss",
        loss_rms_key: str = "train_loss_rms",
        seconds_key: str = "train_seconds",
        candidate_loss_keys: Sequence[str] = ("loss", "eval_loss"),
        checkpoint_dir: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        metrics_file: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **strategy_options: Any,
    ) -> None:
        check_class(type(self), LabelAware, locals())
        check_options(locals(), strategy_options)
        selector = make_selector(selector, cohort_size, num_classes, buffer_size, seed, target, release)
        super().__init__(**strategy_options)
        self.train_metrics_aggr_fn = guarded("train_metrics_aggr_fn", self.train_metrics_aggr_fn)
        self.evaluate_metrics_aggr_fn = guarded("evaluate_metrics_aggr_fn", self.evaluate_metrics_aggr_fn)
        joined = dict(vars(self))
        self.selector = selector
        heads = Heads(int(num_classes), head, LocalTraining.read(local), travel_key)
        self.feedback = Feedback(
            selector, heads, self.weighted_by_key, loss_key, loss_rms_key, seconds_key, candidate_loss_keys
        )
        self.cohort_size = selector.cohort_size
        self.watch = watch_for(audit, int(num_classes), selector)
        self.roster = Roster(selector, size_cap, self.watch)
        self.census = (Enrolment if self.roster.nobody_reports else Census)(
            int(num_classes),
            timeout=query_timeout,
            attempts=query_attempts,
            pause=query_pause,
            patience=query_patience,
            bind_names=bind_names,
            exclude=frozenset(exclude),
        )
        self.federation = Federation(
            self.census, self.roster, node_timeout=node_timeout, refresh_every=refresh_every, forget_after=forget_after
        )
        self.learning = Learning(self.federation, self.feedback, pretrained=pretrained)
        self.weight_cap = weight_cap
        self.replacements = replacements
        self.evaluate_by = evaluate_by
        self.checkpoint_dir = None if checkpoint_dir is None else Path(checkpoint_dir)
        self.progress = Progress(None if metrics_file is None else Path(metrics_file), callbacks)
        self.settings = identity.describe(settings or {}, whole=True)
        self.options = identity.describe(
            {
                "num_classes": num_classes, "cohort_size": self.cohort_size, "size_cap": size_cap,
                "weight_cap": weight_cap, "replacements": replacements, **strategy_options,
                **self.learning.identity(),
            }
        )  # fmt: skip
        self.history: list[RoundSelection] = []
        self.round_timeout = 3600.0  # `start` sets it: longest wait for the losses of candidates
        self.saves_itself = False  # True while `loop.start` runs this strategy and writes its checkpoints
        self.standing_in: list[int] | None = None  # nodes that `configure_train` is asked for in the middle of a round
        self.own_attributes: frozenset[str] = frozenset()
        # What plain FedAvg has beside (who is evaluated, say) is set by the round, and decides about no training here.
        self.own_attributes = frozenset(vars(self)) - (joined.keys() - vars(FedAvg()).keys())
        check_attributes(type(self), joined, vars(self))

    @property
    def clock(self) -> Clock:
        """The time by which nodes are waited for."""
        return self.federation.clock

    @clock.setter
    def clock(self, clock: Clock) -> None:
        self.federation.clock = self.census.clock = clock

    def summary(self) -> None:
        """Log the settings, and where files are written: a relative path begins where Flower started the process."""
        log.info("\t├──> Label-aware selection:")
        log.info("\t│\t├── Selector: %s, cohort of %d", type(self.selector).__name__, self.cohort_size)
        log.info("\t│\t├── Audit: %s", "off" if self.watch is None else self.watch.policy)
        log.info("\t│\t├── Checkpoints: %s", _place(self.checkpoint_dir))
        log.info("\t│\t└── Metrics file: %s", _place(self.progress.file))
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Pick the cohort and make its messages, in the order picked.

        Waits for nodes at most `node_timeout` seconds; raises `NoClientsError` when there is nobody to pick.
        """
        if self.standing_in is not None:
            return self._messages(self.standing_in, server_round, arrays, config, grid)
        if not self.saves_itself:
            self._check_wrapper()
        least = max(1, self.min_available_nodes)
        if self.watch is not None:
            self.census.refresh(self.watch.due(server_round))
        online, available = self.federation.gather(server_round, grid, least, self.cohort_size)
        if self.watch is not None:
            self.watch.tell(server_round, self.census.node_of)  # a new report may have changed it
            available = self.watch.admitted(available, self.cohort_size)
        losses = self.learning.candidate_losses(
            server_round, arrays, available, grid, (self.arrayrecord_key, self.configrecord_key), self.round_timeout
        )
        cohort = self.roster.select(available, losses)
        self._check_cohort(cohort)
        members = self.census.members
        reports = [members[client].report for client in cohort.clients]
        noises = [report.epsilon for report in reports if report.epsilon is not None]
        self.history.append(
            RoundSelection(
                server_round,
                cohort,
                epsilon=max(noises, default=None) if len(noises) == len(reports) else None,  # true counts have no bound
                online=len(online),
                known=len(members),
            )
        )
        self.learning.note_suspects(self.history[-1])
        log.info(
            "configure_train: picked %d clients of %d online nodes: %s",
            len(cohort.clients),
            len(online),
            cohort.clients,
        )
        log.info("configure_train: entropy %.3f bits, %d classes covered", cohort.entropy, cohort.classes_covered)
        nodes = [self.census.node_of(client) for client in cohort.clients]
        return self._messages(nodes, server_round, arrays, config, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Evaluate on known clients that are online: a fraction of them drawn with the seed, or one even in labels.

        Nodes that refused to tell their counts, or are excluded, are not asked, and those that let evaluations time out
        seldom. A federation that is gone is not waited for without end.
        """
        if not self.fraction_evaluate > 0:
            return super().configure_evaluate(server_round, arrays, config, grid)
        least = max(self.min_available_nodes, self.min_evaluate_nodes)
        online = self.federation.wait_for_nodes(grid, least)
        known = self.census.available(online)
        clients = self.federation.mute.rested(known, server_round, 0)
        if len(online) < least or not clients:
            silent = len(online) >= least and known
            why = "none of those online answered the last one" if silent else f"{len(online)} of {least} online"
            log.warning("round %d: no evaluation on the nodes, %s", server_round, why)
            return []
        wanted = min(max(int(len(clients) * self.fraction_evaluate), self.min_evaluate_nodes), len(clients))
        nodes = [self.census.node_of(client) for client in self._evaluators(clients, wanted, server_round)]
        with only(nodes, grid, self, "evaluate") as shown:
            messages = list(super().configure_evaluate(server_round, arrays, config, shown))
        return in_order(messages, nodes)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds up to `num_rounds`, from the checkpoint where there is one. See `fedentopt.flower.start`."""
        return loop.start(self, grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)

    # --- replies
    def check_reply(self, reply: Message, sent: ArrayRecord) -> str | None:
        """What is wrong with one training reply, or None. To be overridden where replies look different by design."""
        if isinstance(self, FedXgbBagging):
            replies.check_trees(reply.content, self.weighted_by_key)
        else:
            replies.check_training(reply.content, sent, self.weighted_by_key)
            if hasattr(self, "train_loss_key"):  # QFedAvg
                replies.check_loss(reply.content, self.train_loss_key)
        return None

    def judge_training(self, answers: Sequence[Answer], sent: ArrayRecord) -> list[Answer]:
        """Look at the replies of a round; those that cannot be averaged get their `problem`."""
        return replies.judge(
            self.learning.turn_away(answers),
            lambda reply: self.check_reply(reply, sent),
            self.weighted_by_key,
            self._sizes(answers),
            self.weight_cap,
            (self.feedback.loss_key,) if "loss" in self.feedback.needs else (),
            self.arrayrecord_key,
        )

    def judge_evaluation(self, answers: Sequence[Answer]) -> list[Answer]:
        """The same for evaluation; failures are logged, a round's in one line, and who is silent sits out the next."""
        judged = replies.judge(
            answers,
            lambda reply: replies.check_metrics(reply.content, self.weighted_by_key),
            self.weighted_by_key,
            self._sizes(answers),
            self.weight_cap,
        )
        last = self.history[-1]
        failed = {client: answer.failure for client, answer in self.by_client(judged) if answer.failure is not None}
        for client, answer in self.by_client(judged):
            if answer.is_silence:
                self.federation.mute.failed(client, last.round)
            else:
                self.federation.mute.answered(client)
        last.note_evaluation(failed)
        if failed:
            log.warning(
                "round %d: %d of %d clients did not evaluate (%s), the first: %s%s",
                *(last.round, len(failed), len(judged), listed(list(map(str, failed))), next(iter(failed.values()))),
                "; with fraction_evaluate=0.0 nobody is asked to" if len(failed) == len(judged) else "",
            )
        return judged

    def note_answers(self, answers: Sequence[Answer], stand_ins: Sequence[ClientId] = ()) -> None:
        """Take down who of the last cohort answered and who did not, by client and reason; those that failed sit out.

        `stand_ins` are clients among them that were asked in the place of others.
        """
        last = self.history[-1]
        good: list[ClientId] = []
        for client, answer in self.by_client(answers):
            if answer.failure is None and answer.reply is not None:
                good.append(client)
                self.federation.backoff.answered(client)
                self.census.note_release(client, answer.reply)
            else:
                last.failed[client] = str(answer.failure)
                self.federation.note_failure(client, last.round, str(answer.failure))
        last.answered = tuple(good)
        last.stood_in = tuple(stand_ins)

    def by_client(self, answers: Iterable[Answer]) -> list[tuple[ClientId, Answer]]:
        """Answers beside the clients that gave them."""
        return self.census.by_client(answers)

    def draw_stand_ins(self, number: int, grid: Grid, failed: Iterable[ClientId]) -> list[ClientId]:
        """Clients to ask in the place of `failed` ones of the last cohort."""
        last = self.history[-1]
        out = {*last.cohort.clients}
        free = [c for c in self.census.available(grid.get_node_ids()) if c not in out]
        if self.watch is not None:
            free = self.watch.admitted(free, 0)
        free = self.federation.backoff.rested(free, last.round, number)
        kept = [client for client in last.cohort.clients if client not in set(failed)]
        return stand_ins.draw(self.selector, kept, free, number, last.round)

    def suspects(self) -> dict[ClientId, Suspicion]:
        """The clients whose label reports do not fit what their training shows, and why; empty without an audit."""
        return self.learning.suspects()

    # --- state
    def state_dict(self) -> dict[str, Any]:
        """Settings, selector state, failures; JSON-serialisable. The register of clients is kept apart."""
        return {
            "selector": type(self.selector).__name__,
            "options": self.options,
            "settings": self.settings,
            "sources": self.learning.sources(),
            "federation": self.federation.state_dict(),
            "seen": sorted(self.feedback.seen),
            "trained": self.learning.has_trained,
            "steps": self.learning.heads.state_dict(),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None,
        watched: Mapping[str, np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        """Continue from `state_dict()` and the arrays of selector and watch, with the census restored; one of other
        settings is refused."""
        self.check_settings(state)
        self.federation.load_state_dict(dict(state["federation"]), dict(arrays or {}), dict(watched or {}))
        self.feedback.seen = set(state["seen"])
        self.learning.has_trained = bool(state.get("trained", True))
        self.learning.heads.load_state_dict(state.get("steps"))

    def check_settings(self, state: Mapping[str, Any]) -> None:
        """Refuse the state of a run with other settings, naming the difference."""
        identity.check_same({"selector": type(self.selector).__name__}, {"selector": state["selector"]})
        identity.check_same(self.options, state["options"])
        identity.check_same(self.settings, state["settings"])
        sources = self.learning.sources()
        identity.check_same(sources, state.get("sources", sources))  # none in checkpoints of versions that did not look

    # --- inside
    def _check_wrapper(self) -> None:
        """A wrapper's own loop runs this strategy: refuse what needs more of a round than that loop shows."""
        if self.learning.reads_labels:
            raise InputError(
                f"{self.learning.reader}: reads the replies, which a wrapper's own start() does not show; "
                "accepted: fedentopt.flower.start(wrapper, grid, ...)"
            )
        if self.checkpoint_dir is not None:
            raise InputError(
                "checkpoint_dir: a strategy inside a wrapper is checkpointed when fedentopt.flower.start(wrapper, "
                "grid, ...) runs it, not by wrapper.start(grid, ...)"
            )
        if not self.history:
            log.warning("replies are not checked: run fedentopt.flower.start(wrapper, grid, ...) to have them be")

    def _check_cohort(self, cohort: Cohort) -> None:
        """Refuse cohorts that training messages cannot express; what Flower leaves out of one is said once."""
        if cohort.sample_limits is not None:
            raise InputError(
                f"selector: {type(self.selector).__name__} lets clients train on part of their data, which a training "
                "message does not say; accepted: selectors of whole clients, such as EntropySelector and RandomSelector"
            )
        if cohort.weights is not None and not self.history:
            log.warning(
                "%s defines weights for the average, which Flower's strategies do not take: clients are weighted by %s",
                *(type(self.selector).__name__, self.weighted_by_key),
            )

    def _evaluators(self, clients: Sequence[ClientId], number: int, server_round: int) -> list[ClientId]:
        seed = self.selector.seed
        if number >= len(clients):
            return list(clients)
        if self.evaluate_by == "seed":
            places = generator(seed, "evaluate", server_round).choice(len(clients), number, replace=False)
            return [clients[place] for place in sorted(places.tolist())]
        even = EntropySelector(number, seed=key(seed, "evaluate", server_round) >> 1)
        even.register({client: self.roster.counts_of(client) for client in clients}, noisy=True)
        return list(even.select().clients)

    def _sizes(self, answers: Iterable[Answer]) -> dict[int, float]:
        return {answer.node_id: self.roster.weighed_size(client) for client, answer in self.by_client(answers)}

    def _messages(
        self, nodes: Sequence[int], server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Let the joined strategy configure training for exactly these nodes."""
        with only(nodes, grid, self, "train") as shown:
            messages = list(super().configure_train(server_round, arrays, config, shown))
        if sorted(message.metadata.dst_node_id for message in messages) != sorted(nodes):
            raise InputError(
                f"{type(self).__name__}: its configure_train does not train every node it is given, so no selection "
                "can be added to it"
            )
        return in_order(messages, nodes)


def _place(path: Path | None) -> str:
    return "none" if path is None else str(path.absolute())


class FedEntOpt(LabelAware):
    """FedAvg with cohorts of maximum label entropy (FedEntOpt). Options: see `LabelAware` and Flower's `FedAvg`."""
