"""The page as a file: what is read, what is refused, what the numbers are, how large it gets."""

from __future__ import annotations

import base64
import csv
import dataclasses
import gzip
import json
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import run_config
from fedentopt.errors import InputError
from fedentopt.report import write_report
from fedentopt.report.figures import best_of, costs, curve, figures, thin
from fedentopt.report.findings import findings
from fedentopt.report.grouping import Group, Method, group_runs
from fedentopt.report.page import LARGEST_PAGE
from fedentopt.report.paper import PaperFigures
from fedentopt.report.payload import LEVELS, group_payload
from fedentopt.report.styles import style
from fedentopt.report.tables import summary_table
from fedentopt.results.reading import read_folder
from fedentopt.results.statistics import Spread
from result_folders import write_comparison, write_run

EVIL = "<script>alert(1)</script>"
CLASSES = tuple("abcdefghij")


def payloads(page: Path) -> list[dict[str, Any]]:
    """The data a page carries, one object a setting."""
    coded = re.findall(r'class="data" data-group="\d+">([^<]*)</script>', page.read_text())
    return [json.loads(gzip.decompress(base64.b64decode(text))) for text in coded]


def table_rows(page: Path, number: int = 0) -> dict[str, list[str]]:
    """Cells of a summary table as shown, by method."""
    text = page.read_text()
    body = re.search(rf'<table id="summary-{number}">.*?<tbody>(.*?)</tbody>', text, re.S)
    assert body is not None
    rows = {}
    for row in re.findall(r"<tr.*?</tr>", body[1], re.S):
        cells = [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<t[hd].*?</t[hd]>", row, re.S)]
        rows[cells[0]] = cells[1:]
    return rows


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_comparison(tmp_path_factory.mktemp("results") / "demo")


def test_summary_is_mean_and_sample_deviation_over_seeds(comparison: Path) -> None:
    page = write_report(comparison)
    assert page == comparison / "report.html"
    rows = table_rows(page)
    assert set(rows) == {"fedavg", "fedentopt", "fedentopt-dp"}
    for method, cells in rows.items():
        files = sorted(comparison.glob(f"{method}_*/summary.json"))
        accuracies = [json.loads(file.read_text())["accuracy"] for file in files]
        expected = f"{statistics.mean(accuracies):.2f} ± {statistics.stdev(accuracies):.2f}"
        assert cells[0].removesuffix(" ★ best") == expected
        assert cells[-1] == "3"
    marked = [method for method, cells in rows.items() if "best" in cells[0]]
    # The made-up accuracies of the two entropy methods tie: both are best, the other is not.
    assert marked == ["fedentopt", "fedentopt-dp"]


def test_page_needs_nothing_but_itself(comparison: Path) -> None:
    text = write_report(comparison).read_text()
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=\"(?!data:)", text)
    assert "@import" not in text
    assert not re.search(r"url\(", text)


def test_what_is_no_page_is_left_alone_and_a_link_stays_one(comparison: Path, tmp_path: Path) -> None:
    notes, link = tmp_path / "notes.md", tmp_path / "latest.html"
    notes.write_text("my own notes")
    with pytest.raises(InputError, match=r"notes\.md: is there and no page of fedentopt"):
        write_report(comparison, out=notes)
    assert notes.read_text() == "my own notes"
    link.symlink_to(write_report(comparison, out=tmp_path / "page.html"))
    (tmp_path / "page.html").write_bytes(b"")
    assert write_report(comparison, out=link) == link
    assert link.is_symlink()
    assert (tmp_path / "page.html").stat().st_size > 1000


