"""`fedentopt select` as a user runs it, on good files and bad ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from command_line import Said, commander
from fedentopt import EntropySelector
from fedentopt.cli.select_show import chart
from fedentopt.selection.measures import entropy, selection_entropy
from fedentopt.tables import read_counts

Command = Callable[..., Said]
CLASSES = ("plane", "car", "bird", "cat")


@pytest.fixture
def fedentopt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return commander(monkeypatch, capsys)


def table(clients: int = 30, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (
        rng.multinomial(40, rng.dirichlet(np.full(4, 0.3)), size=clients)
        + np.eye(4, dtype=int)[rng.integers(0, 4, clients)]
    )


@pytest.fixture
def counts(tmp_path: Path) -> Path:
    rows = [f"site-{k}," + ",".join(map(str, row)) for k, row in enumerate(table())]
    path = tmp_path / "counts.csv"
    path.write_text("\n".join(["client," + ",".join(CLASSES), *rows]) + "\n")
    return path


def test_json_is_what_the_library_gives(fedentopt: Command, counts: Path) -> None:
    said = fedentopt("select", counts, "--cohort", 4, "--buffer", "50%", "--rounds", 20, "--seed", 3, "--json")
    assert said.code == 0
    assert said.err == ""
    selector = EntropySelector(4, buffer_size=15, seed=3)
    selector.register(table(), ids=[f"site-{k}" for k in range(30)])
    expected, times = [], dict.fromkeys(selector.clients, 0)
    for number in range(1, 21):
        cohort = selector.select()
        for client in cohort.clients:
            times[client] += 1
        expected.append({
            "round": number, "clients": list(cohort.clients), "entropy": cohort.entropy,
            "classes_covered": cohort.classes_covered, "label_counts": cohort.label_counts.tolist(),
        })  # fmt: skip
    document = json.loads(said.out)
    assert document["rounds"] == expected
    assert document["selection_entropy"] == selection_entropy(list(times.values()))
    assert document["never_selected"] == list(times.values()).count(0)
    assert document["mean_entropy"] == pytest.approx(np.mean([entry["entropy"] for entry in expected]))
    assert document["coverage"] == np.mean([entry["classes_covered"] == 4 for entry in expected])
    assert (document["first_round"], document["last_round"]) == (1, 20)
    assert document["settings"] == {
        "file": str(counts), "selector": "fedentopt", "cohort": 4, "buffer": 15, "seed": 3, "rounds": 20,
        "epsilon": None, "noisy": False, "target": None, "classes": list(CLASSES), "clients": 30, "left_out": [],
        "available": None,
    }  # fmt: skip


def test_random_stands_beside_as_a_baseline(fedentopt: Command, counts: Path) -> None:
    words = ("select", counts, "--cohort", 4, "--rounds", 12, "--seed", 3)
    document = json.loads(fedentopt(*words, "--json").out)
    random = json.loads(fedentopt(*words, "--selector", "random", "--json").out)
    assert document["baseline"]["entropies"] == [entry["entropy"] for entry in random["rounds"]]
    for name in ("mean_entropy", "worst_entropy", "coverage", "selection_entropy", "never_selected"):
        assert document["baseline"][name] == random[name]
    assert "baseline" not in random
    shown = fedentopt(*words).out
    assert "rounds 1 to 12, random selection in brackets" in shown
    assert f"({random['mean_entropy']:.3f}, {random['worst_entropy']:.3f})" in shown
    for ours, theirs in zip(document["rounds"], random["rounds"], strict=True):
        assert f"{ours['round']:5}    {ours['entropy']:.3f}   {theirs['entropy']:.3f}      " in shown


def test_sizes_in_per_cent_are_floored(fedentopt: Command, counts: Path) -> None:
    by_share = fedentopt("select", counts, "--cohort", "13%", "--buffer", "49%", "--rounds", 9, "--json")
    by_number = fedentopt("select", counts, "--cohort", 3, "--buffer", 14, "--rounds", 9, "--json")
    assert by_share.code == 0
    assert by_share.out == by_number.out
    defaults = fedentopt("select", counts, "--json")
    assert (
        defaults.out == fedentopt("select", counts, "--cohort", "10%", "--buffer", "50%", "--rounds", 100, "--json").out
    )


def test_people_get_a_table_a_chart_and_a_summary(fedentopt: Command, counts: Path) -> None:
    said = fedentopt("select", counts, "--cohort", 4, "--rounds", 40)
    assert said.code == 0
    assert "30 clients, 4 classes, cohorts of 4, buffer of 15, seed 0" in said.out
    assert "(25 more; --json has all)" in said.out
    assert "2.00 ┤" in said.out
    document = json.loads(fedentopt("select", counts, "--cohort", 4, "--rounds", 40, "--json").out)
    entropies = [entry["entropy"] for entry in document["rounds"]]
    assert f"entropy: mean {np.mean(entropies):.3f}, worst {min(entropies):.3f} of 2.000 bits" in said.out
    assert f"H_norm: {document['selection_entropy']:.3f}" in said.out
    assert f"never selected: {document['never_selected']} of 30" in said.out
    assert ", ".join(document["rounds"][39]["clients"]) in said.out


def test_weights_of_a_selector_that_defines_them(fedentopt: Command, tmp_path: Path) -> None:
    """A client with more than a seat's share of the samples is drawn twice and must weigh twice."""
    file = tmp_path / "counts.csv"
    file.write_text("client,a,b\nlarge,60,30\nsmall,2,3\ntiny,1,4\n")
    words = ("select", file, "--cohort", 3, "--rounds", 9, "--json", "--selector")
    rounds = json.loads(fedentopt(*words, "clustered-size").out)["rounds"]
    assert all(len(entry["weights"]) == len(entry["clients"]) for entry in rounds)
    weighed = [dict(zip(entry["clients"], entry["weights"], strict=True)) for entry in rounds]
    assert all(sum(own.values()) == pytest.approx(1) for own in weighed)
    assert all(own["large"] >= 2 / 3 for own in weighed)
    assert "weights" not in json.loads(fedentopt(*words, "flips").out)["rounds"][0]
    shown = fedentopt("select", file, "--cohort", 3, "--rounds", 9, "--selector", "clustered-size").out.splitlines()
    assert shown[1].endswith("clients (part in the average)")
    for line, own in zip(shown[2:11], weighed, strict=True):
        alike = len(set(own.values())) == 1
        assert line.endswith("  " + ", ".join(name if alike else f"{name} ({own[name]:.0%})" for name in own))


