"""Hand-computed figures of runs and of methods over seeds."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from configs import run_config
from fedentopt.report.curve_plot import plot_accuracy
from fedentopt.results.aggregate import by_method, difference, reached_by_all
from fedentopt.results.label_counts import LabelTable
from fedentopt.results.reading import RunResult
from fedentopt.results.records import RoundRecord
from fedentopt.results.rounds import RoundTable
from fedentopt.results.summary import accuracy_curve, averaged_rounds, rounds_to, summarise
from fedentopt.simulation.config import RunConfig


def record(number: int, accuracy: float | None, clients: tuple[int, ...] = (0, 1), **more) -> RoundRecord:
    classes = None if accuracy is None else (accuracy + 4, accuracy - 4)
    fields = {
        "trained": clients, "entropy": number / 10, "classes_covered": 2, "bytes_up": 10, "bytes_down": 20,
        "seconds": 0.5, "loss": 1.0, "class_accuracy": classes,
    }  # fmt: skip
    return RoundRecord(round=number, accuracy=accuracy, clients=clients, **{**fields, **more})


def result(config: RunConfig, accuracies: list[float | None], diverged: int | None = None) -> RunResult:
    records = [record(number, value) for number, value in enumerate(accuracies, start=1)]
    rounds = max(len(accuracies), config.rounds)
    summary = summarise(records, rounds=rounds, num_classes=2, clients=4, diverged_round=diverged)
    about = {"config": config.to_dict(), "method": config.method, "run_id": config.run_id}
    labels = LabelTable(tuple("0123"), ("a", "b"), None)
    return RunResult(about, summary, labels=labels, rounds=RoundTable.of(records, 2))


def test_accuracy_is_the_mean_of_the_last_ten_rounds() -> None:
    records = [record(number, float(number)) for number in range(1, 13)]
    summary = summarise(records, rounds=12, num_classes=2, clients=4)
    assert summary["accuracy"] == pytest.approx(7.5)  # 3..12
    assert summary["final_accuracy"] == 12
    assert summary["best_accuracy"] == 12
    assert summary["class_accuracy"] == pytest.approx([11.5, 3.5])
    assert summary["worst_class_accuracy"] == pytest.approx(3.5)
    assert summary["mean_entropy"] == pytest.approx(0.65)
    assert summary["min_entropy"] == pytest.approx(0.1)
    assert (summary["bytes_up"], summary["bytes_down"], summary["seconds"]) == (120, 240, 6.0)
    assert (summary["rounds"], summary["finished"], summary["chance"]) == (12, True, 50.0)
    assert summary["diverged_round"] is None


def test_rounds_without_evaluation_do_not_count() -> None:
    sparse = [record(number, 40.0 if number == 2 else None) for number in range(1, 6)]
    full = [record(number, 50.0) for number in range(6, 16)]
    summary = summarise([*sparse, *full], rounds=15, num_classes=2, clients=4, targets=[40, 45.5, 60])
    assert summary["accuracy"] == 50
    assert {t: summary["rounds_to"][t] for t in ("30", "40", "45.5", "50", "60")} == {
        "30": 2, "40": 2, "45.5": 6, "50": 6, "60": None,
    }  # fmt: skip


def test_selection_is_summed_over_rounds() -> None:
    records = [record(1, 1.0, (0, 1)), record(2, 1.0, (0, 1)), record(3, 1.0, (0, 2))]
    summary = summarise(records, rounds=3, num_classes=2, clients=4)
    shares = [3 / 6, 2 / 6, 1 / 6]
    assert summary["h_norm"] == pytest.approx(-sum(p * math.log2(p) for p in shares) / math.log2(4))
    assert summary["never_selected"] == 1


def test_a_diverged_run_is_chance_from_its_round_to_the_last() -> None:
    # It stopped recording in round 4 of 8, where the broken model still scored; classes fall to chance too.
    records = [record(number, 80.0) for number in range(1, 5)]
    summary = summarise(records, rounds=8, num_classes=2, clients=4, diverged_round=4)
    assert summary["accuracy"] == pytest.approx((3 * 80 + 5 * 50) / 8)
    assert summary["final_accuracy"] == 50
    assert summary["best_accuracy"] == 80
    assert summary["class_accuracy"] == pytest.approx([(3 * 84 + 5 * 50) / 8, (3 * 76 + 5 * 50) / 8])
    assert summary["diverged_round"] == 4
    curve = accuracy_curve(records, rounds=8, num_classes=2, diverged_round=4)
    assert curve == {1: 80, 2: 80, 3: 80, 4: 50, 5: 50, 6: 50, 7: 50, 8: 50}
    assert rounds_to(curve, 80) == 1


def test_a_run_diverged_at_once_is_chance_throughout() -> None:
    nan = float("nan")
    records = [record(number, nan, loss=nan, class_accuracy=(nan, nan)) for number in range(1, 4)]
    summary = summarise(records, rounds=3, num_classes=2, clients=4, diverged_round=1)
    assert summary["accuracy"] == summary["best_accuracy"] == summary["worst_class_accuracy"] == 50
    json.dumps(summary, allow_nan=False)


def test_a_class_without_test_samples_has_no_accuracy_and_is_not_the_worst() -> None:
    records = [record(number, 60.0, class_accuracy=(60.0, float("nan"), 70.0)) for number in (1, 2)]
    summary = summarise(records, rounds=2, num_classes=3, clients=4)
    assert summary["class_accuracy"] == [60, None, 70]
    assert summary["worst_class_accuracy"] == 60


CONFIG = run_config(rounds=3, clients=4, cohort="2")


def test_methods_are_means_over_seeds_with_the_sample_standard_deviation() -> None:
    runs = [
        result(replace(CONFIG, seed=0), [10.0, 30.0, 50.0]),
        result(replace(CONFIG, seed=1), [20.0, 40.0, 60.0]),
        result(replace(CONFIG, selector="kl", seed=0), [9.0, 9.0, 9.0]),
    ]
    average, kl = by_method(runs)
    assert (average.label, kl.label) == ("fedavg", "kl")
    figures = average.to_dict([40, 55, 70])
    assert figures["seeds"] == [0, 1]
    assert figures["accuracy"] == {"mean": 35, "std": pytest.approx(math.sqrt(50))}
    assert figures["worst_class_accuracy"]["mean"] == 31
    assert figures["rounds_to"] == {
        "40": {"mean": 2.5, "reached": 2, "runs": [3, 2]},
        "55": {"mean": None, "reached": 1, "runs": [None, 3]},
        "70": {"mean": None, "reached": 0, "runs": [None, None]},
    }
    assert kl.to_dict()["accuracy"] == {"mean": 9, "std": None}
    assert [spread.mean for spread in average.curve.values()] == [15, 35, 55]


def test_the_target_that_is_offered_is_above_chance() -> None:
    [high, low] = by_method([result(CONFIG, [10.0, 62.0]), result(replace(CONFIG, selector="kl"), [50.0, 54.9])])
    assert [run.summary["chance"] for run in (*high.runs, *low.runs)] == [50, 50]
    assert reached_by_all([high]) == 60
    assert reached_by_all([high, low]) is None, "50 % is what guessing reaches"


def test_the_number_of_rounds_behind_an_accuracy_is_the_true_one() -> None:
    def said(rounds: int) -> str:
        return averaged_rounds([result(replace(CONFIG, rounds=rounds), [50.0] * rounds).summary])

    assert [said(n) for n in (1, 2, 3)] == [
        "of the last round", "mean of the last two rounds", "mean of the last three rounds"
    ]  # fmt: skip
    assert said(10) == said(11) == "mean of the last ten rounds"


def test_differences_are_taken_seed_by_seed() -> None:
    first = [result(replace(CONFIG, seed=seed), [value]) for seed, value in ((0, 50.0), (1, 60.0), (7, 1.0))]
    other = [result(replace(CONFIG, selector="kl", seed=seed), [value]) for seed, value in ((0, 52.0), (1, 66.0))]
    average, kl = by_method([*first, *other])
    found = difference(kl, average)  # differences 2 and 6: deviation 2√2, t(0.975, 1) = 12.706
    assert (found.mean, found.seeds) == (4, 2)
    assert found.low == pytest.approx(4 - 12.7062 * 2, abs=1e-3)
    assert found.high == pytest.approx(4 + 12.7062 * 2, abs=1e-3)
    [alone] = by_method(other[:1])
    assert difference(alone, average).to_dict() == {"mean": 2, "low": None, "high": None, "seeds": 1}
    [stranger] = by_method([result(replace(CONFIG, selector="kl", seed=9), [52.0])])
    assert difference(stranger, average).to_dict() == {"mean": None, "low": None, "high": None, "seeds": 0}


def test_methods_of_one_name_are_told_apart_by_what_differs() -> None:
    settings = {"selector": "fedentopt", "rounds": 3, "clients": 10}
    configs = [run_config(buffer=b, lr=0.1, seed=s, **settings) for b in ("0", "2") for s in (0, 1)]
    configs.append(replace(CONFIG, lr=0.3))
    labels = [method.label for method in by_method([result(config, [1.0, 2.0, 3.0]) for config in configs])]
    assert labels == ["fedentopt (buffer=0)", "fedentopt (buffer=2)", "fedavg"]


def test_a_diverged_seed_is_told_by_its_round() -> None:
    runs = [result(replace(CONFIG, seed=s), [60.0, 70.0, 80.0], d) for s, d in ((4, None), (5, 2))]
    (method,) = by_method(runs)
    assert method.diverged == {5: 2}
    assert [spread.mean for spread in method.curve.values()] == [60, 60, 65]


def test_the_plot_is_the_same_bytes_for_the_same_runs(tmp_path: Path) -> None:
    methods = by_method([result(replace(CONFIG, seed=s), [10.0 + s, 30.0, 50.0]) for s in (0, 1)])
    texts = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        paths = plot_accuracy(methods, tmp_path / name, "digits")
        assert [path.name for path in paths] == ["accuracy.png", "accuracy.svg"]
        texts.append([path.read_bytes() for path in paths])
    assert texts[0] == texts[1]
    assert texts[0][0].startswith(b"\x89PNG")
    svg = texts[0][1].decode()
    assert "fedavg" in svg
    assert "test accuracy" in svg