def test_a_page_may_go_home(comparison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert write_report(comparison, out=Path("~/mine/page.html")) == tmp_path / "mine" / "page.html"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_same_results_give_the_same_bytes(comparison: Path, tmp_path: Path) -> None:
    first = write_report(comparison, out=tmp_path / "a" / "one.html").read_bytes()
    second = write_report(comparison, out=tmp_path / "b.html").read_bytes()
    assert first == second
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["b.html", "one.html"]


def test_picks_entropies_and_labels_are_those_on_disk(comparison: Path) -> None:
    (data,) = payloads(write_report(comparison))
    for method in data["methods"]:
        for run in method["runs"]:
            (folder,) = comparison.glob(f"{method['label']}_*_s{run['seed']}_*")
            with (folder / "rounds.csv").open(newline="") as stream:
                rows = list(csv.DictReader(stream))
            assert [json.loads(row["clients"]) for row in rows] == run["picks"]
            assert run["entropy"] == pytest.approx([float(row["entropy"]) for row in rows], abs=5e-5)
            assert run["covered"] == [int(row["classes_covered"]) for row in rows]
            times = np.bincount([k for row in rows for k in json.loads(row["clients"])], minlength=40)
            assert run["times"] == times.tolist()
            with (folder / "label_counts.csv").open(newline="") as stream:
                counts = [[int(value) for value in row[1:]] for row in list(csv.reader(stream))[1:]]
            assert data["labelTables"][run["table"]] == counts


@pytest.mark.parametrize("exact", [0.82949, 0.8295, 0.82951, 0.0, 1.0])
def test_h_norm_has_the_same_digits_in_the_table_and_in_the_charts_legend(tmp_path: Path, exact: float) -> None:
    folder = write_run(tmp_path, run_config(), classes=CLASSES)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"h_norm": exact}))
    page = write_report(tmp_path)
    (cells,) = table_rows(page).values()
    (method,) = payloads(page)[0]["methods"]
    assert cells[4] == f"{exact:.3f}"
    assert f"{method['hNorm']:.3f}" == cells[4], "toFixed(3) in the legend"


def test_findings_compare_seed_by_seed(comparison: Path) -> None:
    def accuracies(method: str) -> list[float]:
        files = sorted(comparison.glob(f"{method}_*/summary.json"))
        return [json.loads(file.read_text())["accuracy"] for file in files]

    gains = [after - before for before, after in zip(accuracies("fedavg"), accuracies("fedentopt"), strict=True)]
    text = write_report(comparison).read_text()
    half = 4.302652729749462 * statistics.stdev(gains) / 3**0.5  # Student's t for two degrees of freedom
    mean = statistics.mean(gains)
    assert (
        f"Against fedavg fedentopt gains {mean:.2f} points, mean of the differences seed by seed over 3 seeds" in text
    )
    assert f"its 95 % interval (Student) is {mean - half:+.2f} to {mean + half:+.2f}" in text


@pytest.mark.parametrize(("methods", "said"), [
    (1, "a: "), (2, "a and b: "), (3, "a, b and c: "), (5, "a, b, c, d and e: "), (7, "a, b, c, d and 3 more: "),
])  # fmt: skip
def test_findings_name_those_that_are_level(tmp_path: Path, methods: int, said: str) -> None:
    write_run(tmp_path, run_config(rounds=12), classes=CLASSES)
    (run,) = read_folder(tmp_path).runs
    level = tuple(Method(name, name, run.config, (run,)) for name in "abcdefg"[:methods])
    assert findings(Group("", level), [(method, figures(method)) for method in level])[0].startswith(said)


def test_findings_say_who_diverged(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path, run_config(rounds=12, seed=seed), classes=CLASSES, diverged_round=3 if seed else None)
    selected = run_config(rounds=12, selector="fedentopt")
    write_run(tmp_path, selected, classes=CLASSES)
    write_run(tmp_path, run_config(rounds=12, selector="kl"), classes=CLASSES, diverged_round=5)
    said = "fedavg diverged in 2 seeds; such a run counts as chance from there on."
    assert said in write_report(tmp_path).read_text()  # KL is in no sentence, and marked in the table
    write_run(tmp_path / "more", selected, classes=CLASSES, diverged_round=4)
    write_run(tmp_path / "more", run_config(rounds=12), classes=CLASSES)
    text = write_report(tmp_path / "more").read_text()
    assert "fedentopt diverged in one seed; such a run counts as chance from there on." in text
    write_run(tmp_path / "none", selected, classes=CLASSES)
    assert "such a run counts" not in write_report(tmp_path / "none").read_text()