@pytest.mark.parametrize("name", ["random", "kl"])
def test_other_selectors(fedentopt: Command, counts: Path, name: str) -> None:
    said = fedentopt("select", counts, "--cohort", 4, "--rounds", 5, "--selector", name, "--json")
    rounds = json.loads(said.out)["rounds"]
    assert len({tuple(entry["clients"]) for entry in rounds}) == (5 if name == "random" else 1)
    said = fedentopt("select", counts, "--cohort", 4, "--rounds", 5, "--selector", name, "--buffer", 5, "--json")
    assert json.loads(said.out)["rounds"] == rounds
    assert "--buffer" in said.err


def test_how_much_of_its_data_a_client_may_use_where_the_selector_says_it(fedentopt: Command, tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("client,a,b\nfirst,6,2\nsecond,0,7\nthird,1,1\n")
    words = ("select", path, "--cohort", 2, "--rounds", 2, "--json", "--selector")
    for entry in json.loads(fedentopt(*words, "kl").out)["rounds"]:
        assert entry["clients"] == ["first", "second"]
        assert entry["sample_limits"] == [[6, 2], [0, 4]], "up to the six of the first client's largest class"
    assert "sample_limits" not in json.loads(fedentopt(*words, "random").out)["rounds"][0]


def test_epsilon_reports_both_entropies(fedentopt: Command, counts: Path) -> None:
    words = ("select", counts, "--cohort", 4, "--rounds", 30, "--epsilon", 0.05)
    document = json.loads(fedentopt(*words, "--json").out)
    numbers = table()
    apart = []
    for entry in document["rounds"]:
        picked = [int(client.removeprefix("site-")) for client in entry["clients"]]
        assert entry["entropy"] == pytest.approx(entropy(numbers[picked].sum(axis=0)), abs=1e-12)
        assert isinstance(entry["classes_covered"], int)
        apart.append(entry["reported_entropy"] - entry["entropy"])
    assert np.abs(apart).max() > 0.01
    assert json.loads(fedentopt(*words, "--json").out) == document  # the noise is that of the seed
    assert json.loads(fedentopt(*words, "--json", "--seed", 1).out) != document
    assert "reported" in fedentopt(*words).out


def test_noisy_files_may_hold_anything_finite(fedentopt: Command, tmp_path: Path) -> None:
    path = tmp_path / "noisy.csv"
    path.write_text("client,a,b\nx,-1.5,3.25\ny,0,0\nz,2e1,-7\n")
    said = fedentopt("select", path, "--cohort", 3, "--buffer", 0, "--rounds", 1, "--noisy", "--json")
    entry = json.loads(said.out)["rounds"][0]
    assert sorted(entry["clients"]) == ["x", "y", "z"]
    assert entry["entropy"] == pytest.approx(entropy([20, 3.25]))
    assert "reported_entropy" not in entry


def test_target(fedentopt: Command, tmp_path: Path) -> None:
    path, aim = tmp_path / "counts.csv", tmp_path / "target.csv"
    path.write_text("client,a,b\nx,9,0\ny,0,9\nz,0,3\n")
    aim.write_text("class,weight\nb,1\na,3\n")
    for seed in range(20):
        said = fedentopt("select", path, "--cohort", 2, "--buffer", 0, "--rounds", 1, "--seed", seed,
                         "--target", aim, "--json")  # fmt: skip
        entry = json.loads(said.out)["rounds"][0]
        if entry["clients"][0] == "x":
            assert entry["clients"] == ["x", "z"]  # (9, 3) is 3 : 1
            assert entry["divergence"] == pytest.approx(0, abs=1e-12)
            shown = fedentopt(
                "select", path, "--cohort", 2, "--buffer", 0, "--rounds", 1, "--seed", seed, "--target", aim
            )
            assert "KL divergence to the target: mean 0.000, worst 0.000 bits" in shown.out
            return
    raise AssertionError("x never came first")


@pytest.mark.parametrize("name", ["fedentopt", "random", "kl"])
def test_state_continues_where_it_left_off(fedentopt: Command, counts: Path, tmp_path: Path, name: str) -> None:
    words = ("select", counts, "--cohort", 4, "--seed", 5, "--selector", name, "--json")
    straight = json.loads(fedentopt(*words, "--rounds", 12).out)["rounds"]
    state = tmp_path / "state.json"
    pieces = []
    for rounds in (5, 1, 6):
        pieces += json.loads(fedentopt(*words, "--rounds", rounds, "--state", state).out)["rounds"]
    assert pieces == straight
    assert [entry["round"] for entry in pieces] == list(range(1, 13))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_state_brings_its_seed_and_noise(fedentopt: Command, counts: Path, tmp_path: Path) -> None:
    words = ("select", counts, "--cohort", 4, "--epsilon", 0.3, "--json")
    straight = json.loads(fedentopt(*words, "--rounds", 6, "--seed", 8).out)["rounds"]
    state = tmp_path / "state.json"
    first = json.loads(fedentopt(*words, "--rounds", 2, "--seed", 8, "--state", state).out)["rounds"]
    second = json.loads(fedentopt(*words, "--rounds", 4, "--state", state).out)["rounds"]
    assert first + second == straight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--cohort", 5), "the state is of cohort 4; accepted: 5"),
        (("--buffer", 3), "the state is of buffer 15; accepted: 3"),
        (("--seed", 1), "the state is of seed 0; accepted: --seed 0"),
        (("--selector", "random"), "the state is of selector 'fedentopt'; accepted: 'random'"),
        (("--epsilon", 1), "the state is of epsilon none; accepted: 1.0"),
        (("--noisy",), "the state is of noisy False; accepted: True"),
    ],
)
def test_state_of_other_options_is_refused(
    fedentopt: Command, counts: Path, tmp_path: Path, change: tuple, message: str
) -> None:
    state = tmp_path / "state.json"
    words = ["select", counts, "--cohort", 4, "--rounds", 3, "--state", state, "--json"]
    assert fedentopt(*words).code == 0
    before = state.read_bytes()
    said = fedentopt(*words, *change)
    assert said.code == 2
    assert f"{state}: {message}" in said.err
    assert said.out == ""
    assert state.read_bytes() == before


