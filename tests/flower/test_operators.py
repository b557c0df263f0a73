"""What an operator sees and sets: records of rounds, callbacks, evaluation, a strategy from the run config."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Message
from flwr.serverapp.strategy import FedAdam, FedAvg, Krum, Result

from fedentopt import RandomSelector
from fedentopt.errors import InputError
from fedentopt.flower import FedEntOpt, LabelAware, strategy_from, to_tensorboard, to_wandb
from fedentopt.flower.configured import strategies
from fedentopt.flower.progress import numbers_of
from fedentopt.release import OwnerSettings
from fedentopt.selection import SELECTORS, EntropySwapSelector
from fedentopt.selection.measures import entropy
from flower_fake_grid import CLASSES, FakeGrid, FastClock, Node, broken, federation, model, skewed


def made(**options: Any) -> LabelAware:
    settings: dict[str, Any] = {
        "cohort_size": 3, "buffer_size": 2, "num_classes": CLASSES, "seed": 5, "fraction_evaluate": 0.0,
        "min_available_nodes": 1, **options,
    }  # fmt: skip
    strategy = FedEntOpt(**settings)
    strategy.clock = FastClock()
    return strategy


def noisy(grid: FakeGrid) -> FakeGrid:
    for node in grid.nodes.values():
        node.config = {"label-epsilon": 0.5 if node.client % 2 else 2.0}
    return grid


def test_a_rounds_record_is_in_the_result_in_the_file_and_with_the_callbacks(tmp_path: Path) -> None:
    grid = federation()
    grid.nodes[1000].train = broken
    told: list[Any] = []
    live: list[int] = []
    path = tmp_path / "deep" / "rounds.jsonl"

    def callback(record: Any) -> None:
        told.append(record)
        live.append(len(path.read_text().splitlines()))

    strategy = made(metrics_file=path, callbacks=[callback], fraction_evaluate=0.5, cohort_size=6)
    result = strategy.start(grid, model(), num_rounds=4, evaluate_fn=lambda *_: None)
    assert isinstance(result, Result)
    assert live == [1, 2, 3, 4]  # as the run goes
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == told == [result.rounds[number] for number in (1, 2, 3, 4)]
    for line, entry in zip(lines, strategy.history, strict=True):
        assert line["cohort"] == list(entry.cohort.clients)
        assert line["entropy"] == entry.cohort.entropy
        assert line["suspects"] == []
        assert line["online"] == line["known"] == 8
        numbers = result.train_metrics_clientapp[line["round"]]
        assert numbers["selection-entropy"] == entry.cohort.entropy
        assert numbers["selection-failures"] == len(line["failed"])
        assert numbers["selection-clients"] == 6
        assert line["evaluate"] == {"loss": 0.5}
    assert {client for line in lines for client in line["failed"]} == {"0"}
    assert all("division by zero" in reason for line in lines for reason in line["failed"].values())


def test_a_result_prints_flowers_summary_and_not_the_model(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="flwr"):
        result = made().start(federation(), model(), num_rounds=1)
    shown = repr(result)
    end = caplog.messages[caplog.messages.index("Final results:") + 2 :]
    assert end == [f"\t{line}" for line in shown.splitlines()]
    assert shown.startswith("Global Arrays:\n\tArrayRecord (0.000 MB)")
    assert "'selection-entropy'" in shown
    assert "NUMPY" not in shown


def test_the_epsilon_of_a_round_is_the_largest_that_its_clients_used() -> None:
    grid = noisy(federation())
    result = made(cohort_size=8, buffer_size=0).start(grid, model(), num_rounds=1)
    assert result.rounds[1]["label_epsilon"] == 2.0
    assert result.train_metrics_clientapp[1]["selection-label-epsilon"] == 2.0
    assert made().start(federation(), model(), num_rounds=1).rounds[1]["label_epsilon"] is None


def test_a_round_with_true_counts_among_noisy_ones_has_no_epsilon() -> None:
    grid = noisy(federation())
    grid.nodes[1000].config = {"label-epsilon": "none"}
    result = made(cohort_size=8, buffer_size=0).start(grid, model(), num_rounds=1)
    assert result.rounds[1]["label_epsilon"] is None
    assert "selection-label-epsilon" not in result.train_metrics_clientapp[1]


def test_after_a_stop_the_file_holds_every_round_once(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    made(metrics_file=path, checkpoint_dir=tmp_path / "c").start(federation(), model(), num_rounds=2)
    path.write_text(path.read_text() + '{"round": 3}\n')  # a round whose checkpoint was not written any more
    made(metrics_file=path, checkpoint_dir=tmp_path / "c").start(federation(), model(), num_rounds=4)
    assert [json.loads(line)["round"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_a_file_that_cannot_be_written_is_refused_before_a_round_is_spent(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    grid = federation()
    with pytest.raises(InputError, match=r"metrics_file: .*accepted: a file in a folder that can be written to"):
        made(metrics_file=tmp_path / "file" / "rounds.jsonl").start(grid, model())
    assert grid.asked == []


@pytest.mark.parametrize("content", ["what we decided on Monday\n", "[1, 2]\n", "7\n", '"round"\n', '{"lr": 0.1}\n'])
def test_a_file_that_holds_no_rounds_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text(content)
    grid = federation()
    with pytest.raises(InputError, match=r"metrics_file: .* holds no rounds of a run; accepted: another file"):
        made(metrics_file=path).start(grid, model())
    assert path.read_text() == content
    assert grid.asked == []


@pytest.mark.skipif(sys.platform == "win32", reason="pipes and links in the file system")
def test_a_link_to_the_file_stays_one_and_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "rounds.jsonl"
    link.symlink_to(tmp_path / "disk" / "rounds.jsonl")
    made(metrics_file=link).start(federation(), model(), num_rounds=2)
    assert link.is_symlink()
    assert len((tmp_path / "disk" / "rounds.jsonl").read_text().splitlines()) == 2
    os.mkfifo(tmp_path / "pipe")
    for odd in (tmp_path / "pipe", tmp_path / "disk"):
        with pytest.raises(InputError, match=r"metrics_file: .* is not a regular file"):
            made(metrics_file=odd).start(federation(), model())
    assert (tmp_path / "pipe").is_fifo()


def test_the_file_of_a_run_before_is_begun_anew_and_an_empty_one_taken(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.touch()
    for rounds in (3, 2):
        made(metrics_file=path).start(federation(), model(), num_rounds=rounds)
        assert len(path.read_text().splitlines()) == rounds


def test_what_a_callback_writes_into_its_record_stays_there(tmp_path: Path) -> None:
    def writes(record: Any) -> None:
        record["train"]["mine"] = np.float32(1)  # no JSON, and the next checkpoint would hold it

    result = made(callbacks=[writes], checkpoint_dir=tmp_path).start(federation(), model(), num_rounds=2)
    assert not any("mine" in record["train"] for record in result.rounds.values())


def test_a_callback_that_fails_is_logged_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def fails(record: Any) -> None:
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR, logger="flwr"):
        result = made(callbacks=[fails]).start(federation(), model(), num_rounds=3)
    assert result.rounds.keys() == {1, 2, 3}
    assert sum("callback fails failed; the run goes on" in line for line in caplog.messages) == 3


@pytest.mark.parametrize("kind", ["train", "evaluate"])
@pytest.mark.parametrize("given", ["raises", "numbers that Flower does not keep"])
def test_metrics_that_cannot_be_combined_cost_the_round_no_more_than_them(
    kind: str, given: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def combine(records: Any, weighted_by: str) -> Any:
        if given == "raises":
            raise KeyError("accuracy")
        return {"accuracy": np.float32(0.5)}

    options = {f"{kind}_metrics_aggr_fn": combine, "fraction_evaluate": 1.0, "checkpoint_dir": tmp_path}
    with caplog.at_level(logging.ERROR, logger="flwr"):
        result = made(**options).start(federation(), model(), num_rounds=2)
    assert sum(f"{kind}_metrics_aggr_fn failed: " in line for line in caplog.messages) == 2
    assert [record["problem"] for record in result.rounds.values()] == [None, None]
    want = made().start(federation(), model(), num_rounds=2)
    assert result.arrays["w"].numpy().tobytes() == want.arrays["w"].numpy().tobytes()
    assert result.arrays["w"].numpy().any()


def test_what_evaluate_fn_returns_is_kept_or_refused_by_name(tmp_path: Path) -> None:
    result = made().start(federation(), model(), 1, evaluate_fn=lambda *_: {"accuracy": 0.5})  # type: ignore[arg-type,return-value]
    assert {number: dict(record) for number, record in result.evaluate_metrics_serverapp.items()} == {
        number: {"accuracy": 0.5} for number in (0, 1)
    }
    grid = federation()
    bad: Any = lambda *_: {"accuracy": np.float32(0.5)}  # noqa: E731
    with pytest.raises(InputError, match=r"evaluate_fn: gave {'accuracy': .*}; accepted: a MetricRecord"):
        made(checkpoint_dir=tmp_path).start(grid, model(), 1, evaluate_fn=bad)
    assert grid.asked == []


def test_curves_go_to_tensorboard_and_wandb_where_they_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    logged: list[Any] = []

    class Run:
        def log(self, numbers: Any, step: int) -> None:
            logged.append((step, numbers))

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **options: Run()))
    callbacks = [to_tensorboard(tmp_path / "tb"), to_wandb(project="p")]
    result = made(callbacks=callbacks).start(federation(), model(), num_rounds=2)
    assert [step for step, _ in logged] == [1, 2]
    assert logged[0][1]["entropy"] == result.rounds[1]["entropy"]
    assert logged[0][1]["train/train_loss"] == 0.5
    assert logged == [(number, numbers_of(record)) for number, record in result.rounds.items()]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [event.value for event in events.Scalars("entropy")] == pytest.approx(
        [result.rounds[number]["entropy"] for number in (1, 2)]
    )
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"to_wandb: .*pip install wandb"):
        to_wandb()


# --- who evaluates
def evaluators(grid: FakeGrid) -> list[list[Any]]:
    return [[grid.nodes[node].client for node in nodes] for nodes in grid.sent("evaluate")]


@pytest.mark.parametrize("by", ["seed", "labels"])
def test_who_evaluates_is_drawn_with_the_seed_and_not_by_node_ids(by: str) -> None:
    grids = [federation(shuffle=s, first=first) for s, first in ((0, 1000), (1, 2**40))]
    for grid in grids:
        made(fraction_evaluate=0.5, evaluate_by=by).start(grid, model(), num_rounds=4)
    assert evaluators(grids[0]) == evaluators(grids[1])
    assert [len(set(clients)) for clients in evaluators(grids[0])] == [4] * 4
    assert len({tuple(clients) for clients in evaluators(grids[0])}) > 1


def test_evaluation_by_labels_is_more_even() -> None:
    counts = np.stack([np.bincount(labels, minlength=CLASSES) for labels in skewed(8)])
    means = {}
    for by in ("seed", "labels"):
        grid = federation()
        made(fraction_evaluate=0.3, evaluate_by=by, min_evaluate_nodes=2).start(grid, model(), num_rounds=12)
        means[by] = np.mean([entropy(counts[clients].sum(0)) for clients in evaluators(grid)])
    assert means["labels"] > means["seed"]


def test_nodes_that_refused_or_are_excluded_do_not_evaluate() -> None:
    grid = federation()
    refusing = next(node for node in grid.nodes.values() if node.client == 2)
    refusing.query = broken
    made(fraction_evaluate=1.0, exclude=[5]).start(grid, model(), num_rounds=2)
    assert [sorted(clients) for clients in evaluators(grid)] == [[0, 1, 3, 4, 6, 7]] * 2


def test_a_node_that_lets_evaluations_time_out_holds_up_few_rounds(tmp_path: Path) -> None:
    grid = federation()
    work = grid._work

    def hangs(message: Message) -> Message | None:
        evaluates = message.metadata.message_type == "evaluate"
        return None if evaluates and grid.nodes[message.metadata.dst_node_id].client == 3 else work(message)

    grid._work = hangs  # type: ignore[method-assign]
    waited = 0.0
    for rounds in (3, 16):  # stopped and continued
        strategy = made(fraction_evaluate=1.0, cohort_size=2, checkpoint_dir=tmp_path)
        strategy.start(grid, model(), num_rounds=rounds, timeout=600)
        waited += strategy.clock.now()
    asked = [number for number, clients in enumerate(evaluators(grid), start=1) if 3 in clients]
    assert asked == [1, 3, 6, 11]  # it sits out 1, 2, 4, ... rounds
    assert waited == pytest.approx(4 * 600, rel=0.1)
    assert {len(clients) for clients in evaluators(grid)} == {7, 8}


def test_where_nobody_answers_an_evaluation_the_next_round_is_without(caplog: pytest.LogCaptureFixture) -> None:
    grid = federation()
    work = grid._work

    def hang(message: Message) -> Message | None:
        return None if message.metadata.message_type == "evaluate" else work(message)

    grid._work = hang  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, logger="flwr"):
        made(fraction_evaluate=1.0).start(grid, model(), num_rounds=2, timeout=60)
    assert len(evaluators(grid)) == 1
    assert "round 2: no evaluation on the nodes, none of those online answered the last one" in caplog.text


def test_evaluate_by_something_else_is_refused() -> None:
    with pytest.raises(InputError, match="evaluate_by: 'luck' is unknown; accepted: seed, labels"):
        made(evaluate_by="luck")


# --- a strategy from the run config
def test_a_strategy_is_made_from_the_run_config() -> None:
    told: dict[str, Any] = {
        "fedentopt.strategy": "FedAdam", "fedentopt.cohort-size": 3, "fedentopt.buffer-size": 2, "fedentopt.eta": 0.02,
        "fedentopt.num-classes": CLASSES, "fedentopt.seed": 4, "fedentopt.release": "random", "lr": 0.1,
        "fedentopt.size-cap": "none", "fedentopt.exclude": "3, oslo", "fedentopt.target": "1,1,2,1,1",
    }  # fmt: skip
    strategy = strategy_from(told, fraction_evaluate=0.0, min_available_nodes=1)
    assert isinstance(strategy, FedAdam)
    assert isinstance(strategy, LabelAware)
    assert (strategy.eta, strategy.cohort_size, strategy.roster.size_cap) == (0.02, 3, None)
    assert strategy.census.exclude == {3, "oslo"}
    assert strategy.selector.release == "random"  # type: ignore[attr-defined]
    assert strategy.selector.target[2] == pytest.approx(1 / 3)  # type: ignore[attr-defined]
    assert len(strategy.start(federation(), model(), num_rounds=2).rounds) == 2


def test_where_relative_paths_of_a_run_config_lead_is_in_the_log_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    told = {
        "fedentopt.cohort-size": 3, "fedentopt.num-classes": CLASSES,
        "fedentopt.checkpoint-dir": "kept", "fedentopt.metrics-file": "told/rounds.jsonl",
    }  # fmt: skip
    strategy = strategy_from(told, fraction_evaluate=0.0, min_available_nodes=1)
    with caplog.at_level(logging.INFO, logger="flwr"):
        strategy.start(federation(), model(), num_rounds=2)
    for what, path in (("Checkpoints", tmp_path / "kept"), ("Metrics file", tmp_path / "told" / "rounds.jsonl")):
        assert path.exists()
        assert sum(line.endswith(f"{what}: {path}") for line in caplog.messages) == 1
    caplog.clear()
    told |= {"fedentopt.checkpoint-dir": "none", "fedentopt.metrics-file": ""}
    with caplog.at_level(logging.INFO, logger="flwr"):
        strategy_from(told, fraction_evaluate=0.0, min_available_nodes=1).start(federation(), model(), num_rounds=1)
    assert sum(line.endswith(("Checkpoints: none", "Metrics file: none")) for line in caplog.messages) == 2


def test_another_selector_is_made_with_its_settings() -> None:
    told = {"fedentopt.selector": "random", "fedentopt.cohort-size": 3, "fedentopt.num-classes": 5, "fedentopt.seed": 9}
    strategy = strategy_from(told)
    assert isinstance(strategy.selector, RandomSelector)
    assert strategy.selector.seed == 9


def test_exchanges_are_made_with_a_buffer_and_a_target() -> None:
    told = {
        "fedentopt.selector": "fedentopt-swap", "fedentopt.cohort-size": 3, "fedentopt.num-classes": CLASSES,
        "fedentopt.buffer-size": 2, "fedentopt.release": "random", "fedentopt.target": "1,1,2,1,1", "fedentopt.seed": 4,
    }  # fmt: skip
    strategy = strategy_from(told, fraction_evaluate=0.0, min_available_nodes=1)
    strategy.clock = FastClock()
    selector = strategy.selector
    assert isinstance(selector, EntropySwapSelector)
    assert (selector.buffer_size, selector.release, selector.seed) == (2, "random", 4)
    assert selector.target is not None
    assert selector.target[2] == pytest.approx(1 / 3)
    assert len(strategy.start(federation(), model(), num_rounds=2).rounds) == 2


def test_every_selector_can_be_named() -> None:
    """Those that Flower cannot serve are refused for what they need, not for their name."""
    for name in SELECTORS.names:
        told = {"selector": name, "cohort-size": 3, "num-classes": CLASSES, "seed": 1}
        if SELECTORS.get(name).labels_from_heads:
            told |= {"local-lr": 0.1, "local-steps": 3}
        assert strategy_from({f"fedentopt.{key}": value for key, value in told.items()}).selector.name == name


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"strategy": "FedMagic"}, "strategy: 'FedMagic' is unknown; accepted: .*FedAdam"),
        ({"strategy": "FedXgbCyclic"}, "strategy: 'FedXgbCyclic' is unknown"),
        ({"selector": "magic"}, "selector: 'magic' is unknown; accepted: .*fedentopt"),
        ({"eta": 0.1}, r"fedentopt\.eta: unknown setting; accepted: .*cohort-size"),
        ({"fraction-train": 0.1}, r"fedentopt\.fraction-train: unknown setting"),
        ({"selector": "random", "buffer-size": 2}, r"fedentopt\.buffer-size: unknown setting"),
        ({"selector": "inferred", "target": "1,1,2,1,1"}, r"fedentopt\.target: unknown setting"),
        ({"target": "a,b"}, "target: 'a,b'"),
        ({"cohort-size": 0}, "cohort_size: 0"),
        ({"bind-names": "true"}, "bind_names: 'true' is not accepted"),
    ],
)
def test_keys_and_values_that_are_not_accepted_are_refused(more: dict[str, Any], message: str) -> None:
    told = {"cohort-size": 3, "num-classes": CLASSES, **more}
    with pytest.raises(InputError, match=message):
        strategy_from({f"fedentopt.{name}": value for name, value in told.items()})
    with pytest.raises(InputError, match=r"fedentopt\.cohort-size: not set"):
        strategy_from({"fedentopt.num-classes": 3})


def test_one_client_may_be_excluded_by_its_number() -> None:
    strategy = strategy_from({"fedentopt.cohort-size": 3, "fedentopt.num-classes": CLASSES, "fedentopt.exclude": 7})
    assert strategy.census.exclude == {7}


def test_every_strategy_that_descends_from_fedavg_can_be_named() -> None:
    found = strategies()
    assert {"FedAvg", "FedAdam", "FedTrimmedAvg", "QFedAvg", "Krum", "MultiKrum", "Bulyan", "FedXgbBagging"} <= set(
        found
    )
    assert found["Krum"] is Krum
    assert all(issubclass(cls, FedAvg) for cls in found.values())


def test_a_named_federation_is_picked_from_by_name() -> None:
    labels = skewed(4)
    grid = FakeGrid({9 + k: Node(name, labels[k]) for k, name in enumerate(["oslo", "bern", "riga", "12"])}, CLASSES)
    result = made().start(grid, model(), num_rounds=2)
    assert set(result.rounds[1]["cohort"]) <= {"oslo", "bern", "riga", 12}


def test_clients_that_claim_too_much_are_suspects() -> None:
    grid = federation()
    number = next(n for n, node in grid.nodes.items() if node.client == 6)
    grid.nodes[number].labels = np.repeat(np.arange(CLASSES), 1000)
    result = made().start(grid, model(), num_rounds=2)
    assert [result.rounds[r]["suspects"] for r in (1, 2)] == [[6], [6]]
    assert result.train_metrics_clientapp[2]["selection-suspects"] == 1


@pytest.mark.parametrize("name", ["size_cap", "weight_cap"])
@pytest.mark.parametrize("bad", [0, 0.5, -1, float("nan"), float("inf"), True, "10"])
def test_a_cap_below_what_is_usual_is_refused(name: str, bad: Any) -> None:
    with pytest.raises(InputError, match=f"{name}: .*accepted: numbers from 1"):
        made(**{name: bad})


# --- a run that is kept running
def test_a_run_that_crashes_is_started_again_until_its_results_say_that_it_finished(tmp_path: Path) -> None:
    """`flwr run` ends with 0 after a crash; the recipe looks at the results instead."""
    script = Path(__file__).parent.parent.parent / "examples" / "flower-server" / "keep-running.sh"
    results, programs = tmp_path / "results", tmp_path / "bin"
    programs.mkdir()
    fake = programs / "flwr"
    fake.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n'
        f"test $(wc -l < {tmp_path}/calls) -lt 3 && exit 0\n"
        f"mkdir -p {results}/run && printf '{{\\n  \"finished\": true\\n}}' > {results}/run/summary.json\n"
    )
    fake.chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "PAUSE": "0"}
    words = [str(script), str(results), "app", "federation", "--run-config", "rounds=3 a=1"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "calls").read_text().splitlines() == [
        "run app federation --run-config rounds=3 a=1 --stream"
    ] * 3
    again = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0
    assert len((tmp_path / "calls").read_text().splitlines()) == 3  # finished: nothing to start


def test_the_nodes_of_the_compose_file_would_answer() -> None:
    """With noise a real node refuses unless its answer is kept in a file, here on a volume of its own place."""
    yaml = pytest.importorskip("yaml")
    folder = Path(__file__).parent.parent.parent / "examples" / "flower-server"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    kept = set()
    for number in range(6):
        service = services[f"node-{number}"]
        words = shlex.split(service["command"])
        told = words[words.index("--node-config") + 1]
        config = tomllib.loads("\n".join(shlex.split(told, posix=False)))
        owner = OwnerSettings.read(config)
        assert config["partition-id"] == number
        assert owner.epsilon == 1.0
        mounted = {volume.split(":")[1] for volume in service["volumes"]}
        assert owner.file is not None
        assert {str(owner.file.parent), str(owner.ledger)} == mounted
        kept.add(owner.file)
    assert len(kept) == 6


def test_the_node_of_the_systemd_unit_would_answer() -> None:
    unit = (Path(__file__).parent.parent.parent / "examples" / "flower-server" / "supernode.service").read_text()
    [told] = [line.removeprefix("#   NODE_CONFIG=") for line in unit.splitlines() if "NODE_CONFIG=" in line]
    [words] = shlex.split(told)  # as systemd reads an EnvironmentFile: the quotes inside stay
    config = tomllib.loads("\n".join(shlex.split(words, posix=False)))
    owner = OwnerSettings.read(config)
    assert owner.epsilon == 0.5
    assert owner.file is not None
    assert {"client-id", "data", "class-names"} <= config.keys()
    assert "EnvironmentFile=/srv/fl/node.env" in unit
