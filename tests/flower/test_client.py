"""The client's reply: whose settings count, what leaves the node, and that asking again teaches nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedentopt.errors import InputError
from fedentopt.flower import client as client_module
from fedentopt.flower import discreet, label_report, owner_context
from fedentopt.flower.report import normal_id, read_report
from flower_fake_grid import label_query

LABELS = np.array([0] * 700 + [2] * 300)  # counts 700, 0, 300
SECRET = "patient-4711"
REFUSAL = "refused by this node; its log says why"


@pytest.fixture(autouse=True)
def ledger_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("FEDENTOPT_LABEL_EPSILON", raising=False)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an actor of Flower's simulation."""
    monkeypatch.setattr(client_module, "simulated", lambda: True)


@pytest.fixture
def owner(tmp_path: Path) -> dict[str, Any]:
    return {"label-epsilon": 0.5, "label-report-file": str(tmp_path / "report.json")}


def ask(
    labels: Any = LABELS,
    *,
    classes: int = 3,
    node: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    state: RecordDict | None = None,
    node_id: int = 99,
    **options: Any,
) -> Message:
    """Route a query through a real ClientApp, as Flower does."""
    app = ClientApp()
    load = labels if callable(labels) else lambda context: labels
    app.query("label_counts")(label_report(load, classes, **options))
    context = Context(
        1, node_id, {"partition-id": 4, **(node or {})}, state if state is not None else RecordDict(), run or {}
    )
    return app(label_query(node_id), context)


def counts(reply: Message) -> list[float]:
    assert not reply.has_error(), reply.error
    return list(reply.content.metric_records["labels"]["label-counts"])


def refusal(reply: Message) -> str:
    assert reply.has_error()
    assert reply.error.reason is not None
    return reply.error.reason


def test_true_counts_leave_when_the_owner_says_none() -> None:
    reply = ask(node={"label-epsilon": "none"}, run={"label-epsilon": 1.0})
    report = read_report(reply, 3)
    assert report.client == 4
    assert report.counts.tolist() == [700, 0, 300]
    assert not report.noisy
    assert "release" not in reply.content["client"]


def test_the_report_says_what_the_node_used_whatever_the_app_asked_for(owner: dict[str, Any]) -> None:
    for asked in (5.0, 0.1, "none", "nonsense", None):
        report = read_report(ask(node=owner, run={} if asked is None else {"label-epsilon": asked}), 3)
        assert (report.epsilon, report.release, report.samples_per_person) == (0.5, 1, None)
    assert np.abs(report.counts - [700, 0, 300]).max() < 2 * 40  # P(|noise| > 40 scales) < 1e-16


def test_an_app_cannot_stand_in_for_a_silent_owner(caplog: pytest.LogCaptureFixture) -> None:
    assert refusal(ask(run={"label-epsilon": 0.5})) == REFUSAL
    assert "label-epsilon: not set by the owner" in caplog.text


