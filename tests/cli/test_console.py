"""Output on streams that cannot show every character: names are escaped there, and no command stops halfway."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from command_line import commander
from fedentopt import cli
from fedentopt.cli import console

command = pytest.fixture(commander)


@pytest.mark.parametrize(
    ("encoding", "errors", "shown"),
    [
        ("cp1252", "strict", "\\u6771\\u4eac é"),
        ("ascii", "surrogateescape", "\\u6771\\u4eac \\xe9"),
        ("ascii", "replace", "?? ?"),  # as the user set it
        ("utf-8", "strict", "東京 é"),
    ],
)
def test_what_a_stream_lacks_is_escaped(
    monkeypatch: pytest.MonkeyPatch, encoding: str, errors: str, shown: str
) -> None:
    for name, make in (("stdout", console.out), ("stderr", console.err)):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding=encoding, errors=errors, newline="")
        monkeypatch.setattr(sys, name, stream)
        make().print("東京 é")
        stream.flush()
        assert raw.getvalue().decode(encoding) == shown + "\n"


def test_names_in_a_file_are_escaped_when_undecodable(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="utf-8", newline="")
    monkeypatch.setattr(sys, "stdout", stream)
    console.out().print("caf\udce9.csv")
    stream.flush()
    assert raw.getvalue() == b"caf\\udce9.csv\n"


def test_select_shows_its_table_in_a_small_code_page(tmp_path: Path) -> None:
    counts, state = tmp_path / "counts.csv", tmp_path / "state.json"
    counts.write_text("client,a,b\n東京,1,2\ny,2,1\n", encoding="utf-8")
    words = ["select", str(counts), "--cohort", "2", "--buffer", "0", "--rounds", "2", "--state", str(state)]
    said = subprocess.run(
        [sys.executable, "-c", "from fedentopt.cli import main; main()", *words],
        env=os.environ | {"PYTHONIOENCODING": "cp1252", "COLUMNS": "120"}, capture_output=True, check=True,
    )  # fmt: skip
    assert rb"\u6771\u4eac" in said.stdout
    assert b"clients never selected: 0 of 2" in said.stdout
    assert json.loads(state.read_text(encoding="utf-8"))["state"]["round"] == 2


@pytest.mark.parametrize(
    ("words", "told"), [("methods", b"fedprox+fedentopt"), ("--help", b"select"), ("select no.csv", b"error: no.csv")]
)
def test_a_terminal_of_unknown_width_is_told_everything(words: str, told: bytes) -> None:
    said = subprocess.run(
        [sys.executable, "-c", "from fedentopt.cli import main; main()", *words.split()],
        env=os.environ | {"COLUMNS": "0"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert told in said.stdout


def test_a_path_that_the_system_refuses_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = commander(monkeypatch, capsys)
    said = command("run", "--weights", "a" * 5000, "--rounds", 1, "--out", tmp_path)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error: ")  # what follows depends on how much Python asks the system

    def refuse(*words: object) -> None:
        raise PermissionError(13, "Permission denied", "some/file")

    monkeypatch.setattr(cli, "app", refuse)
    said = command("run")
    assert (said.code, said.out, said.err) == (2, "", "error: some/file: Permission denied\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_does_not_get_out_is_told_by_the_exit_code(unbuffered: str) -> None:
    def listed(out: int) -> tuple[int, bytes]:
        said = subprocess.run(
            [sys.executable, "-c", "from fedentopt.cli import main; main()", "methods", "--json"],
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered}, stdout=out, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
        os.close(out)
        return said.returncode, said.stderr

    assert listed(os.open("/dev/full", os.O_WRONLY)) == (2, b"error: standard output: No space left on device\n")
    unread, pipe = os.pipe()
    os.close(unread)
    assert listed(pipe) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_that_an_error_does_not_name_is_not_taken_for_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def keep(*words: object) -> None:
        print("so far so good")
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"something")

    command = commander(monkeypatch, capsys)
    monkeypatch.setattr(cli, "app", keep)
    said = command("run")
    assert (said.code, said.out) == (2, "so far so good\n")
    assert said.err == "error: a file that the system does not name: No space left on device\n"


def test_a_closed_standard_output_is_no_place_for_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = commander(monkeypatch, capsys)
    monkeypatch.setattr(sys, "stdout", None)
    said = command("methods", "--json")
    assert (said.code, said.err) == (
        2,
        "error: --json: standard output is closed; accepted: one that can be written to\n",
    )


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--out"),
        ("run", "--dataset"),
        ("run", "--weights"),
        ("reproduce", "--list", "--out"),
        ("data", "list", "--data-dir"),
        ("plan", "none.csv", "--out"),
    ],
)
def test_a_home_that_nobody_has_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    said = commander(monkeypatch, capsys)(*words, "~nobody-of-that-name/x")
    assert (said.code, said.err.splitlines()[-1]) == (
        2, "error: ~nobody-of-that-name/x: no home of that name is known; accepted: ~/..., or a path without ~",
    )  # fmt: skip


@pytest.mark.parametrize("words", [("reproduce",), ("compare",), ("data", "verify")])
def test_a_paragraph_of_the_help_is_broken_by_the_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)  # of the terminal in which typer was imported
    said = commander(monkeypatch, capsys)(*words, "--help", columns=80)
    about = [line.strip() for line in said.out.partition("╭")[0].splitlines()]
    for line, following in itertools.pairwise(about):
        first = following.partition(" ")[0]
        assert not line or not following or len(f" {line} {first} ") > 80, (line, following)


def test_the_root_help_has_one_line_per_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERMINAL_WIDTH", "80")  # typer's own, read when it was imported
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    said = commander(monkeypatch, capsys)("--help", columns=80)
    table = said.out.partition("Commands")[2].splitlines()[1:-1]
    lines = [line.strip("│| ").split(maxsplit=1) for line in table if line.strip("│| ╰╯─-+")]
    assert {name for name, _ in lines} >= {"compare", "run", "select", "data", "report", "bench", "methods"}
    for name, about in lines:
        assert about == cli.SUMMARIES[name], "a summary of one line for every command"


def test_versions_as_json_need_no_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = commander(monkeypatch, capsys)
    told = json.loads(command("--version", "--json").out)
    assert told.keys() == {"fedentopt", "python", "platform", "packages", "devices"}
    assert told["packages"]["torch"]
    assert told["devices"][0] == "cpu"
    assert not [value for value in json.dumps(told).split('"') if value.startswith(("/", "~", "C:\\"))]
    alone = command("--json")
    assert alone.code == 2
    assert "json: goes with --version here" in alone.err
    assert command().code == 2


@pytest.mark.parametrize(
    ("words", "meant"), [(("selct", "counts.csv"), "select"), (("data", "lst"), "list"), (("bench", "engin"), "engine")]
)
def test_a_command_that_was_meant_is_suggested_once(words, meant, command) -> None:
    said = command(*words)
    assert said.code == 2
    assert said.err.count("Did you mean") == 1
    assert f"Did you mean '{meant}'?" in said.err


@pytest.mark.filterwarnings("default")
def test_a_cohort_that_falls_short_is_a_line_without_a_place_in_our_code(command, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("picks_few.py").write_text(
        "from fedentopt.selection import Selector\n"
        "class Few(Selector):\n"
        "    def pick(self, available, losses):\n"
        "        return available[:1].tolist()\n"
    )
    shown = warnings.showwarning
    said = command(
        "run", "--selector", "picks_few:Few", "--clients", 5, "--cohort", 2, "--rounds", 2, "--epochs", 1, "--device",
        "cpu", "--workers", 1, "--out", "out", "--no-page",
    )  # fmt: skip
    assert said.code == 0, said.err
    assert "cohort of 1 instead of 2: few picked no more" in said.err.splitlines()
    assert "CohortWarning" not in said.err
    assert ".py" not in said.err
    assert warnings.showwarning is shown


def test_other_warnings_are_shown_as_ever() -> None:
    with pytest.warns(DeprecationWarning, match="old"), console.warnings_as_notes():
        warnings.warn("old", DeprecationWarning, stacklevel=1)
