"""The client's reply: which epsilon, what leaves the node, and that asking again teaches nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedentopt.errors import InputError
from fedentopt.flower import label_report
from fedentopt.flower.budget import settle_epsilon
from fedentopt.flower.kept_report import KeptReport, open_report_file
from fedentopt.flower.report import normal_id, read_report
from flower_fake_grid import label_query

LABELS = np.array([0] * 700 + [2] * 300)  # counts 700, 0, 300
SECRET = "patient-4711"


def ask(
    labels: Any = LABELS,
    *,
    node: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    state: RecordDict | None = None,
    node_id: int = 99,
) -> Message:
    """Route a query through a real ClientApp, as Flower does."""
    app = ClientApp()
    load = labels if callable(labels) else lambda context: labels
    app.query("label_counts")(label_report(load, 3))
    query = label_query(node_id)
    context = Context(
        1, node_id, {"partition-id": 4, **(node or {})}, state if state is not None else RecordDict(), run or {}
    )
    return app(query, context)


def counts(reply: Message) -> list[float]:
    assert not reply.has_error(), reply.error
    return list(reply.content.metric_records["labels"]["label-counts"])


def refusal(reply: Message) -> str:
    assert reply.has_error()
    assert reply.error.reason is not None
    return reply.error.reason


@pytest.mark.parametrize(
    ("app", "owner", "used"),
    [
        (0.5, None, 0.5),
        (None, 0.5, 0.5),
        (0.5, 2.0, 0.5),
        (2.0, 0.5, 0.5),
        (1, "0.25", 0.25),
        (0.5, "none", 0.5),
        ("none", 0.5, 0.5),
        (None, "none", None),
        ("none", "None", None),
        ("", "none", None),
    ],
)
def test_the_smaller_epsilon_is_used_and_only_the_owner_can_switch_noise_off(
    app: Any, owner: Any, used: float | None
) -> None:
    assert settle_epsilon(app, owner) == used


@pytest.mark.parametrize(("app", "owner"), [(None, None), ("none", None), ("", ""), ("none", "")])
def test_without_the_owners_word_nothing_is_settled(app: Any, owner: Any) -> None:
    with pytest.raises(InputError, match="neither by the app nor by the node's owner"):
        settle_epsilon(app, owner)


@pytest.mark.parametrize("bad", [0, -1, 0.0, float("nan"), float("inf"), 10**400, "much", True, False])
def test_an_epsilon_that_is_no_budget_is_refused_on_either_side(bad: Any) -> None:
    with pytest.raises(InputError, match="run config"):
        settle_epsilon(bad, 1.0)
    with pytest.raises(InputError, match="node config"):
        settle_epsilon(1.0, bad)


def test_true_counts_leave_when_the_owner_says_none() -> None:
    report = read_report(ask(node={"label-epsilon": "none"}), 3)
    assert report.client == 4
    assert report.counts.tolist() == [700, 0, 300]
    assert not report.noisy


def test_the_owner_of_simulated_nodes_speaks_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDENTOPT_LABEL_EPSILON", "none")
    assert counts(ask()) == [700, 0, 300]
    assert read_report(ask(run={"label-epsilon": 2.0}), 3).epsilon == 2.0
    assert read_report(ask(node={"label-epsilon": 0.5}), 3).epsilon == 0.5  # the node's own config comes first


def test_with_neither_side_set_the_node_refuses_with_a_reason() -> None:
    reason = refusal(ask())
    assert "label-epsilon" in reason
    assert "700" not in reason


def test_noise_is_added_at_the_smaller_epsilon_and_the_report_says_so() -> None:
    report = read_report(ask(node={"label-epsilon": 0.5}, run={"label-epsilon": 5.0}), 3)
    assert report.epsilon == 0.5
    assert report.counts.tolist() != [700, 0, 300]
    assert np.abs(report.counts - [700, 0, 300]).max() < 2 * 40  # P(|noise| > 40 scales) < 1e-16


def test_asking_again_in_a_run_gives_the_same_bytes() -> None:
    state = RecordDict()
    first = ask(node={"label-epsilon": 0.5}, state=state)
    second = ask(node={"label-epsilon": 0.5}, state=state)
    assert np.array(counts(first)).tobytes() == np.array(counts(second)).tobytes()
    other_run = ask(node={"label-epsilon": 0.5}, state=RecordDict())
    assert counts(other_run) != counts(first)  # nothing was kept: no file, another run


def test_the_owners_file_keeps_the_report_across_runs(tmp_path: Path) -> None:
    node = {"label-epsilon": 0.5, "label-report-file": str(tmp_path / "report.json")}
    first = ask(node=node, state=RecordDict())
    written = (tmp_path / "report.json").stat().st_mtime_ns
    for again in range(3):
        reply = ask(node=node, state=RecordDict(), node_id=500 + again)  # another run, another node id
        assert np.array(counts(reply)).tobytes() == np.array(counts(first)).tobytes()
    assert (tmp_path / "report.json").stat().st_mtime_ns == written


def test_a_node_without_a_name_has_one_report_whatever_id_the_superlink_gives_it(tmp_path: Path) -> None:
    node = {"label-epsilon": 0.5, "label-report-file": str(tmp_path / "report.json")}
    answer = label_report(lambda _: LABELS, 3)
    first, second = (
        counts(answer(label_query(number), Context(1, number, node, RecordDict(), {}))) for number in (500, 501)
    )
    assert np.array(second).tobytes() == np.array(first).tobytes()


def test_the_file_holds_no_true_counts_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    ask(node={"label-epsilon": 0.5, "label-report-file": str(path)})
    kept = json.loads(path.read_text())["reports"]["4"]
    assert 700 not in kept["counts"]
    assert set(kept) == {"counts", "epsilon", "salt", "fingerprint", "drawn", "draws", "epsilon_spent"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_is_followed_and_stays_so_that_the_next_run_finds_the_report(tmp_path: Path) -> None:
    link, volume = tmp_path / "report.json", tmp_path / "volume"
    volume.mkdir()
    node = {"label-epsilon": 0.5, "label-report-file": str(link)}
    link.symlink_to(volume / "kept.json")  # nothing there yet
    first = counts(ask(node=node))
    assert link.is_symlink()
    assert (volume / "kept.json").is_file()
    link.unlink()
    link.symlink_to(volume / "kept.json")  # a new container: the volume alone has stayed
    assert counts(ask(node=node)) == first
    assert counts(ask(node={**node, "label-report-file": str(volume / "kept.json")})) == first


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to a pipe", "link to itself"])
def test_what_is_no_regular_file_is_refused_and_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"{SECRET}.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to a pipe":
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    else:
        path.symlink_to(path)
    mode = path.lstat().st_mode
    with pytest.raises(InputError, match="is not a regular file"), open_report_file(path):
        pass
    reason = refusal(ask(node={"label-epsilon": 0.5, "label-report-file": str(path)}))
    assert "label-report-file" in reason
    assert SECRET not in reason
    assert path.lstat().st_mode == mode


def test_two_nodes_may_share_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "report.json")
    a = ask(node={"label-epsilon": 0.5, "label-report-file": path, "partition-id": 1})
    b = ask(node={"label-epsilon": 0.5, "label-report-file": path, "partition-id": 2})
    assert counts(a) != counts(b)
    assert counts(ask(node={"label-epsilon": 0.5, "label-report-file": path, "partition-id": 1})) == counts(a)


def _drawn_in_a_process(path: str, queue: Any) -> None:
    queue.put(counts(ask(node={"label-epsilon": 0.5, "label-report-file": path})))


def test_two_processes_asked_at_once_give_one_answer(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [
        context.Process(target=_drawn_in_a_process, args=(str(tmp_path / "report.json"), queue)) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    answers = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
    assert all(answer == answers[0] for answer in answers)


def test_threads_wait_for_each_other_too_and_the_lock_is_its_owners_alone(tmp_path: Path) -> None:
    path, inside = tmp_path / "reports.json", threading.Event()

    def other() -> None:
        with open_report_file(path):
            inside.set()

    thread = threading.Thread(target=other)
    with open_report_file(path):
        thread.start()
        assert not inside.wait(0.2)
        if os.name == "posix":
            assert stat.S_IMODE((tmp_path / "reports.json.lock").stat().st_mode) == 0o600
    thread.join(30)
    assert inside.is_set()


def test_a_kept_report_says_what_it_is_and_is_salted_with_16_bytes(tmp_path: Path) -> None:
    path = tmp_path / "reports.json"
    ask(node={"label-epsilon": 0.5, "label-report-file": str(path)})
    content = json.loads(path.read_text())
    assert (content["format"], content["version"]) == ("fedentopt label reports", 1)
    (report,) = content["reports"].values()
    assert len(bytes.fromhex(report["salt"])) == 16
    for change in ({"counts": []}, {"counts": [1.0, float("nan"), 2.0]}, {"epsilon": 0.0}, {"epsilon": -1.0}):
        with pytest.raises(InputError, match="counts must be finite numbers and epsilon above 0"):
            KeptReport.from_dict(report | change)


def test_a_larger_epsilon_gets_the_kept_report_and_a_smaller_one_a_refusal(tmp_path: Path) -> None:
    path = str(tmp_path / "report.json")
    first = ask(run={"label-epsilon": 0.5}, node={"label-report-file": path})
    larger = ask(run={"label-epsilon": 4.0}, node={"label-report-file": path})
    assert counts(larger) == counts(first)
    assert read_report(larger, 3).epsilon == 0.5
    # A server that lowers epsilon step by step must not collect one draw a step.
    assert "epsilon 0.5 is kept and epsilon 0.4" in refusal(
        ask(run={"label-epsilon": 0.4}, node={"label-report-file": path})
    )


def test_changed_labels_are_drawn_again_only_when_the_owner_says_so(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    node = {"label-epsilon": 0.5, "label-report-file": str(path)}
    first = counts(ask(node=node))
    more = np.append(LABELS, 1)
    assert "labels changed" in refusal(ask(more, node=node))
    assert counts(ask(more, node={**node, "label-report-changed": "keep"})) == first
    redrawn = counts(ask(more, node={**node, "label-report-changed": "redraw"}))
    assert redrawn != first
    assert counts(ask(more, node=node)) == redrawn
    kept = json.loads(path.read_text())["reports"]["4"]
    assert (kept["draws"], kept["epsilon_spent"]) == (2, 1.0)
    assert "accepted: refuse, keep, redraw" in refusal(ask(node={**node, "label-report-changed": "maybe"}))


def test_a_report_of_another_number_of_classes_is_not_sent(tmp_path: Path) -> None:
    node = {
        "label-epsilon": 0.5,
        "label-report-file": str(tmp_path / "r.json"),
        "partition-id": 4,
    }
    ask(node=node)
    for changed in ("refuse", "keep", "redraw"):  # the app says how many classes there are, so it could ask for draws
        context = Context(1, 1, {**node, "label-report-changed": changed}, RecordDict(), {})
        reply = label_report(lambda _: LABELS, 5)(label_query(1), context)
        assert "one label-report-file serves one data set" in refusal(reply)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"format": "other", "reports": {}}',
        '{"format": "another", "reports": {}}',
        '{"format": "fedentopt label reports", "reports": {"4": {}}}',
    ],
)
def test_a_damaged_file_is_a_refusal_that_names_no_path(tmp_path: Path, content: str) -> None:
    path = tmp_path / f"{SECRET}.json"
    path.write_text(content)
    reason = refusal(ask(node={"label-epsilon": 0.5, "label-report-file": str(path)}))
    assert "label-report-file" in reason
    assert SECRET not in reason
    assert path.read_text() == content


@pytest.mark.parametrize("path", ["report.json", "/no/such/folder/report.json"])
def test_a_file_that_cannot_be_kept_is_a_refusal(path: str) -> None:
    assert "label-report-file" in refusal(ask(node={"label-epsilon": 0.5, "label-report-file": path}))


def test_what_goes_wrong_with_the_labels_stays_on_the_node() -> None:
    def broken(context: Context) -> Any:
        raise RuntimeError(SECRET)

    for labels in (broken, np.array([0, 1, 4711]), np.array([0.5]), np.array([[1]])):
        reason = refusal(ask(labels, node={"label-epsilon": "none"}))
        assert "could not count its labels" in reason
        assert "4711" not in reason


def test_no_exception_carries_counts_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(counts: np.ndarray, epsilon: float) -> np.ndarray:
        raise RuntimeError(f"{counts} {SECRET}")

    monkeypatch.setattr("fedentopt.flower.client.secure_laplace", failing)
    assert refusal(ask(node={"label-epsilon": 0.5})) == "label report failed on this node; its log says why"


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


def test_only_whole_numbers_in_their_plain_spelling_are_numbers() -> None:
    assert [normal_id(text) for text in ("7", " 7 ", "07", "007", "0", "-1", "7.0")] == [
        7,
        7,
        "07",
        "007",
        0,
        "-1",
        "7.0",
    ]
