"""What a comparison comes to: paired differences by hand, tables, the plot, the page, the models."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from matplotlib import pyplot
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from fedentopt.errors import InputError
from fedentopt.report import write_report
from fedentopt.report.styles import COLOURS
from fedentopt.results.folder import RunFolder
from fedentopt.results.memory import MemoryRecorder
from fedentopt.results.reading import RunResult, read_run
from fedentopt.results.records import Outcome, RoundRecord, RunStart
from fedentopt.results.rounds import COLUMNS
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.result import Result
from toy_run import CONFIG as TOY
from toy_run import drive, label_counts

CONFIG = RunConfig(rounds=2, clients=4, cohort="2")
T2, T1 = 4.302652729749462, 12.706204736174694  # Student's 97.5 % quantiles for two and one degrees of freedom


def run(
    accuracy: float, seed: int, *, diverged: int | None = None, seconds: float = 0.0, **settings: object
) -> RunResult:
    """Two rounds, the first without evaluation, and then this accuracy."""
    config = replace(CONFIG, seed=seed, **settings)
    recorder = MemoryRecorder(config)
    recorder.start(RunStart(label_counts(config)[:, :2], None, ("a", "b"), 60, 30, "toy", "cpu"))
    shared = {"entropy": 0.5, "classes_covered": 2, "bytes_up": 10, "bytes_down": 20, "seconds": 0.5}
    records = (
        RoundRecord(round=1, clients=(0, 1), trained=(1,), simulated_seconds=seconds, **shared),
        RoundRecord(
            round=2, clients=(2, 3), trained=(2, 3), accuracy=accuracy, loss=1.0,
            class_accuracy=(accuracy + 4, accuracy - 4), simulated_seconds=2 * seconds, **shared,
        ),
    )  # fmt: skip
    model = {"w": torch.tensor([accuracy])}
    recorder.finish(Outcome(records, model, diverged, num_classes=2, clients=4, rounds=2))
    return recorder.result()


@pytest.fixture
def result() -> Result:
    runs = [run(value, seed) for seed, value in enumerate((10.0, 20.0, 30.0))]
    runs += [run(value, seed, selector="kl") for seed, value in enumerate((11.0, 22.0, 33.0))]
    runs += [run(25.0, 1, algorithm="fedprox"), run(90.0, 7, algorithm="fedprox")]
    runs += [run(9.0, 0, algorithm="fednova"), run(80.0, 1, algorithm="fednova", diverged=1)]
    return Result(runs, ["random"] * 3 + ["KL"] * 3 + ["prox"] * 2 + ["nova"] * 2)


def test_differences_are_paired_with_the_first_method_seed_by_seed(result: Result) -> None:
    rows = result.summary.set_index("method")
    assert list(rows.index) == ["random", "KL", "prox", "nova"]
    assert rows.seeds.to_dict() == {"random": 3, "KL": 3, "prox": 2, "nova": 2}
    assert rows.accuracy.to_dict() == pytest.approx({"random": 20, "KL": 22, "prox": 57.5, "nova": 29.5})
    assert rows.loc["random", "std"] == pytest.approx(10)
    # Nobody is compared with itself.
    assert rows.loc["random", ["difference", "low", "high"]].isna().all()
    # Differences 1, 2, 3: mean 2, deviation 1.
    assert rows.loc["KL", "difference"] == pytest.approx(2)
    assert rows.loc["KL", "low"] == pytest.approx(2 - T2 / math.sqrt(3))
    assert rows.loc["KL", "high"] == pytest.approx(2 + T2 / math.sqrt(3))
    # One seed is shared: a difference, and nothing to say about its spread.
    assert rows.loc["prox", "difference"] == pytest.approx(5)
    assert rows.loc["prox", ["low", "high"]].isna().all()
    # A diverged seed counts as chance, 50 %: differences -1 and 30, deviation 31/√2.
    assert rows.diverged.to_dict() == {"random": 0, "KL": 0, "prox": 0, "nova": 1}
    assert rows.loc["nova", "difference"] == pytest.approx(14.5)
    assert rows.loc["nova", "low"] == pytest.approx(14.5 - T1 * 31 / math.sqrt(2) / math.sqrt(2))


def test_no_shared_seed_is_no_difference() -> None:
    rows = Result([run(10.0, 0), run(20.0, 1, selector="kl")], ["a", "b"]).summary
    assert rows[["std", "difference", "low", "high"]].isna().all(axis=None)


def test_the_summary_has_one_row_per_method_and_the_promised_columns(result: Result) -> None:
    assert list(result.summary.columns) == [
        "method", "seeds", "accuracy", "std", "difference", "low", "high", "worst_class_accuracy", "final_accuracy",
        "best_accuracy", "mean_entropy", "min_entropy", "h_norm", "never_selected", "rounds", "bytes_up", "bytes_down",
        "diverged",
    ]  # fmt: skip
    first = result.summary.iloc[0]
    assert (first.worst_class_accuracy, first.final_accuracy, first.best_accuracy) == (16, 20, 20)
    assert (first.mean_entropy, first.min_entropy, first.h_norm, first.never_selected) == (0.5, 0.5, 1, 0)
    assert (first.rounds, first.bytes_up, first.bytes_down) == (2, 20, 40)


def test_rounds_are_the_rows_of_rounds_csv_with_lists_as_lists(result: Result) -> None:
    rounds = result.rounds
    assert list(rounds.columns) == ["method", "seed", *COLUMNS]
    assert len(rounds) == 2 * len(result) == 20
    assert rounds.method.drop_duplicates().tolist() == ["random", "KL", "prox", "nova"]
    blank, scored = rounds[(rounds.method == "prox") & (rounds.seed == 7)].to_dict("records")
    assert (blank["round"], blank["clients"], blank["trained"], blank["class_accuracy"]) == (1, [0, 1], [1], None)
    assert pd.isna([blank["accuracy"], blank["loss"], blank["worst_class_accuracy"]]).all()
    assert (scored["accuracy"], scored["worst_class_accuracy"], scored["class_accuracy"]) == (90, 86, [94, 86])
    assert rounds.accuracy.dtype == float
    assert rounds.groupby("method").accuracy.max().to_dict() == {"KL": 33, "nova": 80, "prox": 90, "random": 30}


def test_the_plot_is_a_figure_of_its_own_with_a_line_per_method(result: Result) -> None:
    figure = result.plot()
    assert isinstance(figure, Figure)
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == ["random", "KL", "prox", "nova"]
    assert [to_hex(line.get_color()).upper() for line in axes.lines] == [
        COLOURS[i][0] for i in (0, 4, 3, 2)
    ]  # as on the page
    assert axes.lines[1].get_xydata().tolist() == [[2, 22]]
    assert axes.get_title() == "digits · dir:0.1 · lenet5 · 4 clients, 2 per round · 2 rounds"
    assert result.plot("mine, for $5 and $6").axes[0].get_title() == r"mine, for \$5 and \$6"
    assert pyplot.get_fignums() == []


def test_the_page_shows_all_runs(result: Result, tmp_path: Path) -> None:
    page = result.report(str(tmp_path / "page.html"), title="four methods")
    assert page == tmp_path / "page.html"
    text = page.read_text()
    assert "four methods" in text
    for method in ("fedavg", "kl", "fedprox", "fednova"):
        assert f'<th scope="row" data-value="{method}">' in text


def test_what_no_page_plot_or_model_can_be_made_of_is_refused(result: Result, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="page: 3 cannot be used; accepted: the name of a file"):
        result.report(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="title: 3 cannot be used; accepted: text"):
        result.report(tmp_path / "page.html", title=3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="title: 3 cannot be used; accepted: text, or none"):
        result.plot(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="report: 3 cannot be used; accepted: a folder of results"):
        write_report(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"method: \['random'\] is not among the results"):
        result.model(["random"], 0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"seed: random has no seed \[0\]; accepted: 0, 1, 2"):
        result.model("random", [0])  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_models_are_at_hand_from_memory_and_from_disk(result: Result, tmp_path: Path) -> None:
    assert result.model("KL", 1)["w"].item() == 22
    assert sorted((label, seed) for label, models in result.models.items() for seed in models) == [
        ("KL", 0), ("KL", 1), ("KL", 2), ("nova", 0), ("nova", 1), ("prox", 1), ("prox", 7),
        ("random", 0), ("random", 1), ("random", 2),
    ]  # fmt: skip
    with pytest.raises(InputError, match="method: 'kl' is not among the results; accepted: random, KL, prox, nova"):
        result.model("kl", 1)
    with pytest.raises(InputError, match="seed: prox has no seed 0; accepted: 1, 7"):
        result.model("prox", 0)
    folder = RunFolder(tmp_path, TOY)
    outcome = drive(folder)
    assert outcome is not None
    read = Result([read_run(folder.path)], ["mine"])
    assert torch.equal(read.model("mine", 0)["layer.weight"], outcome.model["layer.weight"])
    (folder.path / "model.safetensors").unlink()
    assert read.models == {"mine": {}}
    with pytest.raises(InputError, match="model: that of mine, seed 0 was not kept"):
        read.model("mine", 0)


def test_it_shows_itself_as_its_summary(result: Result) -> None:
    lines = repr(result).splitlines()
    assert lines[0].split()[:4] == ["method", "seeds", "accuracy", "std"]
    assert lines[1].split()[:5] == ["random", "3", "20", "10", "–"]
    html = Result([run(10.0, 0)], ["<b>"])._repr_html_()
    assert "&lt;b&gt;" in html
    assert "<th>accuracy</th>" in html
    assert "<th>0</th>" not in html  # rows have no number


def test_what_is_no_comparison_is_refused() -> None:
    one = run(10.0, 0)
    with pytest.raises(InputError, match="0 runs with 0 labels"):
        Result([], [])
    with pytest.raises(InputError, match="1 runs with 2 labels; accepted: one for each run"):
        Result([one], ["a", "b"])
    with pytest.raises(InputError, match="a has seed 0 twice"):
        Result([one, one], ["a", "a"])
    recorder = MemoryRecorder(TOY)
    drive(recorder, stop_after=2)
    with pytest.raises(InputError, match="is unfinished; accepted: finished runs"):
        Result([recorder.result()], ["a"])
