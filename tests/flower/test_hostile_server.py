"""A server that tries to learn more than one noisy answer from the example app's nodes.

It sends what it likes: run configs, message contents, run ids and node ids, in any order, for as long as it likes. The
node is the example's own ClientApp with the configuration that a careful owner gives it.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")
pytest.importorskip("torch")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_fake_grid import label_query

APP = Path(__file__).parent.parent.parent / "examples" / "flower-app"
CLASSES = ("ant", "bee", "cat", "dog")
HELD = (17, 30, 0, 1)  # the numbers that a server would like to know
REFUSED = "error 700 refused by this node; its log says why"
RUN: dict[str, Any] = {
    "dataset": "digits", "class-names": ",".join(CLASSES), "image-size": 0, "model": "lenet5", "clients": 2,
    "partition": "dir:0.3", "selector": "fedentopt", "cohort": "1", "buffer": "1", "label-epsilon": 1.0,
    "algorithm": "fedavg", "rounds": 1, "epochs": 1, "batch-size": 16, "seed": 0,
}  # fmt: skip


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ClientApp]:
    monkeypatch.setattr(sys, "path", [str(APP), *sys.path])
    monkeypatch.setenv("FEDENTOPT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    from fedentopt_app.client_app import app as made
    from fedentopt_app.data import load_data

    load_data.cache_clear()
    yield made
    load_data.cache_clear()


def write_data(path: Path, held: tuple[int, ...]) -> None:
    labels = np.repeat(np.arange(len(held)), held)
    images = np.random.default_rng(0).integers(0, 255, (len(labels), 32, 32, 3), dtype=np.uint8)
    np.savez(path, x_train=images, y_train=labels, x_test=images[:1], y_test=labels[:1], class_names=list(CLASSES))


@pytest.fixture
def node(tmp_path: Path) -> dict[str, Any]:
    write_data(tmp_path / "own.npz", HELD)
    return {
        "client-id": "oslo",
        "data": str(tmp_path / "own.npz"),
        "class-names": ",".join(CLASSES),
        "label-epsilon": 0.5,
        "label-report-file": str(tmp_path / "report.json"),
    }


def tries(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Run configs that ask for the labels in every way the app's settings allow."""
    orders = list(itertools.permutations(CLASSES))
    files = ["digits", "/etc/passwd", "own.npz", "no-such-data"]
    while True:
        names = rng.choice([*orders, CLASSES[:2], (*CLASSES, "elk"), ("ant", "ant", "bee", "cat", "dog"), ()])
        yield RUN | {
            "class-names": ",".join(names),
            "dataset": rng.choice(files),
            "partition": rng.choice(["dir:0.3", "dir:100", "classes:2", "iid", "nonsense"]),
            "clients": rng.choice([1, 2, 3, 20]),
            "seed": rng.randrange(100),
            "label-epsilon": rng.choice(["none", "", 1e-3, 0.4, 0.5, 7.0, 1e6, "much"]),
            "image-size": rng.choice([0, 8, 32]),
            "label-report-file": "/tmp/elsewhere.json",
            "label-report-release": rng.randrange(1, 50),
            "label-report-changed": "redraw",
            "label-epsilon-total": 1e6,
            "num-examples": "exact",
        }


def ask(app: ClientApp, node: dict[str, Any], run: dict[str, Any], rng: random.Random) -> Message:
    """One question, in a new run, to a node under a new Flower id, with things in it."""
    number = rng.getrandbits(60)
    query = label_query(number)
    settings = ConfigRecord({key: value for key, value in run.items() if isinstance(value, int | float | str)})
    query.content["config"] = settings
    return app(query, Context(rng.getrandbits(60), number, dict(node), RecordDict(), run))


def seen(reply: Message) -> str:
    """All that reaches the server."""
    if reply.has_error():
        return f"error {reply.error.code} {reply.error.reason}"
    return repr({key: dict(record) for key, record in sorted(reply.content.items())})


def test_a_hundred_run_configs_bring_one_answer(app: ClientApp, node: dict[str, Any]) -> None:
    rng = random.Random(1)
    answers = {seen(ask(app, node, run, rng)) for run in itertools.islice(tries(rng), 100)}
    assert len(answers) == 1
    (answer,) = answers
    assert "'epsilon': 0.5" in answer
    assert "error" not in answer


def test_the_answer_is_noise_around_the_owners_counts_in_the_owners_order(app: ClientApp, node: dict[str, Any]) -> None:
    rng = random.Random(2)
    reply = ask(app, node | {"label-epsilon": 1000.0}, RUN | {"class-names": "dog,cat,bee,ant"}, rng)
    assert reply.content["labels"]["label-counts"] == list(HELD)  # P(any noise at epsilon 1000) < 1e-400