def test_settings_form_groups_and_namesakes_get_their_difference(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"clients": 20, "rounds": 3}
    for changes in (
        {"selector": "fedentopt", "buffer": "5"},
        {"selector": "fedentopt", "buffer": "10"},
        {"partition": "classes:2"},
        {"dropout": 0.3},
    ):
        write_run(tmp_path, run_config(**settings, **changes), classes=CLASSES)
    groups = group_runs(read_folder(tmp_path).runs)
    labels = {group.title: [method.label for method in group.methods] for group in groups}
    assert labels == {
        "digits · dir:0.1 · lenet5 · 20 clients, 10% per round · 3 rounds": [
            "fedentopt (buffer=5)",
            "fedentopt (buffer=10)",
        ],
        "digits · dir:0.1 · lenet5 · 20 clients, 10% per round · 30 % dropout · 3 rounds": ["fedavg"],
        "digits · classes:2 · lenet5 · 20 clients, 10% per round · 3 rounds": ["fedavg"],
    }
    page = write_report(tmp_path)
    assert len(payloads(page)) == 3
    assert page.read_text().count("<option value=") == 3 + 2  # settings, and the two orders of participation


@pytest.mark.parametrize(
    ("content", "figures_shown"),
    [
        ({"fedavg": 46.61}, {"fedavg": "46.61", "fedentopt": "–"}),
        ([{"method": "fedentopt", "partition": "dir:0.1", "figure": 52.8}], {"fedavg": "–", "fedentopt": "52.80"}),
        ([{"method": "fedentopt", "partition": "classes:2", "figure": 52.8}], None),
    ],
)
def test_paper_figures_stand_beside_ours(tmp_path: Path, content: Any, figures_shown: dict[str, str] | None) -> None:
    write_comparison(tmp_path, seeds=1, rounds=4, clients=20)
    (tmp_path / "paper_figures.json").write_text(json.dumps(content))
    rows = table_rows(write_report(tmp_path))
    if figures_shown is None:
        assert len(rows["fedavg"]) == 8
        return
    for method, shown in figures_shown.items():
        assert rows[method][1] == shown
        if shown != "–":
            gap = float(rows[method][0].split()[0]) - float(shown)
            assert float(rows[method][2]) == pytest.approx(gap, abs=0.011)


def test_unfinished_and_diverged_runs_say_so(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"clients": 20, "rounds": 12, "cohort": "4"}
    write_run(tmp_path, run_config(**settings, seed=0), classes=CLASSES)
    write_run(tmp_path, run_config(**settings, seed=1), classes=CLASSES, stop_after=5)
    write_run(tmp_path, run_config(**settings, algorithm="fednova"), classes=CLASSES, diverged_round=3)
    write_run(tmp_path, run_config(**settings, selector="fedentopt", buffer="5"), classes=CLASSES, stop_after=7)
    write_run(tmp_path, run_config(**settings, algorithm="fedconcat"), classes=CLASSES, stop_after=14)
    write_run(tmp_path, run_config(**settings, algorithm="mine:concat"), classes=CLASSES, stop_after=6)
    started = tmp_path / "just_started"
    started.mkdir()
    (started / "run.json").write_text(json.dumps({"config": {}}))
    page = write_report(tmp_path)
    rows = table_rows(page)
    assert "fedavg1 unfinished, round 5 of 12" in rows
    assert "fedconcat1 unfinished, round 14" in rows  # of how many is known at the end only
    assert "mine-concat1 unfinished, round 6" in rows
    assert "fednovadiverged: seed 0, round 3" in rows
    assert "just_started" in page.read_text()
    # The mean counts the finished run alone; without one, what there is so far.
    (group,) = group_runs(read_folder(tmp_path).runs)
    by_name = {method.name: method for method in group.methods}
    finished = json.loads(next(tmp_path.glob("fedavg_*_s0_*/summary.json")).read_text())
    assert figures(by_name["fedavg"]).accuracy == Spread(
        pytest.approx(finished["accuracy"]), pytest.approx(math.nan, nan_ok=True), 1
    )
    half = by_name["fedentopt"].runs[0]
    assert figures(by_name["fedentopt"]).accuracy.mean == pytest.approx(float(np.mean(half.rounds.accuracy)))


