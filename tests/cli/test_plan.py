"""`fedentopt plan` as a user runs it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import Said, commander

Command = Callable[..., Said]
FEW = ("--cohort", "3,5", "--rounds", 10, "--repetitions", 2)
ROWS = "".join(
    f"the hospital of town {k};{'7' if k % 3 else '0'};{'5' if k % 4 else '0'};{k % 5};{(k * 7) % 11 + 1};"
    f"{(7 if k % 3 else 0) + (5 if k % 4 else 0) + k % 5 + (k * 7) % 11 + 1}\n"
    for k in range(24)
)


@pytest.fixture
def fedentopt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return commander(monkeypatch, capsys)


@pytest.fixture
def counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As a spreadsheet writes it: semicolons, a name of its own for the first column, a total, an empty site."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "our sites.csv"
    path.write_text("site;a;b;c;d;total\n" + ROWS + "closed;0;0;0;0;0\n", encoding="utf-16")
    return path


def test_the_command_runs_for_a_file_whose_name_begins_like_an_option(fedentopt: Command, counts: Path) -> None:
    counts.rename(counts.with_name("-x.csv"))
    said = fedentopt("plan", *FEW, "--drop", "total", "--json", "--", "-x.csv")
    assert said.code == 0, said.err
    words = shlex.split(json.loads(said.out)["recommendation"]["command"])
    again = fedentopt(*words[1:], "--json")
    assert again.code == 0, again.err
    assert len(json.loads(again.out)["rounds"]) == 10


def test_from_ones_own_table_to_a_decision(fedentopt: Command, counts: Path) -> None:
    said = fedentopt("plan", counts.name, *FEW, "--json")
    assert said.code == 2
    assert "column 'total': equals the sum of the other classes for every client; accepted: --drop total" in said.err
    assert not Path("plan.html").exists()

    said = fedentopt("plan", counts.name, *FEW, "--drop", "total", "--json")
    assert said.code == 0, said.err
    for line in ("read as UTF-16, separated by semicolon", "the column 'site'", "left out, no samples: 'closed'"):
        assert f"our sites.csv: {line}" in said.err or line in said.err
    document = json.loads(said.out)
    assert document.keys() == {"page", "settings", "rows", "skipped", "recommendation"}
    assert document["settings"]["clients"] == 24
    assert document["settings"]["drop"] == ["total"]
    assert Path(document["page"]).read_text(encoding="utf-8").startswith("<!DOCTYPE html>")

    best = document["recommendation"]
    words = shlex.split(best["command"])
    assert words[:3] == ["fedentopt", "select", "our sites.csv"]
    carried_out = json.loads(fedentopt(*words[1:], "--json").out)
    for name, value in best["first_repetition"].items():
        assert carried_out[name] == pytest.approx(value, abs=1e-12), name
    scope: dict[str, object] = {}
    exec(best["python"], scope)
    assert list(scope["cohort"].clients) == carried_out["rounds"][0]["clients"]
    assert fedentopt("plan", counts.name, *FEW, "--drop", "total", "--json").out == said.out  # the same again


def test_eighty_columns(counts: Path) -> None:
    words = ["plan", counts.name, *map(str, FEW), "--drop", "total", "--out", "pages/ours.html"]
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    said = subprocess.run(
        [sys.executable, "-c", "from fedentopt.cli import main; main()", *words],
        env=environment | {"PYTHONIOENCODING": "utf-8"}, capture_output=True, check=True, encoding="utf-8",
    )  # fmt: skip
    before, _, after = said.stdout.partition("to carry it out")
    assert max(map(len, before.splitlines())) <= 80
    heads = [line for line in before.splitlines() if line.endswith("H_norm  never")]
    assert len(heads) == 4  # selectors, sizes, noise, absence
    assert "recommended: " in before
    assert f"fedentopt select {shlex.quote(counts.name)} --cohort " in after
    assert after.rstrip().endswith("page: pages/ours.html")
    assert Path("pages/ours.html").is_file()
    assert "\x1b" not in said.stderr  # no progress bar in a pipe


def test_a_narrow_terminal_loses_no_figure(counts: Path) -> None:
    words = ["plan", counts.name, *map(str, FEW), "--drop", "total"]
    rows = []
    for width in ("22", "40", "120"):
        said = subprocess.run(
            [sys.executable, "-c", "from fedentopt.cli import main; main()", *words],
            env=os.environ | {"PYTHONIOENCODING": "utf-8", "COLUMNS": width}, capture_output=True, check=True,
        )  # fmt: skip
        lines = said.stdout.decode().splitlines()
        rows.append([line for line in lines if re.search(r" \d\.\d{3}  \d\.\d{3}  ", line)])
    assert len(rows[0]) > 20
    assert rows[0] == rows[1] == rows[2]


def test_a_page_is_renewed_and_other_files_are_left_alone(
    fedentopt: Command, counts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("plan", counts.name, "--rounds", 2, "--repetitions", 1, "--drop", "total")
    assert fedentopt(*words).code == 0
    assert fedentopt(*words).code == 0
    mine = Path("plan.html")
    mine.write_text("<html>my own plan</html>")
    said = fedentopt(*words)
    assert said.code == 2
    assert "plan.html: is there and no page of fedentopt; accepted: --out with another name" in said.err
    assert mine.read_text() == "<html>my own plan</html>"
    monkeypatch.setattr("fedentopt.plan.make_plan", lambda *counts, **options: pytest.fail("refused after the work"))
    assert fedentopt(*words).err == said.err
    folder = fedentopt(*words, "--out", ".")
    assert (folder.code, folder.err) == (2, "error: .: is a folder; accepted: --out with the name of a file\n")


def test_a_page_that_cannot_be_written_takes_no_plan_with_it(fedentopt: Command, counts: Path) -> None:
    words = ("plan", counts.name, "--rounds", 2, "--repetitions", 1, "--drop", "total")
    Path("file").touch()
    told = fedentopt(*words).out
    said = fedentopt(*words, "--out", "file/plan.html")
    assert (said.code, "error: file/plan.html: " in said.err) == (2, True), said.err
    assert said.out.strip() == told.removesuffix("page: plan.html\n").strip()
    document = json.loads(fedentopt(*words, "--out", "file/plan.html", "--json").out)
    assert (document["page"], document["recommendation"]["selector"] in told.lower()) == (None, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--cohort", "99"), "--cohort: 99 gives [99]; accepted: 1 to 24 clients"),
        (("--buffer", "half"), "--buffer: 'half' is neither a number"),
        (("--away", "all"), "--away: 'all'; accepted: a share"),
        (("--epsilon", "none,-1"), "--epsilon: '-1'; accepted: numbers above 0"),
        (("--noisy", "--epsilon", "1"), "--epsilon: adds noise to true counts"),
        (("--drop", "nothing"), "has no column 'nothing'"),
    ],
)
def test_bad_options_are_refused(fedentopt: Command, counts: Path, words: tuple, message: str) -> None:
    drop = () if "--drop" in words else ("--drop", "total")
    said = fedentopt("plan", counts.name, *drop, *words, "--json")
    assert said.code == 2
    assert message in said.err
    assert said.out == ""
    assert not Path("plan.html").exists()


@pytest.mark.parametrize("clients", [1, 2, 3])
def test_few_clients(fedentopt: Command, counts: Path, clients: int) -> None:
    small = counts.with_name("small.csv")
    small.write_text("client,a,b\n" + "".join(f"s{k},{k},{3 - k}\n" for k in range(clients)))
    said = fedentopt("plan", small, "--json", "--rounds", 10)
    assert said.code == 0, said.err
    assert json.loads(said.out)["recommendation"]["cohort"] <= clients
    assert fedentopt("plan", small, "--rounds", 10).code == 0