def test_state_outlives_clients_that_leave_and_join(fedentopt: Command, counts: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    words = ["select", counts, "--cohort", 4, "--buffer", 10, "--state", state, "--json", "--rounds"]
    assert fedentopt(*words, 3).code == 0
    kept_out = json.loads(state.read_text())["state"]["buffer"]
    gone, rows = kept_out[-1], counts.read_text().splitlines()
    left = [row for row in rows if not row.startswith(f"{gone},")]
    counts.write_text("\n".join([*left, "newcomer,1,1,1,1"]) + "\n")
    said = fedentopt(*words, 1)
    assert said.code == 0, said.err
    assert "clients in the buffer that are not in the counts any more: 1" in said.err
    (fourth,) = json.loads(said.out)["rounds"]
    assert fourth["round"] == 4
    assert not {gone, *kept_out[4:]} & set(fourth["clients"])

    selector = EntropySelector(4, buffer_size=10)
    selector.register(table(), ids=[f"site-{k}" for k in range(30)])
    for _ in range(3):
        selector.select()
    selector.remove([gone])
    selector.register({"newcomer": [1, 1, 1, 1]})
    assert list(selector.select().clients) == fourth["clients"]


def test_state_of_another_file_is_refused(fedentopt: Command, counts: Path, tmp_path: Path) -> None:
    state, other = tmp_path / "state.json", tmp_path / "other.csv"
    assert fedentopt("select", counts, "--cohort", 4, "--rounds", 3, "--state", state).code == 0
    other.write_text(counts.read_text().replace("plane", "train"))
    said = fedentopt("select", other, "--cohort", 4, "--state", state)
    assert said.code == 2
    assert "the state is of classes ['plane', 'car', 'bird', 'cat']" in said.err
    other.write_text(counts.read_text().replace("site-", "clinic-"))
    said = fedentopt("select", other, "--cohort", 4, "--state", state)
    assert said.code == 2
    assert f"{state}: the state is of clients ['site-0', 'site-1', 'site-2'] and 27 more; accepted: counts" in said.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "accepted: a file written by --state"),
        ("[]", "not a state of fedentopt select"),
        ('{"format": "fedentopt select 1"}', "'state' or 'about' is missing"),
        ('{"format": "fedentopt select 1", "about": {}, "state": {}}', "the state is of classes none"),
        ("client,a\n", "accepted: a file written by --state"),
        pytest.param("[" * 100_000, "accepted: a file written by --state", id="nested too deeply"),
    ],
)
def test_what_is_not_a_state_is_refused_and_left_alone(
    fedentopt: Command, counts: Path, tmp_path: Path, content: str, message: str
) -> None:
    state = tmp_path / "state.json"
    state.write_text(content)
    said = fedentopt("select", counts, "--state", state)
    assert said.code == 2
    assert message in said.err
    assert state.read_text() == content