def test_finished_runs_are_not_compared_with_unfinished_ones(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"clients": 20, "rounds": 12, "cohort": "4"}
    for seed in range(3):
        write_run(tmp_path, run_config(**settings, seed=seed), classes=CLASSES, stop_after=5 if seed else None)
    ahead = run_config(**settings, selector="fedentopt", buffer="5")
    write_run(tmp_path, ahead, classes=CLASSES, stop_after=11)
    page = write_report(tmp_path)
    text, rows = page.read_text(), table_rows(page)
    accuracy = {name.partition("1 unf")[0].partition("2 unf")[0]: cells for name, cells in rows.items()}
    assert float(accuracy["fedentopt"][0]) > float(accuracy["fedavg"][0])
    assert accuracy["fedavg"][-1] == "1"  # the seeds behind the figures, not those that are on their way
    assert "is-best" not in text.partition("<tbody>")[2].partition("</tbody>")[0]
    (said,) = re.findall(r"fedavg: [^<]* % test accuracy[^<]*", text)
    assert said.endswith("mean of the last ten rounds; another method has no finished run yet.")
    write_run(tmp_path / "more", ahead, classes=CLASSES, stop_after=11)
    write_run(tmp_path / "more", run_config(**settings), classes=CLASSES, stop_after=5)
    text = write_report(tmp_path / "more").read_text()
    assert "The best of 2 methods is fedentopt: " in text
    assert " % test accuracy so far; no run is finished." in text


def test_one_run_is_a_page_too(tmp_path: Path) -> None:
    folder = write_run(tmp_path, run_config(clients=20, rounds=3), classes=CLASSES)
    page = write_report(folder)
    assert page == folder / "report.html"
    assert list(table_rows(page)) == ["fedavg"]


def test_only_noisy_counts_known(tmp_path: Path) -> None:
    folder = write_run(tmp_path, run_config(clients=20, rounds=3), classes=CLASSES)
    lines = (folder / "label_counts.csv").read_text().splitlines()
    lines[1] = "0,-3.25" + ",1.5" * 9
    (folder / "reported_counts.csv").write_text("\n".join(lines))
    (folder / "label_counts.csv").unlink()
    (data,) = payloads(write_report(tmp_path))
    assert data["methods"][0]["runs"][0]["noisy"] is True
    assert data["labelTables"][0][0] == [0] + [1.5] * 9


def test_a_run_without_label_counts_is_shown_without_them(tmp_path: Path) -> None:
    write_comparison(tmp_path, seeds=1, rounds=4, clients=20)
    (folder,) = tmp_path.glob("fedavg_*")
    (folder / "label_counts.csv").unlink()
    page = write_report(tmp_path)
    (data,) = payloads(page)
    assert len(data["clients"]) == 20
    (lost,) = data["methods"][0]["runs"]
    (known,) = data["methods"][1]["runs"]
    assert lost["table"] is None
    assert len(data["labelTables"][known["table"]]) == 20
    with (folder / "rounds.csv").open(newline="") as stream:
        assert lost["picks"] == [json.loads(row["clients"]) for row in csv.DictReader(stream)]
    assert set(table_rows(page)) == {"fedavg", "fedentopt", "fedentopt-dp"}


def test_a_setting_left_out_at_its_default_is_not_named(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"clients": 20, "rounds": 3, "selector": "fedentopt"}
    for audit in ("off", "replace"):
        write_run(tmp_path, run_config(**settings, audit=audit), classes=CLASSES)
    (group,) = group_runs(read_folder(tmp_path).runs)
    assert [method.label for method in group.methods] == ["fedentopt", "fedentopt (audit=replace)"]


def test_a_sweep_is_judged_by_what_its_methods_share(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"clients": 20, "rounds": 3, "selector": "fedentopt"}
    write_run(tmp_path, run_config(clients=20, rounds=3), classes=CLASSES)
    for buffer in ("0%", "50%", "70%", "75%"):
        write_run(tmp_path, run_config(**settings, buffer=buffer), classes=CLASSES)
    for changes in ({"algorithm": "fedprox"}, {"epsilon": 0.5}):
        write_run(tmp_path, run_config(**settings, buffer="70%", **changes), classes=CLASSES)
    (group,) = group_runs(read_folder(tmp_path).runs)
    plain, balanced = group.plain(), group.balanced()
    assert plain is not None
    assert balanced is not None
    assert (plain.label, balanced.label) == ("fedavg", "fedentopt (buffer=70%)")


def test_seeds_of_two_states_of_own_code_are_not_averaged(tmp_path: Path) -> None:
    for seed, code in enumerate(("a" * 64, "b" * 64, "b" * 64)):
        for settings in ({}, {"selector": "kl"}):
            folder = write_run(tmp_path, run_config(clients=20, rounds=3, seed=seed, **settings), classes=CLASSES)
            about = json.loads((folder / "run.json").read_text())
            if settings or seed:  # of fedavg's first run nothing is known
                about["code"] = {"digest": code}
            (folder / "run.json").write_text(json.dumps(about))
    (group,) = group_runs(read_folder(tmp_path).runs)
    assert {method.label: [run.seed for run in method.runs] for method in group.methods} == {
        "fedavg": [0, 1, 2],
        "kl (code aaaaaaaa)": [0],
        "kl (code bbbbbbbb)": [1, 2],
    }


