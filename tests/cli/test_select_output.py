"""What `fedentopt select` shows at 80 columns, with clients away, over many calls and in a sweep."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from command_line import Said, commander
from fedentopt import EntropySelector, RandomSelector
from fedentopt.cli.select_show import names_within
from fedentopt.privacy import laplace_noise
from fedentopt.selection.measures import entropy, selection_entropy

Command = Callable[..., Said]


@pytest.fixture
def fedentopt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return commander(monkeypatch, capsys)


def table(clients: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.multinomial(40, rng.dirichlet(np.full(4, 0.3))) + 1 for _ in range(clients)])


def write(path: Path, counts: np.ndarray, names: list[str]) -> Path:
    rows = [f'"{name}",' + ",".join(map(str, row)) for name, row in zip(names, counts.tolist(), strict=True)]
    path.write_text("\n".join(["client,a,b,c,d", *rows]) + "\n", encoding="utf-8")
    return path


LONG = [f"the university hospital of the city of number {k}, department of radiology" for k in range(40)]


@pytest.mark.parametrize("more", [[], ["--epsilon", "0.5"], ["--selector", "random"]])
def test_eighty_columns_and_a_pipe(fedentopt: Command, tmp_path: Path, more: list[str]) -> None:
    path = write(tmp_path / "counts.csv", table(40), LONG)
    words = ["select", str(path), "--cohort", "8", "--rounds", "20", *more]
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    said = subprocess.run(
        [sys.executable, "-c", "from fedentopt.cli import main; main()", *words],
        env=environment | {"PYTHONIOENCODING": "utf-8"}, capture_output=True, text=True, check=True, encoding="utf-8",
    )  # fmt: skip
    lines = said.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    document = json.loads(fedentopt(*words, "--json").out)
    start = next(i for i, line in enumerate(lines) if line.startswith("round  entropy"))
    heads = lines[start].split()
    assert heads[-2:] == ["classes", "clients"]
    for entry in [*document["rounds"][:10], *document["rounds"][-5:]]:
        (line,) = [line for line in lines[start:] if re.match(rf"\s+{entry['round']}\s+\d\.\d\d\d ", line)]
        cells = line.split()
        assert cells[1] == f"{entry['entropy']:.3f}"
        assert cells[len(heads) - 2] == f"{entry['classes_covered']}/4"
        assert "…, +7" in line  # names with a comma are quoted, and cut where there is no room


@pytest.mark.parametrize("more", [[], ["--epsilon", "0.5"], ["--sweep"]])
def test_a_narrow_terminal_loses_no_figure(tmp_path: Path, more: list[str]) -> None:
    path = write(tmp_path / "counts.csv", table(40), LONG)
    words = ["select", str(path), "--cohort", "8", "--rounds", "3", *more]
    found = []
    for width in ("40", "120"):
        said = subprocess.run(
            [sys.executable, "-c", "from fedentopt.cli import main; main()", *words],
            env=os.environ | {"PYTHONIOENCODING": "utf-8", "COLUMNS": width}, capture_output=True, check=True,
        )  # fmt: skip
        rows = [line for line in said.stdout.decode().splitlines() if re.match(r"\s+\d+ .* \d\.\d\d\d ", line)]
        found.append([re.sub(r"  \S*…|  \"the .*", "", row) for row in rows])
    assert len(found[0]) == (5 if "--sweep" in more else 3)
    narrow, wide = ([row.partition(", +")[0] for row in rows] for rows in found)
    assert narrow == wide
    assert "--sweep" in more or all(row.endswith(", +7") for row in found[0]), "how many more there are"


def test_names_are_separated_visibly() -> None:
    names = ["a b", "c", "d, e", "two\nlines"]
    assert names_within(names, 80) == 'a b, c, "d, e", two lines'
    assert names_within(names, 24) == 'a b, c, "d, e", +1'
    assert names_within(names, 7) == "a b, +3"
    assert names_within(["北京大学", "x"], 9) == "北京…, +1"
    assert names_within([], 9) == ""


def test_only_those_available_are_selected(fedentopt: Command, tmp_path: Path) -> None:
    counts, names = table(20), [f"s{k}" for k in range(20)]
    path, here = write(tmp_path / "counts.csv", counts, names), tmp_path / "here.txt"
    here.write_text("client\n" + "\n".join(names[5:14]) + "\n")
    words = ("select", path, "--cohort", 3, "--buffer", 4, "--rounds", 6, "--available", here, "--json")
    document = json.loads(fedentopt(*words).out)
    selector = EntropySelector(3, buffer_size=4)
    selector.register(counts, ids=names)
    expected = [list(selector.select(names[5:14]).clients) for _ in range(6)]
    assert [entry["clients"] for entry in document["rounds"]] == expected
    assert document["settings"]["available"] == 9
    random = RandomSelector(3)
    random.register(counts, ids=names)
    drawn = [entropy(random.select(names[5:14]).label_counts) for _ in range(6)]
    assert document["baseline"]["entropies"] == drawn
    swept = json.loads(fedentopt(*words, "--sweep").out)["sweep"]
    assert swept[0]["never_selected"] >= 11
    assert "--available" not in fedentopt(*words).err
    small = fedentopt("select", path, "--cohort", 3, "--buffer", 7, "--rounds", 2, "--available", here).err
    assert "a buffer of 7 can leave fewer than a cohort of 3 of the 9 clients" in small
    assert "--buffer 6 or less leaves a choice" in small
    for there in (names[5:8], names[5:7]):  # no buffer leaves a choice among them
        here.write_text("\n".join(there))
        few = fedentopt("select", path, "--cohort", 3, "--buffer", 7, "--rounds", 2, "--available", here).err
        assert f"--available: of the {len(there)} there a cohort of 3 takes all, whatever the buffer" in few
    here.write_text("s3\nelsewhere\n")
    said = fedentopt(*words)
    assert said.code == 2
    assert f"{here}, line 2: 'elsewhere' is not in the table of counts" in said.err


def test_a_client_without_samples_is_left_out_and_said(fedentopt: Command, tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("client;a;b\nx;1;2\nempty;0;0\ny;2;1\n")
    said = fedentopt("select", path, "--cohort", 2, "--rounds", 1, "--json")
    assert said.code == 0
    assert f"{path}: read as UTF-8, separated by semicolon" in said.err
    assert f"{path}: left out, no samples: 'empty'" in said.err
    document = json.loads(said.out)
    assert sorted(document["rounds"][0]["clients"]) == ["x", "y"]
    assert document["settings"]["left_out"] == ["empty"]


def test_with_a_state_figures_cover_all_rounds_so_far(fedentopt: Command, tmp_path: Path) -> None:
    counts, names = table(20), [f"s{k}" for k in range(20)]
    path, state = write(tmp_path / "counts.csv", counts, names), tmp_path / "state.json"
    words = ("select", path, "--cohort", 3, "--seed", 2, "--json")
    straight = json.loads(fedentopt(*words, "--rounds", 9).out)
    for rounds, last in ((4, 4), (1, 5), (4, 9)):
        said = fedentopt(*words, "--rounds", rounds, "--state", state)
        document = json.loads(said.out)
        assert len(document["rounds"]) == rounds
        assert (document["first_round"], document["last_round"]) == (1, last)
    for part, whole in ((document, straight), (document["baseline"], straight["baseline"])):
        for name in ("mean_entropy", "worst_entropy", "coverage", "selection_entropy", "never_selected"):
            assert part[name] == pytest.approx(whole[name], abs=1e-12), name
    shown = fedentopt("select", path, "--cohort", 3, "--rounds", 1, "--state", state).out
    assert "rounds 1 to 10, random selection in brackets" in shown
    assert re.search(r"all classes covered: \d+ of 10 rounds", shown)

    content = json.loads(state.read_text())
    for change in (
        {"rounds": 7}, {"times": {"s1": -1}}, {"times": {"s1": 10**30}}, {"worst": None}, {"more": 1},
        {"covered": float("nan")}, {"divergence": 0.5},
    ):  # fmt: skip
        broken = json.loads(json.dumps(content))
        broken["history"]["chosen"] |= change
        state.write_text(json.dumps(broken))
        said = fedentopt(*words, "--rounds", 1, "--state", state)
        assert said.code == 2, change
        assert f"{state}: history" in said.err
    del content["history"]  # as states were before: the count begins here
    state.write_text(json.dumps(content))
    document = json.loads(fedentopt(*words, "--rounds", 2, "--state", state).out)
    assert (document["first_round"], document["last_round"]) == (11, 12)
    times = [sum(name in entry["clients"] for entry in document["rounds"]) for name in names]
    assert document["selection_entropy"] == selection_entropy(times)


def test_noise_belongs_to_the_client_not_to_its_row(fedentopt: Command, tmp_path: Path) -> None:
    counts, names = table(20), [f"s{k}" for k in range(20)]
    path = write(tmp_path / "counts.csv", counts, names)
    words = ("select", path, "--cohort", 20, "--buffer", 0, "--rounds", 1, "--epsilon", 0.05, "--json")
    everybody = json.loads(fedentopt(*words).out)["rounds"][0]["reported_entropy"]
    order = [7, *range(7), *range(8, 20)]
    write(path, counts[order], [names[k] for k in order])
    assert json.loads(fedentopt(*words).out)["rounds"][0]["reported_entropy"] == pytest.approx(everybody, abs=1e-12)


def test_states_with_noise_by_row_go_on_with_it(fedentopt: Command, tmp_path: Path) -> None:
    counts, names = table(20), [f"s{k}" for k in range(20)]
    path, state = write(tmp_path / "counts.csv", counts, names), tmp_path / "state.json"
    words = ("select", path, "--cohort", 3, "--buffer", 6, "--seed", 4, "--epsilon", 0.2, "--json", "--rounds")
    assert fedentopt(*words, 1, "--state", state).code == 0
    content = json.loads(state.read_text())
    assert content["about"].pop("noise") == "by client"
    reported = laplace_noise(counts, 0.2, np.random.default_rng([4, 0x4E5A]))  # as it was drawn before
    twin = EntropySelector(3, buffer_size=6, seed=4)
    twin.register(reported, noisy=True, ids=names)
    content["state"] = [twin.select() and twin.state_dict() for _ in range(2)][-1]
    del content["history"]
    state.write_text(json.dumps(content))
    rounds = []
    for _ in range(2):
        rounds += json.loads(fedentopt(*words, 1, "--state", state).out)["rounds"]
    assert [entry["clients"] for entry in rounds] == [list(twin.select().clients) for _ in range(2)]
    assert "noise" not in json.loads(state.read_text())["about"]


@pytest.mark.parametrize("clients", [1, 2, 3])
def test_a_sweep_with_default_sizes_takes_few_clients(fedentopt: Command, tmp_path: Path, clients: int) -> None:
    path = write(tmp_path / "counts.csv", table(clients), [f"s{k}" for k in range(clients)])
    said = fedentopt("select", path, "--sweep", "--rounds", 3, "--json")
    assert said.code == 0, said.err
    sizes = [(row["cohort"], row["buffer"]) for row in json.loads(said.out)["sweep"]]
    assert sizes[0] == (1, 0)
    assert all(m + q <= clients for m, q in sizes)


def test_a_sweep_with_a_target_is_ranked_by_divergence(fedentopt: Command, tmp_path: Path) -> None:
    counts, names = table(30), [f"s{k}" for k in range(30)]
    path, aim = write(tmp_path / "counts.csv", counts, names), tmp_path / "target.csv"
    aim.write_text("class,weight\na,6\nb,2\nc,1\nd,1\n")
    words = ("select", path, "--target", aim, "--rounds", 15)
    said = fedentopt(*words, "--sweep", "--cohort", "2,4,8", "--buffer", "0,10", "--json")
    document = json.loads(said.out)
    rows = document["sweep"]
    assert [row["mean_divergence"] for row in rows] == sorted(row["mean_divergence"] for row in rows)
    assert [row["cohort"] for row in rows] != sorted(row["cohort"] for row in rows)  # the ranking is not that of sizes
    for row in rows:
        one = json.loads(fedentopt(*words, "--cohort", row["cohort"], "--buffer", row["buffer"], "--json").out)
        assert one["mean_divergence"] == pytest.approx(row["mean_divergence"])
        assert one["worst_divergence"] == row["worst_divergence"]
    assert sorted(row["cohort"] for row in document["baseline"]) == [2, 4, 8]
    assert all("buffer" not in row for row in document["baseline"])
    shown = fedentopt(*words, "--sweep", "--cohort", "2,4,8", "--buffer", "0,10").out
    assert "divergence" in shown.splitlines()[1]
    listed = [float(line.split()[2]) for line in shown.splitlines()[2:11]]
    assert listed == sorted(listed)


def test_divergence_is_that_of_the_true_counts(fedentopt: Command, tmp_path: Path) -> None:
    path, aim = tmp_path / "counts.csv", tmp_path / "target.csv"
    path.write_text("client,a,b\nx,9,0\ny,0,9\n")
    aim.write_text("class,weight\na,1\nb,3\n")
    words = ("select", path, "--cohort", 2, "--buffer", 0, "--rounds", 1, "--target", aim, "--epsilon", 0.1, "--json")
    (entry,) = json.loads(fedentopt(*words).out)["rounds"]
    assert entry["divergence"] == pytest.approx(0.5 * np.log2(0.5 / 0.25) + 0.5 * np.log2(0.5 / 0.75))
    assert entry["label_counts"] == [9, 9]