def test_sweep(fedentopt: Command, counts: Path) -> None:
    said = fedentopt(
        "select", counts, "--sweep", "--cohort", "3,20%", "--buffer", "0,50%,90%", "--rounds", 30, "--json"
    )
    rows = json.loads(said.out)["sweep"]
    assert [(row["cohort"], row["buffer"]) for row in rows] == [(3, 0), (3, 15), (3, 27), (6, 0), (6, 15)]
    for row in rows:
        words = ("--cohort", row["cohort"], "--buffer", row["buffer"], "--rounds", 30, "--json")
        document = json.loads(fedentopt("select", counts, *words).out)
        entropies = [entry["entropy"] for entry in document["rounds"]]
        assert row["mean_entropy"] == pytest.approx(np.mean(entropies))
        assert row["worst_entropy"] == min(entropies)
        assert row["coverage"] == np.mean([entry["classes_covered"] == 4 for entry in document["rounds"]])
        assert row["selection_entropy"] == document["selection_entropy"]
        assert row["never_selected"] == document["never_selected"]
    shown = fedentopt("select", counts, "--sweep", "--rounds", 5)
    assert shown.code == 0
    assert "H_norm" in shown.out
    assert "never selected" in shown.out


GOOD = {
    "byte-order mark": b"\xef\xbb\xbfclient,a,b\nx,1,2\ny,3,4\n",
    "windows line ends": b"client,a,b\r\nx,1,2\r\ny,3,4\r\n",
    "old mac line ends": b"client,a,b\rx,1,2\ry,3,4\r",
    "no last line end": b"client,a,b\nx,1,2\ny,3,4",
    "blank lines": b"\nclient,a,b\n\nx,1,2\n , ,\ny,3,4\n\n",
    "spaces and signs": b"Client , a , b\nx, 1 ,+2\ny,3.0,4e0\n",
    "quotes": b'"client","a","b"\n"x","1","2"\n"y",3,4\n',
}