def test_data_that_changed_under_one_name_is_another_setting(tmp_path: Path) -> None:
    for seed, classes in enumerate((CLASSES, CLASSES[:7])):
        write_run(tmp_path, run_config(clients=20, rounds=2, seed=seed), classes=classes)
    assert [len(data["classes"]) for data in payloads(write_report(tmp_path))] == [10, 7]


def test_seeds_of_two_states_of_a_data_file_are_not_averaged(tmp_path: Path) -> None:
    """Labels and clients may be the same, the images not. A digest of 32 has its first half from rounded numbers."""
    first, other = "a" * 16 + "1" * 16, "b" * 16 + "2" * 16
    for seed, digest in enumerate((None, first, "a" * 16 + "3" * 16, "1" * 16, other)):
        for dataset in ("mine.npz", "else.npz"):
            folder = write_run(tmp_path, run_config(dataset=dataset, clients=20, rounds=3, seed=seed), classes=CLASSES)
            about = json.loads((folder / "run.json").read_text())
            if digest is not None and (dataset == "mine.npz" or digest != other):
                about["dataset"]["digest"] = digest
            (folder / "run.json").write_text(json.dumps(about))
    groups = group_runs(read_folder(tmp_path).runs)
    setting = "dir:0.1 · lenet5 · 20 clients, 10% per round · 3 rounds"
    assert [(group.title, [run.seed for run in group.methods[0].runs]) for group in groups] == [
        (f"else.npz · {setting}", [0, 1, 2, 3, 4]),
        (f"mine.npz · {setting}", [0]),
        (f"mine.npz · {setting} · data aaaaaaaa", [1, 2, 3]),
        (f"mine.npz · {setting} · data bbbbbbbb", [4]),
    ]


def test_overview_has_long_runs_first_and_the_gain_of_each_setting(tmp_path: Path) -> None:
    for rounds in (3, 12):
        write_comparison(tmp_path, seeds=2, rounds=rounds, clients=20)
    text = write_report(tmp_path).read_text()
    body = re.search(r'<table id="overview">.*?<tbody>(.*?)</tbody>', text, re.S)
    assert body is not None
    rows = [
        [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row, re.S)]
        for row in re.findall(r"<tr.*?</tr>", body[1], re.S)
    ]
    assert [row[0].split(" · ")[-1] for row in rows] == ["12 rounds", "3 rounds"]

    def accuracies(method: str, rounds: int) -> list[float]:
        summaries = [json.loads(file.read_text()) for file in sorted(tmp_path.glob(f"{method}_*/summary.json"))]
        return [summary["accuracy"] for summary in summaries if summary["rounds"] == rounds]

    for row, rounds in zip(rows, (12, 3), strict=True):
        pairs = zip(accuracies("fedavg", rounds), accuracies("fedentopt", rounds), strict=True)
        gains = [after - before for before, after in pairs]
        assert row[-1] == f"{statistics.mean(gains):.2f} ± {statistics.stdev(gains):.2f}"


def test_overview_names_only_methods_that_have_an_accuracy(tmp_path: Path) -> None:
    settings = {"clients": 20, "cohort": "4", "rounds": 60}
    write_run(tmp_path, run_config(**settings), classes=CLASSES)
    unseen = run_config(**settings, selector="fedentopt", evaluate_every=50)
    write_run(tmp_path, unseen, classes=CLASSES, stop_after=5)
    alone = run_config(**settings | {"partition": "classes:2"}, evaluate_every=50)
    write_run(tmp_path, alone, classes=CLASSES, stop_after=5)
    body = re.search(r'<table id="overview">.*?<tbody>(.*?)</tbody>', write_report(tmp_path).read_text(), re.S)
    assert body is not None
    assert re.findall(r'<td class="text"[^>]*>(.*?)</td>', body[1]) == ["–", "fedavg"]