@pytest.mark.parametrize("word", ["none", "100.0"])
def test_a_real_node_does_not_read_the_environment(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDENTOPT_LABEL_EPSILON", word)
    assert refusal(ask()) == REFUSAL
    assert refusal(ask(run={"label-epsilon": "none"})) == REFUSAL


def test_noise_without_a_file_is_refused_since_every_run_would_draw_anew(caplog: pytest.LogCaptureFixture) -> None:
    assert refusal(ask(node={"label-epsilon": 0.5})) == REFUSAL
    assert "label-report-file: not set" in caplog.text


@pytest.mark.parametrize(
    ("variable", "run", "used"),
    [
        (None, 2.0, 2.0),
        (None, "none", None),
        ("none", None, None),
        ("none", 2.0, 2.0),
        ("0.5", 2.0, 0.5),
        ("3", 2.0, 2.0),
        ("0.5", "none", 0.5),
    ],
)
@pytest.mark.usefixtures("simulated")
def test_simulated_nodes_take_the_smaller_epsilon_of_run_config_and_environment(
    variable: str | None, run: Any, used: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("FEDENTOPT_LABEL_EPSILON", variable)
    assert read_report(ask(run={} if run is None else {"label-epsilon": run}), 3).epsilon == used


@pytest.mark.usefixtures("simulated")
def test_a_simulated_node_says_why_it_refuses_and_keeps_its_answer_for_the_run() -> None:
    assert "label-epsilon" in refusal(ask())
    state, labels = RecordDict(), np.arange(60)  # of 60 noisy counts two draws are the same with a chance below 1e-50
    first = counts(ask(labels, classes=60, run={"label-epsilon": 0.5}, state=state))
    assert counts(ask(labels + 0, classes=60, run={"label-epsilon": 0.5}, state=state)) == first
    assert counts(ask(labels, classes=60, run={"label-epsilon": 0.5}, state=RecordDict())) != first


def test_only_an_actor_of_flowers_simulation_is_a_simulated_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def ray(started: bool, actor: str | None) -> Any:
        return SimpleNamespace(
            is_initialized=lambda: started, get_runtime_context=lambda: SimpleNamespace(get_actor_id=lambda: actor)
        )

    actors = "flwr.simulation.ray_transport.ray_actor"
    monkeypatch.delitem(sys.modules, actors, raising=False)
    monkeypatch.setitem(sys.modules, "ray", ray(True, "a1"))
    assert not client_module.simulated()  # somebody else's actor
    monkeypatch.setitem(sys.modules, actors, SimpleNamespace())
    assert client_module.simulated()
    monkeypatch.setitem(sys.modules, "ray", ray(True, None))
    assert not client_module.simulated()  # a node whose app uses Ray is its driver
    monkeypatch.setitem(sys.modules, "ray", ray(False, None))
    assert not client_module.simulated()


def test_importing_the_client_does_not_bring_the_simulation() -> None:
    program = "import sys, fedentopt.flower; print('flwr.simulation.ray_transport.ray_actor' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_what_the_server_sends_does_not_reach_the_functions_that_count() -> None:
    met: list[Context] = []

    def load(context: Context) -> Any:
        met.append(context)
        return LABELS

    app = ClientApp()
    app.query("label_counts")(label_report(load, lambda context: met.append(context) or 3))  # type: ignore[func-returns-value]
    state = RecordDict({"left-by-training": MetricRecord({"class": 2})})
    app(label_query(7), Context(5, 7, {"label-epsilon": "none"}, state, {"class-names": "b,a"}))
    assert len(met) == 2
    for context in met:
        assert (context.run_id, context.node_id, context.node_config) == (0, 0, {"label-epsilon": "none"})
        assert context.run_config == {}
        assert not context.state
        with pytest.raises(InputError, match=r"'class-names'.* set class-names in the node config"):
            context.run_config["class-names"]


@pytest.mark.usefixtures("simulated")
def test_a_simulated_nodes_functions_get_the_run_config() -> None:
    context = Context(5, 7, {}, RecordDict(), {"seed": 3})
    assert owner_context(context) is context


def test_asking_again_gives_the_same_bytes_in_every_run(owner: dict[str, Any], tmp_path: Path) -> None:
    first = ask(node=owner)
    written = (tmp_path / "report.json").stat().st_mtime_ns
    for again in range(3):
        reply = ask(np.array([again]), node=owner, node_id=500 + again)  # another run, node id, even other data
        assert np.array(counts(reply)).tobytes() == np.array(counts(first)).tobytes()
    assert (tmp_path / "report.json").stat().st_mtime_ns == written
    (tmp_path / "report.json").unlink()
    assert counts(ask(node=owner)) == counts(first)


def test_a_node_without_a_name_has_one_report_whatever_id_the_superlink_gives_it(owner: dict[str, Any]) -> None:
    answer = label_report(lambda _: LABELS, 3)
    first, second = (
        counts(answer(label_query(number), Context(1, number, owner, RecordDict(), {}))) for number in (500, 501)
    )
    assert np.array(second).tobytes() == np.array(first).tobytes()


def test_the_owner_announces_new_counts_by_a_release_within_the_total(
    owner: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    owner |= {"label-epsilon": 1000.0, "label-epsilon-total": 2000.0}
    assert counts(ask(node=owner)) == [700, 0, 300]  # P(any noise at epsilon 1000) < 1e-400
    more = np.append(LABELS, 1)
    assert counts(ask(more, node=owner)) == [700, 0, 300]
    second = ask(more, node=owner | {"label-report-release": 2})
    assert counts(second) == [700, 1, 300]
    assert read_report(second, 3).release == 2
    assert refusal(ask(more, node=owner | {"label-report-release": 3})) == REFUSAL
    assert "label-epsilon-total" in caplog.text
    assert counts(ask(more, node=owner)) == [700, 0, 300]


def test_a_kept_report_of_another_number_of_classes_is_sent_for_the_server_to_refuse(owner: dict[str, Any]) -> None:
    first = counts(ask(node=owner))
    reply = ask(node=owner, classes=5)
    assert counts(reply) == first
    with pytest.raises(InputError, match="client 4"):
        read_report(reply, 5)


def test_an_old_report_file_goes_on_giving_its_answer(owner: dict[str, Any], tmp_path: Path) -> None:
    kept = {"counts": [701.5, -1.25, 300.0], "epsilon": 0.5, "salt": "00", "fingerprint": "ab", "drawn": "2026",
            "draws": 1, "epsilon_spent": 0.5}  # fmt: skip
    old = {"format": "fedentopt label reports", "version": 1, "reports": {"4": kept}}
    (tmp_path / "report.json").write_text(json.dumps(old))
    assert counts(ask(node=owner)) == kept["counts"]
    assert refusal(ask(node=owner | {"label-report-release": 2})) == REFUSAL


def test_persons_are_clipped_and_the_noise_grows(owner: dict[str, Any], tmp_path: Path) -> None:
    labels, persons = np.array([0] * 50 + [1, 2, 2]), ["ann"] * 50 + ["bob"] * 3
    exact = owner | {"label-epsilon": 1e6}
    reply = ask(labels, node=exact, load_persons=lambda _: persons, samples_per_person=2)
    assert sum(counts(reply)) == 4
    assert counts(reply)[0] == 2
    assert read_report(reply, 3).samples_per_person == 2
    with pytest.raises(InputError, match="samples_per_person"):
        label_report(lambda _: labels, 3, samples_per_person=2)
    with pytest.raises(InputError, match="samples_per_person: 0"):
        label_report(lambda _: labels, 3, load_persons=lambda _: persons, samples_per_person=0)


def test_what_goes_wrong_with_the_labels_stays_on_the_node(caplog: pytest.LogCaptureFixture) -> None:
    def broken(context: Context) -> Any:
        raise RuntimeError(SECRET)

    for labels in (broken, np.array([0, 1, 4711]), np.array([0.5]), np.array([[1]])):
        assert refusal(ask(labels, node={"label-epsilon": "none"})) == REFUSAL
    assert SECRET in caplog.text


def weight(node: dict[str, Any], samples: int = 1000) -> int:
    context = Context(1, 2, {"partition-id": 4, **node}, RecordDict(), {"num-examples": "exact"})
    return label_report(lambda _: LABELS, 3).weight(context, samples)


def test_the_weight_of_a_node_is_its_owners_choice(owner: dict[str, Any]) -> None:
    noisy = weight(owner)
    assert noisy == max(1, sum(counts(ask(node=owner))))
    assert weight(owner, samples=3) == noisy
    assert weight(owner | {"num-examples": "uniform"}) == 1
    assert weight(owner | {"num-examples": "exact"}) == 1000
    assert weight({"label-epsilon": "none"}) == 1000


def test_a_training_reply_may_say_which_release_is_the_current_one() -> None:
    def about(**node: Any) -> dict[str, Any]:
        context = Context(1, 2, {"partition-id": 4, **node}, RecordDict(), {"label-report-release": 7})
        return dict(label_report(lambda _: LABELS, 3).about(context))

    assert about(**{"label-epsilon": 0.5}) == {"release": 1}
    assert about(**{"label-epsilon": 0.5, "label-report-release": 2}) == {"release": 2}
    with pytest.raises(InputError, match=f"^{REFUSAL}$"):
        about()


def test_a_weight_that_cannot_be_had_is_refused_in_the_words_of_every_refusal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(InputError, match=f"^{REFUSAL}$"):
        weight({"label-epsilon": 0.5})
    assert "label-report-file" in caplog.text


def test_a_discreet_app_tells_exceptions_to_its_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    app = ClientApp(mods=[discreet])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        raise ValueError(f"label 7 of {SECRET}")

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"m": MetricRecord({"loss": 0.5})}), reply_to=message)

    context = Context(1, 2, {}, RecordDict(), {})
    reply = app(Message(RecordDict(), dst_node_id=2, message_type="train"), context)
    assert refusal(reply) == REFUSAL
    assert SECRET in caplog.text
    reply = app(Message(RecordDict(), dst_node_id=2, message_type="evaluate"), context)
    assert reply.content["m"]["loss"] == 0.5