def test_changed_data_show_in_nothing_until_the_owner_releases_them(
    app: ClientApp, node: dict[str, Any], tmp_path: Path
) -> None:
    from fedentopt_app.data import load_data

    rng = random.Random(3)
    first = seen(ask(app, node, RUN, rng))
    for held in ((17, 30, 1, 1), (0, 0, 0, 90), (1, 0, 0, 0)):
        write_data(tmp_path / "own.npz", held)
        load_data.cache_clear()
        assert {seen(ask(app, node, run, rng)) for run in itertools.islice(tries(rng), 10)} == {first}
    (tmp_path / "own.npz").unlink()
    load_data.cache_clear()
    assert seen(ask(app, node, RUN, rng)) == first
    write_data(tmp_path / "own.npz", (5, 5, 5, 5))
    load_data.cache_clear()
    owner = node | {"label-report-release": 2, "label-epsilon": 1000.0, "label-epsilon-total": 2000}
    assert ask(app, owner, RUN, rng).content["labels"]["label-counts"] == [5, 5, 5, 5]
    assert seen(ask(app, node, RUN, rng)) == first


@pytest.mark.parametrize(
    "trouble",
    [
        {"label-epsilon": ""},
        {"label-epsilon": "much"},
        {"label-report-file": ""},
        {"label-report-file": "/no/such/folder/report.json"},
        {"label-report-release": 0},
        {"label-epsilon-total": 0.1},
        {"label-ledger": "/dev/null/ledger"},
        {"data": "/no/such/data.npz"},
        {"class-names": "ant,bee"},
        {"class-names": ""},
        {"num-examples": "some"},
    ],
)
def test_every_refusal_reads_alike_and_the_log_has_the_cause(
    app: ClientApp, node: dict[str, Any], trouble: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(4)
    answers = {seen(ask(app, node | trouble, run, rng)) for run in itertools.islice(tries(rng), 5)}
    assert answers == {REFUSED}
    (name,) = trouble
    assert name in caplog.text


def test_shares_of_a_data_set_are_the_owners_too(app: ClientApp, tmp_path: Path) -> None:
    owner = {
        "partition-id": 1,
        "num-partitions": 2,
        "label-epsilon": 0.5,
        "label-report-file": str(tmp_path / "report.json"),
    }
    rng = random.Random(5)
    assert len({seen(ask(app, owner, run, rng)) for run in itertools.islice(tries(rng), 100)}) == 1


def train(app: ClientApp, node: dict[str, Any], run: dict[str, Any]) -> Message:
    """A training message, with the model the app's server would send."""
    from fedentopt.models import build

    model = build(run["model"], 4, seed=0, image_size=32)
    told = ConfigRecord({"server-round": 1, "mean": [0.5] * 3, "std": [0.25] * 3})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "config": told})
    message = Message(content, dst_node_id=7, message_type="train")
    return app(message, Context(1, 7, dict(node), RecordDict(), run))


def metrics(reply: Message) -> dict[str, Any]:
    assert not reply.has_error(), reply.error
    (record,) = (record for record in reply.content.values() if isinstance(record, MetricRecord))
    return dict(record)


def test_a_training_reply_tells_the_noisy_total_and_no_other_number_of_samples(
    app: ClientApp, node: dict[str, Any]
) -> None:
    reported = ask(app, node, RUN, random.Random(6)).content["labels"]["label-counts"]
    assert metrics(train(app, node, RUN)) == {"num-examples": max(1, sum(reported))}
    assert metrics(train(app, node | {"num-examples": "uniform"}, RUN)) == {"num-examples": 1}
    assert metrics(train(app, node | {"num-examples": "exact"}, RUN)) == {"num-examples": sum(HELD)}


def test_a_training_reply_announces_the_owners_release(app: ClientApp, node: dict[str, Any]) -> None:
    released = node | {"label-report-release": 2, "label-epsilon-total": 100.0}
    for told, release in ((node, 1), (released, 2)):
        reply = train(app, told, RUN)
        assert dict(reply.content["client"]) == {"release": release}


def test_training_before_the_question_draws_the_answer_that_is_kept(app: ClientApp, node: dict[str, Any]) -> None:
    told = metrics(train(app, node, RUN))["num-examples"]
    assert told == max(1, sum(ask(app, node, RUN, random.Random(7)).content["labels"]["label-counts"]))


def test_a_server_with_other_classes_is_refused_training_in_the_same_words(
    app: ClientApp, node: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    for names in ("dog,cat,bee,ant", "ant,bee", ""):
        assert seen(train(app, node, RUN | {"class-names": names})) == REFUSED
    assert "accepted: the owner's" in caplog.text


def test_batchnorm_does_not_count_the_batches_for_the_server(
    app: ClientApp, node: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "with_batchnorm.py").write_text(
        "from torch import nn\n\n\ndef make(num_classes):\n    return nn.Sequential(\n"
        "        nn.Flatten(), nn.Linear(3072, 8), nn.BatchNorm1d(8), nn.Linear(8, num_classes)\n    )\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    reply = train(app, node, RUN | {"model": "with_batchnorm:make"})
    assert not reply.has_error(), reply.error
    trained = {name: array.numpy() for name, array in reply.content["arrays"].items()}
    assert trained["2.num_batches_tracked"] == 0
    assert np.abs(trained["2.running_mean"]).max() > 0