def test_names_with_numbers_are_ordered_by_them(tmp_path: Path) -> None:
    sizes = (0.1, 0.0005, 0.01, 1e-05, 0.001)
    for size in sizes:
        write_run(tmp_path, run_config(clients=20, rounds=2, algorithm="fedprox", mu=size), classes=CLASSES)
    for partition in ("dir:0.5", "dir:0.05", "dir:10"):
        write_run(tmp_path, run_config(clients=20, rounds=2, partition=partition), classes=CLASSES)
    groups = group_runs(read_folder(tmp_path).runs)
    assert [group.title.split(" · ")[1] for group in groups] == ["dir:0.05", "dir:0.1", "dir:0.5", "dir:10"]
    assert [method.config["mu"] for method in groups[1].methods] == sorted(sizes)


def test_picks_kept_for_one_seed_are_of_the_seed_that_most_methods_have(tmp_path: Path) -> None:
    for algorithm, seeds in (("fedavg", (0, 1)), ("fedprox", (1, 2)), ("fednova", (1,)), ("fedrs", (3,))):
        for seed in seeds:
            config = run_config(clients=20, rounds=2, algorithm=algorithm, seed=seed)
            write_run(tmp_path, config, classes=CLASSES)
    (group,) = group_runs(read_folder(tmp_path).runs)
    kept = {
        method["label"]: [run["seed"] for run in method["runs"]]
        for method in group_payload(group, LEVELS[1])["methods"]
    }
    assert kept == {"fedavg": [1], "fednova": [1], "fedprox": [1], "fedrs": [3]}


def test_names_from_users_cannot_become_markup(tmp_path: Path) -> None:
    directory = tmp_path / f"res {EVIL.replace('/', '')}"
    names = [EVIL, '"><img src=x onerror=alert(2)>', "</script>", *(f"c{i}" for i in range(9))]
    config = run_config(clients=12, cohort="3", rounds=3, dataset=f"/data/{EVIL}", model=f"own.{EVIL}:factory")
    folder = write_run(
        directory,
        config,
        classes=(EVIL, "</title>", "\u2028"),
        clients=names,
        command=f"fedentopt run --dataset '{EVIL}'",
    )
    info = json.loads((folder / "run.json").read_text())
    info["method"] = EVIL
    info["device"] = EVIL
    (folder / "run.json").write_text(json.dumps(info))
    text = write_report(directory).read_text()
    assert "alert(1)" in text
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert text.count("</title>") == 1
    assert "\u2028" not in text
    (data,) = payloads(directory / "report.html")
    assert data["clients"][0] == EVIL
    assert data["classes"][0] == EVIL


def test_many_long_runs_stay_under_six_megabytes(tmp_path: Path) -> None:
    # 50 runs of 500 rounds and 100 of 1000 clients per round. Copies of one run under other settings, each with fresh
    # random picks: copies of the same picks would compress away.
    settings = run_config(clients=1000, rounds=500, cohort="100", partition="iid")
    folder = write_run(tmp_path / "first", settings, classes=CLASSES, samples=20_000)
    info = json.loads((folder / "run.json").read_text())
    with (folder / "rounds.csv").open(newline="") as stream:
        header, *rows = list(csv.reader(stream))
    rng = np.random.default_rng(0)
    directory = tmp_path / "all"
    for method in range(10):
        for row, picks in zip(rows, rng.permuted(np.tile(np.arange(1000), (500, 1)), axis=1)[:, :100], strict=True):
            row[7] = row[8] = json.dumps(picks.tolist())
        for dataset in range(5):
            copy = directory / f"run_{dataset}_{method}"
            copy.mkdir(parents=True)
            info["config"] |= {"dataset": f"data{dataset}", "algorithm": f"method{method}"}
            (copy / "run.json").write_text(json.dumps(info | {"method": f"method{method}"}))
            with (copy / "rounds.csv").open("w", newline="") as stream:
                csv.writer(stream).writerows([header, *rows])
            for name in ("label_counts.csv", "summary.json"):
                (copy / name).write_bytes((folder / name).read_bytes())
    page = write_report(directory)
    assert page.stat().st_size < LARGEST_PAGE
    data = payloads(page)
    assert len(data) == 5
    kept = data[0]["methods"][0]["runs"][0]
    assert 10 <= len(kept["picks"]) < 500
    assert (kept["rounds"][0], kept["rounds"][-1]) == (1, 500)
    assert sum(kept["times"]) == 50_000  # totals use every round
    assert any("of 500 rounds" in note for note in data[0]["thinned"])