@pytest.mark.parametrize("form", GOOD)
def test_files_from_other_programs(tmp_path: Path, form: str) -> None:
    path = tmp_path / "counts.csv"
    path.write_bytes(GOOD[form])
    file = read_counts(path, noisy=False)
    assert file.clients == ("x", "y")
    assert file.classes == ("a", "b")
    assert file.counts.tolist() == [[1, 2], [3, 4]]


def test_ids_are_taken_as_written(fedentopt: Command, tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    names = ["Bonn, Nord", 'the "old" one', "007", "7", "北京", "[red]x[/]", "two\nlines"]
    quoted = ['"' + name.replace('"', '""') + '"' for name in names]
    path.write_text("client,a,b\n" + "".join(f"{name},1,2\n" for name in quoted), encoding="utf-8")
    said = fedentopt("select", path, "--cohort", 7, "--buffer", 0, "--rounds", 1, "--json")
    assert sorted(json.loads(said.out)["rounds"][0]["clients"]) == sorted(names)
    shown = fedentopt("select", path, "--cohort", 7, "--buffer", 0, "--rounds", 1)
    assert "[red]x[/]" in shown.out
    assert "two lines" in shown.out


BAD = {
    "empty": (b"", "{file}: the file is empty"),
    "blank": (b"\n \n", "{file}: the file is empty"),
    "no classes": (b"client\nx\n", "{file}, line 1: there is no class column"),
    "unnamed class": (b"client,a,\nx,1,2\n", "{file}, line 1, column 3: the class name is empty"),
    "class twice": (b"client,a,a\nx,1,2\n", "{file}, line 1, column 3: class name 'a' is there twice"),
    "no clients": (b"client,a,b\n", "{file}: there is no client"),
    "missing cell": (
        b"client,a,b\nx,1,2\ny,3\n",
        "{file}, line 3, column 'b': the cell is missing, the row has 2 cells; accepted: 3",
    ),
    "extra cell": (
        b"client,a,b\nx,1,2,3\n",
        "{file}, line 2: '3' and what follows belongs to no column, the row has 4 cells; accepted: 3",
    ),
    "text": (b"client,a,b\nx,1,2\ny,3,many\n", "{file}, line 3, column 'b': 'many' is not a number"),
    "empty cell": (b"client,a,b\nx,1,\n", "{file}, line 2, column 'b': the cell is empty"),
    "underscore": (b"client,a,b\nx,1_0,2\n", "{file}, line 2, column 'a': '1_0' is not a number"),
    "comma number": (b'client,a,b\nx,"1,5",2\n', "{file}, line 2, column 'a': '1,5' is not a number"),
    "negative": (b"client,a,b\nx,1,2\ny,-3,4\n", "{file}, line 3, column 'a': the count is -3; accepted: 0 or more"),
    "nan": (b"client,a,b\nx,1,NaN\n", "{file}, line 2, column 'b': the count is nan; accepted: finite"),
    "infinite": (b"client,a,b\nx,1,1e999\n", "{file}, line 2, column 'b': the count is inf; accepted: finite"),
    "huge": (b"client,a,b\nx,1,1e300\n", "{file}, line 2, column 'b': the count is 1e+300; accepted: at most 2**53"),
    "client twice": (
        b"client,a,b\nx,1,2\ny,1,2\nx,3,4\n",
        "{file}, line 4, column 'client': client 'x' is there twice",
    ),
    "no client name": (b"client,a,b\n ,1,2\n", "{file}, line 2, column 'client': the client is empty"),
    "after quoted line ends": (b'client,a,b\n"x\ny",1,2\nz,1,?\n', "{file}, line 4, column 'b': '?' is not a number"),
    "damaged far below": (
        "client,ä\r\n".encode() + b"".join(b"%d,1\r\n" % k for k in range(9000)) + b"K\xf6ln,1\r\n",
        "{file}, line 9002: the byte 0xf6",
    ),
    "binary": (b"PK\x03\x04\x00\x00", "{file}"),
    "open quote": (b'client,a,b\n"x,1,2\n', "{file}, line 2: unexpected end of data"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_refused_by_cell(fedentopt: Command, tmp_path: Path, kind: str) -> None:
    content, message = BAD[kind]
    path = tmp_path / "counts.csv"
    path.write_bytes(content)
    said = fedentopt("select", path, "--cohort", 1, "--json")
    assert said.code == 2
    assert said.out == ""
    assert "error: " + message.format(file=path) in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--buffer", "90%"),
            "--buffer: '90%' gives 27 clients; accepted: at most 26, with 30 clients and cohorts of 4",
        ),
        (("--buffer", 27), "--buffer: '27' gives 27 clients; accepted: at most 26"),
        (("--buffer", "-1"), "--buffer: '-1'"),
        (("--buffer", "half"), "--buffer: 'half' is neither a number"),
        (("--cohort", 0), "--cohort: '0' gives 0 of 30 clients; accepted: 1 to 30"),
        (("--cohort", 31), "--cohort: '31' gives 31 of 30 clients"),
        (("--cohort", "1%"), "--cohort: '1%' gives 0 of 30 clients"),
        (("--cohort", "4,5"), "--cohort: '4,5' is neither a number"),
        (("--epsilon", 0), "epsilon: 0.0 is out of range"),
        (("--epsilon", "nan"), "epsilon: nan is out of range"),
        (("--epsilon", 1, "--noisy"), "--epsilon: adds noise to true counts, but --noisy"),
        (("--selector", "best"), "--selector: 'best' is unknown; accepted: fedentopt, random, kl"),
        (
            ("--selector", "pow-d"),
            "only training tells (the loss of the global model before training, from those asked)",
        ),
        (("--selector", "oort"), "works in the simulator (`fedentopt run --selector oort`) and in Flower's strategy"),
        (("--selector", "hics-fl"), "(its change of the last layer), and here are label counts alone"),
        (("--set", "lam"), "--set: 'lam' cannot be read; accepted: NAME=VALUE"),
        (
            ("--set", "release=random", "--set", "release=fifo"),
            "--set: 'release=fifo' gives release more than once; accepted: each setting once",
        ),
        (("--set", "lam=1"), "--set: 'lam' is no setting of fedentopt; accepted: release"),
        (("--drop", "horse"), "has no column 'horse'; accepted: plane, car, bird, cat"),
        (("--available", "nowhere.txt"), "nowhere.txt: No such file"),
        (("--selector", "kl", "--target", "t.csv"), "--target: kl selection"),
        (("--target", "nowhere.csv"), "nowhere.csv: No such file"),
        (("--sweep", "--state", "s.json"), "--sweep: "),
        (("--sweep", "--selector", "kl"), "--sweep: "),
        (("--sweep", "--cohort", "40"), "--cohort: '40' gives 40 of 30 clients"),
        (("--sweep", "--cohort", "20", "--buffer", "15"), "--sweep: no buffer of 15 leaves room"),
        (("--state", "/no/such/folder/s.json"), "/no/such/folder/s.json: No such file or directory"),
    ],
)
def test_bad_options_are_refused(fedentopt: Command, counts: Path, words: tuple, message: str) -> None:
    base = () if "--cohort" in words else ("--cohort", 4)
    said = fedentopt("select", counts, *base, *words, "--rounds", 2, "--json")
    assert said.code == 2
    assert message in said.err
    assert said.out == ""


