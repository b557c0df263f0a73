"""The state file of `fedentopt select` as clients come and go, and what it remembers of the options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import Said, commander
from fedentopt import EntropySelector
from fedentopt.selection import SELECTORS

Command = Callable[..., Said]


@pytest.fixture
def fedentopt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return commander(monkeypatch, capsys)


def row(k: int) -> list[int]:
    return [(7 * k) % 11, (5 * k) % 13 + 1, (3 * k) % 7]


def write(path: Path, numbers: range | list[int]) -> Path:
    path.write_text("client,a,b,c\n" + "".join(f"c{k},{','.join(map(str, row(k)))}\n" for k in numbers))
    return path


@pytest.mark.parametrize("name", ["kl", "random", "fedentopt"])
def test_the_seed_of_the_noise_is_that_of_the_state(fedentopt: Command, tmp_path: Path, name: str) -> None:
    counts, state = write(tmp_path / "counts.csv", range(20)), tmp_path / "state.json"
    words = ("select", counts, "--selector", name, "--cohort", 4, "--epsilon", 0.05, "--json", "--rounds")
    straight = json.loads(fedentopt(*words, 3, "--seed", 7).out)["rounds"]
    other = json.loads(fedentopt(*words, 3, "--seed", 0).out)["rounds"]
    assert [entry["reported_entropy"] for entry in straight] != [entry["reported_entropy"] for entry in other]
    pieces = json.loads(fedentopt(*words, 1, "--seed", 7, "--state", state).out)["rounds"]
    for seed in ((), ("--seed", 7)):
        pieces += json.loads(fedentopt(*words, 1, *seed, "--state", state).out)["rounds"]
    assert pieces == straight
    before = state.read_bytes()
    said = fedentopt(*words, 1, "--seed", 8, "--state", state)
    assert said.code == 2
    assert f"{state}: the state is of seed 7; accepted: --seed 7, or none" in said.err
    assert state.read_bytes() == before


def test_states_written_before_the_seed_and_the_rules_were_kept(fedentopt: Command, tmp_path: Path) -> None:
    counts, state = write(tmp_path / "counts.csv", range(20)), tmp_path / "state.json"
    for name in ("kl", "fedentopt"):
        state.unlink(missing_ok=True)
        words = ("select", counts, "--selector", name, "--cohort", 4, "--seed", 3, "--rounds", 1, "--json")
        assert fedentopt(*words, "--state", state).code == 0
        content = json.loads(state.read_text())
        for key in ("seed", "rules"):
            del content["about"][key]
        content.pop("clients", None)
        state.write_text(json.dumps(content))
        said = fedentopt(*words, "--state", state)
        assert said.code == 0, said.err
        assert json.loads(said.out)["rounds"][0]["round"] == 2
    state.write_text(json.dumps(content))
    write(counts, range(24))
    said = fedentopt(*words, "--state", state)
    assert said.code == 2
    assert "the state is of buffer 10; accepted: 12, as given now; --buffer 10 goes on with it" in said.err
    assert fedentopt(*words, "--state", state, "--buffer", 10).code == 0


@pytest.mark.parametrize("seed", [-1, True, "7", 1.5])
def test_a_seed_that_is_none_is_refused(fedentopt: Command, tmp_path: Path, seed: object) -> None:
    counts, state = write(tmp_path / "counts.csv", range(20)), tmp_path / "state.json"
    words = ("select", counts, "--selector", "kl", "--rounds", 1, "--state", state)
    assert fedentopt(*words).code == 0
    content = json.loads(state.read_text())
    content["about"]["seed"] = seed
    state.write_text(json.dumps(content))
    said = fedentopt(*words)
    assert said.code == 2
    assert f"{state}: seed is {seed!r}; accepted: a whole number" in said.err


def test_goes_on_when_everybody_in_the_buffer_has_left(fedentopt: Command, tmp_path: Path) -> None:
    counts, state = write(tmp_path / "counts.csv", range(3)), tmp_path / "state.json"
    words = ("select", counts, "--cohort", 1, "--buffer", 1, "--rounds", 1, "--state", state, "--json")
    (first,) = json.loads(fedentopt(*words).out)["rounds"]
    (gone,) = first["clients"]
    write(counts, [k for k in range(3) if f"c{k}" != gone])
    said = fedentopt(*words)
    assert said.code == 0, said.err
    assert "clients in the buffer that are not in the counts any more: 1" in said.err
    (second,) = json.loads(said.out)["rounds"]
    assert second["round"] == 2
    assert gone not in second["clients"]
    write(counts, range(10, 13))  # nobody the state has heard of
    before = state.read_bytes()
    said = fedentopt(*words)
    assert said.code == 2
    assert "the state is of clients ['c" in said.err
    assert state.read_bytes() == before
    content = json.loads(before)
    del content["clients"]  # as states were that had nobody in a buffer
    state.write_text(json.dumps(content))
    said = fedentopt(*words)
    assert said.code == 2
    assert "not registered" in said.err


@pytest.mark.parametrize(("cohort", "buffer"), [((), ()), (("--cohort", "10%"), ("--buffer", "50%"))])
def test_sizes_that_are_rules_follow_the_number_of_clients(
    fedentopt: Command, tmp_path: Path, cohort: tuple, buffer: tuple
) -> None:
    counts, state = write(tmp_path / "counts.csv", range(20)), tmp_path / "state.json"
    words = ("select", counts, *cohort, *buffer, "--seed", 1, "--state", state, "--json", "--rounds")
    assert fedentopt(*words, 4).code == 0

    write(counts, range(30))
    said = fedentopt(*words, 4)
    assert said.code == 0, said.err
    assert "cohort of 3, no longer 2: there are 30 clients now" in said.err
    assert "buffer of 15, no longer 10: there are 30 clients now" in said.err
    rounds = json.loads(said.out)["rounds"]
    assert [entry["round"] for entry in rounds] == [5, 6, 7, 8]
    twin = EntropySelector(2, buffer_size=10, seed=1)
    twin.register({f"c{k}": row(k) for k in range(20)})
    for _ in range(4):
        twin.select()
    grown = EntropySelector(3, buffer_size=15)
    grown.register({f"c{k}": row(k) for k in range(30)})
    grown.load_state_dict(twin.state_dict() | {"cohort_size": 3, "buffer_size": 15})
    assert [tuple(entry["clients"]) for entry in rounds] == [grown.select().clients for _ in range(4)]

    kept_out = json.loads(state.read_text())["state"]["buffer"]
    assert len(kept_out) == 15
    here = [k for k in range(30) if f"c{k}" in kept_out] + [k for k in range(30) if f"c{k}" not in kept_out][:5]
    write(counts, sorted(here))
    said = fedentopt(*words, 1)
    assert said.code == 0, said.err
    assert "buffer of 10, no longer 15: there are 20 clients now" in said.err
    (ninth,) = json.loads(said.out)["rounds"]
    # With two leaving as two enter, all but the oldest five and the two after them are still kept out.
    assert not set(kept_out[7:]) & set(ninth["clients"])
    assert json.loads(state.read_text())["state"]["buffer"] == [*kept_out[7:], *ninth["clients"]]


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ((), ("--buffer", "40%"), "the state is of buffer 10; accepted: 12, as given now; --buffer 10 goes on with it"),
        (("--buffer", "8"), (), "the state is of buffer 8; accepted: 15, as given now; --buffer 8 goes on with it"),
        (("--buffer", "8"), ("--buffer", "9"), "the state is of buffer 8; accepted: 9, as given now; --buffer 8"),
        (("--cohort", "2"), (), "the state is of cohort 2; accepted: 3, as given now; --cohort 2 goes on with it"),
    ],
)
def test_sizes_said_otherwise_are_refused_with_the_way_on(
    fedentopt: Command, tmp_path: Path, first: tuple, then: tuple, message: str
) -> None:
    counts, state = write(tmp_path / "counts.csv", range(20)), tmp_path / "state.json"
    cohort = () if "--cohort" in first else ("--cohort", "10%")
    words = ("select", counts, "--rounds", 2, "--state", state, "--json")
    assert fedentopt(*words, *cohort, *first).code == 0
    before = state.read_bytes()
    write(counts, range(30))
    said = fedentopt(*words, *cohort, *then)
    assert said.code == 2
    assert f"{state}: {message}" in said.err
    assert state.read_bytes() == before


def test_a_number_stays_and_the_same_number_may_be_said_otherwise(fedentopt: Command, tmp_path: Path) -> None:
    counts, state = write(tmp_path / "counts.csv", range(20)), tmp_path / "state.json"
    words = ("select", counts, "--rounds", 1, "--cohort", 2, "--state", state, "--json")
    assert fedentopt(*words, "--buffer", 10).code == 0
    assert fedentopt(*words).code == 0  # half of 20, and a rule from here on
    write(counts, range(22))
    said = fedentopt(*words)
    assert "buffer of 11, no longer 10" in said.err
    assert said.code == 0
    write(counts, range(30))
    assert fedentopt(*words, "--buffer", 11).code == 0


NO_BUFFER = ["random", "kl", "fed-cbs", "clustered-size", "clustered-label", "flips", "cycle"]


@pytest.mark.parametrize("name", NO_BUFFER)
def test_without_a_buffer_too_a_state_knows_its_clients(fedentopt: Command, tmp_path: Path, name: str) -> None:
    """Those that left are forgotten, as by `remove`; a file of others is refused."""
    counts, state = write(tmp_path / "counts.csv", range(12)), tmp_path / "state.json"
    words = ("select", counts, "--selector", name, "--cohort", 3, "--seed", 4, "--state", state, "--json", "--rounds")
    assert fedentopt(*words, 3).code == 0
    left = [k for k in range(12) if k not in (2, 7)]
    write(counts, [*left, 20])
    said = fedentopt(*words, 2)
    assert said.code == 0, said.err

    selector = SELECTORS.get(name)(3, seed=4)
    selector.register([row(k) for k in range(12)], ids=[f"c{k}" for k in range(12)])
    for _ in range(3):
        selector.select()
    selector.remove(["c2", "c7"])
    selector.register({"c20": row(20)})
    expected = [list(selector.select().clients) for _ in range(2)]
    assert [entry["clients"] for entry in json.loads(said.out)["rounds"]] == expected
    kept = json.loads(state.read_text())["state"]
    assert sorted(map(str, kept.get("times", []))) == sorted(map(str, selector.memory().get("times", [])))
    before = state.read_bytes()
    write(counts, range(30, 42))
    said = fedentopt(*words, 1)
    assert said.code == 2
    assert "the state is of clients ['c0', 'c1', 'c3'] and 8 more; accepted: counts of some of them" in said.err
    assert state.read_bytes() == before


def test_a_cycle_goes_on_in_cohorts_of_the_size_that_follows(fedentopt: Command, tmp_path: Path) -> None:
    """A fourth of the clients: 3 of 12, then 2 of 8. Everybody left is served once before anybody is again."""
    counts, state = write(tmp_path / "counts.csv", range(12)), tmp_path / "state.json"
    words = ("select", counts, "--selector", "cycle", "--cohort", "25%", "--state", state, "--json", "--rounds")
    (first,) = json.loads(fedentopt(*words, 1).out)["rounds"]
    assert len(first["clients"]) == 3
    left = [k for k in range(12) if f"c{k}" not in json.loads(state.read_text())["state"]["plan"][-1]][:8]
    write(counts, left)
    due = {f"c{k}" for k in left} - set(first["clients"])
    served = [entry["clients"] for entry in json.loads(fedentopt(*words, (len(due) + 1) // 2).out)["rounds"]]
    assert all(len(cohort) <= 2 for cohort in served)
    assert sorted(client for cohort in served for client in cohort) == sorted(due)


@pytest.mark.parametrize(
    ("name", "usual", "other"), [("fedentopt", "release=fifo", "release=random"), ("fed-cbs", "lam=10", "lam=3")]
)
def test_a_setting_said_or_left_at_its_default_is_the_same(
    fedentopt: Command, tmp_path: Path, name: str, usual: str, other: str
) -> None:
    counts, state = write(tmp_path / "counts.csv", range(20)), tmp_path / "state.json"
    words = ("select", counts, "--selector", name, "--cohort", 4, "--json", "--rounds")
    straight = json.loads(fedentopt(*words, 4).out)["rounds"]
    pieces = []
    for said in ((), ("--set", usual), ("--set", usual), ()):
        pieces += json.loads(fedentopt(*words, 1, *said, "--state", state).out)["rounds"]
    assert pieces == straight
    before, key = state.read_bytes(), other.partition("=")[0]
    said = fedentopt(*words, 1, "--set", other, "--state", state)
    assert said.code == 2
    assert f"{state}: state: {key} is " in said.err
    assert state.read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("form", [(), ("--json",)])
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("begun", [True, False])
def test_cohorts_that_nobody_saw_are_given_again(
    tmp_path: Path, form: tuple[str, ...], unbuffered: str, begun: bool
) -> None:
    """A closed pipe and a full disk leave the state as it was, and nothing beside it."""
    counts, state = write(tmp_path / "counts.csv", range(12)), tmp_path / "state.json"

    def select(out: int, *words: str) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-c", "from fedentopt.cli import main; main()", "select", str(counts), *words]
        command += ["--cohort", "3", "--rounds", "2", "--state", str(state)]
        env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        return subprocess.run(command, env=env, stdout=out, stderr=subprocess.PIPE, check=False)

    if begun:
        assert select(subprocess.DEVNULL).returncode == 0
    before = state.read_bytes() if begun else None
    there = sorted(path.name for path in tmp_path.iterdir())
    full = os.open("/dev/full", os.O_WRONLY)
    unread, pipe = os.pipe()
    os.close(unread)
    told = b"error: standard output: No space left on device\n"
    for out, code, words in ((full, 2, told), (pipe, 1, b"")):
        said = select(out, *form)
        os.close(out)
        assert (said.returncode, said.stderr) == (code, words)
        assert (state.read_bytes() if state.exists() else None) == before
        assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".lock") == [
            name for name in there if not name.endswith(".lock")
        ]
    rounds = [entry["round"] for entry in json.loads(select(subprocess.PIPE, "--json").stdout)["rounds"]]
    assert rounds == ([3, 4] if begun else [1, 2])


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of files")
def test_a_state_that_cannot_be_written_is_told_before_anything_is_printed(tmp_path: Path) -> None:
    """A disk without room for it, though with enough for its lock."""
    import resource

    counts, state = write(tmp_path / "counts.csv", range(12)), tmp_path / "state.json"
    command = [sys.executable, "-c", "from fedentopt.cli import main; main()", "select", str(counts), "--json"]
    said = subprocess.run(
        [*command, "--rounds", "1", "--state", str(state)], capture_output=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64)),
    )  # fmt: skip
    assert (said.returncode, said.stdout) == (2, b"")
    assert said.stderr.startswith(f"error: {state}: ".encode())
    assert sorted(tmp_path.iterdir()) == [counts]