def test_costs_are_the_first_time_a_target_is_reached(tmp_path: Path) -> None:
    write_comparison(tmp_path, seeds=2, rounds=8, clients=20)
    (group,) = group_runs(read_folder(tmp_path).runs)
    method = group.methods[0]
    low, never = costs(method, [12.0, 99.9])
    assert never is None
    assert low is not None
    rounds, sent = [], []
    for run in method.runs:
        first = next(i for i, value in enumerate(run.rounds.accuracy) if value >= 12.0)
        rounds.append(first + 1)
        sent.append(int(run.rounds.bytes_up[: first + 1].sum() + run.rounds.bytes_down[: first + 1].sum()))
    assert (low.rounds, low.bytes_sent, low.reached) == (statistics.mean(rounds), statistics.mean(sent), 2)


def test_curves_average_seeds_and_keep_their_ends(comparison: Path) -> None:
    (group,) = group_runs(read_folder(comparison).runs)
    runs = group.methods[0].runs
    line = curve(runs, lambda run: run.rounds.accuracy, 7)
    assert len(line.rounds) == 7
    assert (line.rounds[0], line.rounds[-1]) == (1, 20)
    values = [run.rounds.accuracy[-1] for run in runs]
    assert line.mean[-1] == pytest.approx(statistics.mean(values))
    assert line.std[-1] == pytest.approx(statistics.stdev(values))


def test_every_column_with_a_better_direction_has_its_star(tmp_path: Path) -> None:
    rows = []
    for selector, value in (("random", 1.0), ("fedentopt", 2.0)):
        folder = tmp_path / selector
        write_run(folder, run_config(clients=8, cohort="2", rounds=3, selector=selector), classes=CLASSES)
        [group] = group_runs(read_folder(folder).runs)
        [method] = group.methods
        same = figures(method)
        spread = Spread.of([value])
        both = ("accuracy", "worst_class", "entropy", "full_cover", "h_norm", "never_selected", "bytes_sent")
        rows.append((method, dataclasses.replace(same, **dict.fromkeys(both, spread))))
    table = summary_table(rows, PaperFigures(None), 0)
    stars = [["★" in cell for cell in re.findall(r"<td.*?</td>", row)] for row in table.split("<tr ")[1:]]
    fewer, more = stars  # five columns where more is better, two where less is, and the number of seeds
    assert fewer == [False] * 5 + [True] * 2 + [False]
    assert more == [True] * 5 + [False] * 3


def test_no_two_methods_are_drawn_alike() -> None:
    many = [style(place, marked=True) for place in range(60)]
    assert len(set(many)) == 60
    assert len({one.light for one in many[:10]}) == len({one.mark for one in many[:11]}) - 1 == 10
    assert {one.light for one in many[10:]} == {one.light for one in many[2:10]}, "black and blue do not come again"
    assert {one.mark for one in (style(place, marked=False) for place in range(7))} == {None}


def test_best_is_marked_where_there_is_one() -> None:
    assert best_of([40.0, 52.0, math.nan, 51.0]) == (1,)
    assert best_of([52.0, 40.0, 52.0]) == (0, 2)
    assert best_of([10.0, 10.0]) == ()
    assert best_of([52.0]) == ()
    assert best_of([math.nan, 52.0]) == ()


def test_thin_keeps_first_and_last() -> None:
    assert thin(range(5), 9) == [0, 1, 2, 3, 4]
    assert thin(range(101), 5) == [0, 25, 50, 75, 100]
    assert thin(range(10), 0) == []


def test_command_line(comparison: Path, tmp_path: Path) -> None:
    # The entry point, and proof that the page needs no torch: a broken one would end the process.
    blocker = tmp_path / "torch.py"
    blocker.write_text("raise SystemExit('torch was imported')")
    program = "import sys; from fedentopt.cli import main; sys.argv[0] = 'fedentopt'; main()"

    def fedentopt(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {program}", *words],
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    done = fedentopt("report", str(comparison), "--out", str(tmp_path / "x.html"), "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer == {"report": str(tmp_path / "x.html"), "bytes": (tmp_path / "x.html").stat().st_size}
    refused = fedentopt("report", str(tmp_path))
    assert refused.returncode == 2
    assert "no results in it" in refused.stderr
    assert "Traceback" not in refused.stderr