def test_missing_file_and_folder(fedentopt: Command, tmp_path: Path) -> None:
    for path, message in ((tmp_path / "no.csv", "No such file or directory"), (tmp_path, "Is a directory")):
        said = fedentopt("select", path)
        assert said.code == 2
        assert f"{path}: {message}" in said.err


BAD_TARGETS = {
    "header": ("a,b\n", "line 1: the header is 'a,b'; accepted: class,weight"),
    "empty": ("", "line 1: the header is ''; accepted: class,weight"),
    "unknown": ("class,weight\nplane,1\ntrain,1\n", "line 3, column 'class': 'train'; accepted: plane, car, bird, cat"),
    "twice": ("class,weight\nplane,1\nplane,1\n", "line 3, column 'class': 'plane' is there twice"),
    "text": ("class,weight\nplane,much\n", "line 2, column 'weight': 'much' is not a number"),
    "negative": ("class,weight\nplane,-1\n", "line 2, column 'weight': '-1'; accepted: finite numbers, 0 or more"),
    "nan": ("class,weight\nplane,nan\n", "line 2, column 'weight': 'nan'"),
    "missing": ("class,weight\nplane,1\ncar,1\n", ": no weight for class 'bird'"),
    "zeros": ("class,weight\nplane,0\ncar,0\nbird,0\ncat,0\n", ": all weights are 0"),
    "cells": ("class,weight\nplane\n", "line 2: 1 cells; accepted: 2"),
}