@pytest.mark.parametrize(
    ("node", "client"),
    [
        ({"client-id": "hospital-a", "partition-id": 1}, "hospital-a"),
        ({"client-id": "7"}, 7),
        ({"partition-id": 3}, 3),
    ],
)
def test_a_client_is_named_by_its_owner(node: dict[str, Any], client: int | str) -> None:
    assert read_report(ask(node={"label-epsilon": "none", **node}), 3).client == client


def test_a_node_without_a_name_goes_by_flowers_id() -> None:
    query = label_query(77)
    reply = label_report(lambda _: LABELS, lambda _: 3)(
        query, Context(1, 77, {"label-epsilon": "none"}, RecordDict(), {})
    )
    assert read_report(reply, 3).client == "node-77"


@pytest.mark.parametrize("bad", ["", "  ", True, 1.5, None, "a\nb", "x" * 201])
def test_a_client_id_that_cannot_be_one_is_refused(bad: Any) -> None:
    with pytest.raises(InputError, match="client-id"):
        normal_id(bad)


@pytest.mark.parametrize(("key", "bad"), [("release", 0), ("release", 1.5), ("samples-per-person", "two")])
def test_a_report_about_itself_must_be_sane(owner: dict[str, Any], key: str, bad: Any) -> None:
    reply = ask(node=owner)
    reply.content["client"][key] = bad
    with pytest.raises(InputError, match=f"client 4: {key} {bad!r} is not a whole number from 1"):
        read_report(reply, 3)