@pytest.mark.parametrize("kind", BAD_TARGETS)
def test_bad_targets_are_refused_by_cell(fedentopt: Command, counts: Path, tmp_path: Path, kind: str) -> None:
    content, message = BAD_TARGETS[kind]
    path = tmp_path / "target.csv"
    path.write_text(content)
    said = fedentopt("select", counts, "--target", path)
    assert said.code == 2
    assert str(path) in said.err
    assert message in said.err


def test_a_single_class_and_a_single_client(fedentopt: Command, tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("client,only\nx,3\n")
    assert fedentopt("select", path, "--rounds", 3).code == 0
    document = json.loads(fedentopt("select", path, "--rounds", 3, "--json").out)
    assert document["selection_entropy"] == 1
    assert document["never_selected"] == 0
    assert [entry["entropy"] for entry in document["rounds"]] == [0, 0, 0]
    assert math.copysign(1, document["rounds"][0]["entropy"]) == 1


def test_chart_by_hand() -> None:
    assert chart([1.1, 2.0, 1.5], 2.0, height=2) == ["  2.00 ┤ █ ", "  1.50 ┤▂██", "  1.00 └───", "        1 3"]
    assert chart([1.1, 2.0, 1.5], 2.0, height=2, plain=True) == [
        "  2.00 | # ",
        "  1.50 |###",
        "  1.00 +---",
        "        1 3",
    ]
    long = chart([0.01 * x for x in range(1000)], 10.0, first=201, width=40)
    assert {len(line) for line in long} == {48}
    assert long[-1].split() == ["201", "701", "1200"]


@pytest.mark.parametrize("values", [[0.0, 0.0], [2.0, 2.0], [1.0], [0.02, 1.9, 0.4], [1.74, 1.76], [0.3] * 70 + [0.1]])
def test_the_charts_axes_hold_all_points(values: list[float]) -> None:
    lines = chart(values, 2.0, width=60)
    low, high = float(lines[-2].split()[0]), float(lines[0].split()[0])
    assert low <= min(values)
    assert high >= max(values)
    assert low < min(values) or low == 0
    assert all(mark in "▁▂▃▄▅▆▇█" for mark in lines[-3].partition("┤")[2])  # every column shows something


def test_a_class_that_nobody_holds_is_not_asked_for(fedentopt: Command, tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("client,a,b,c\nx,1,2,0\ny,2,1,0\nz,5,0,0\n")
    words = ("select", path, "--cohort", 1, "--buffer", 2, "--rounds", 6)
    said = fedentopt(*words)
    assert "3 clients, 3 classes (1 held by nobody), cohorts of 1" in said.out
    assert "all classes that any client holds covered: 4 of 6 rounds" in said.out  # not those of z
    assert " 2/2 " in said.out
    assert " 1/2 " in said.out
    assert "of 1.000 bits" in said.out
    swept = fedentopt(*words, "--sweep")
    assert "3 clients, 3 classes (1 held by nobody), 6 rounds each" in swept.out
    assert "67 %" in swept.out
    assert "held every class that any client holds" in " ".join(swept.out.split())
    rounds = json.loads(fedentopt(*words, "--json").out)["rounds"]
    assert sorted(entry["classes_covered"] for entry in rounds) == [1, 1, 2, 2, 2, 2]
    (row,) = json.loads(fedentopt(*words, "--sweep", "--json").out)["sweep"]
    assert row["coverage"] == pytest.approx(4 / 6)


def test_all_classes_covered_says_no_more_where_somebody_holds_each(fedentopt: Command, counts: Path) -> None:
    said = fedentopt("select", counts, "--cohort", 4, "--rounds", 3)
    assert "\nall classes covered: " in said.out
    noisy = counts.with_name("noisy.csv")
    noisy.write_text("client,a,b\nx,-1,-2\ny,-3,0\n")
    said = fedentopt("select", noisy, "--noisy", "--cohort", 1, "--buffer", 0, "--rounds", 2)
    assert said.code == 0, said.err
    assert "2 classes (2 held by nobody)" in said.out
