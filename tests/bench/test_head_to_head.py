"""The contest between frameworks on one device: how it measures, stops and reports, and that the work is the same."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedentopt.selection import RandomSelector
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.planning import RunPlanner

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
if not PEERS.is_dir():
    pytest.skip("benchmarks/ is not part of this copy", allow_module_level=True)
STORED = PEERS / "results_gpu"
LONG = 60.0  # seconds; nothing here comes near


def module(name: str) -> ModuleType:
    """A script of benchmarks/peers, imported as its neighbours import it."""
    before = list(sys.path)
    sys.path[:0] = [str(PEERS), str(PEERS.parent)]
    try:
        return importlib.import_module(name)
    finally:
        sys.path[:] = before


work, contest, kit = module("cifar10_work"), module("contest"), module("kit")


def said(*lines: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"at": 1000.0 + line.pop("after"), **line} for line in lines]


def test_a_summary_of_rounds() -> None:
    lines = said(
        {"after": 4.0, "ready": True, "parameters": 7, "processes": 5},
        {"after": 10.0, "round": 1},
        {"after": 11.0, "round": 2},
        {"after": 12.0, "round": 3},
        {"after": 16.0, "round": 4, "accuracy": 33.5},
        {"after": 17.5, "done": True, "accuracy": 40.25},
    )
    assert contest.summary(lines, 1000.0, 18.0) == {
        "parameters": 7, "processes": 5, "wall_seconds": 18.0, "startup_seconds": 4.0, "first_round_ended": 10.0,
        "rounds": 4, "seconds_a_round": 1.0, "mean_seconds_a_round": 2.0, "accuracy": 40.25,
        "accuracy_by_round": [[4, 16.0, 33.5]], "done": True,
    }  # fmt: skip


def test_a_run_that_ended_is_measured_and_one_that_was_stopped_is_reckoned() -> None:
    rounds = [{"after": 10.0 + 2 * k, "round": 1 + k} for k in range(6)]
    stopped = contest.summary(said(*map(dict, rounds)), 1000.0, 21.0)
    assert contest.whole_run(stopped, 101) == (10.0 + 100 * 2.0, True)
    ended = contest.summary(said(*map(dict, rounds), {"after": 20.5, "done": True}), 1000.0, 21.0)
    assert contest.whole_run(ended, 6) == (21.0, False)
    assert contest.whole_run(ended, 7)[1], "done with fewer rounds is not the whole run"
    late = contest.summary(said(*map(dict, rounds)), 1000.0, 90.0)
    assert contest.whole_run(late, 6) == (90.0, True), "all its rounds, and still not done when it was stopped"
    assert contest.whole_run(contest.summary([], 1000.0, 21.0), 6) == (None, True)


def run_script(tmp_path: Path, *scripts: str, limit: float = LONG) -> tuple[dict[str, Any], str]:
    progress, log = tmp_path / "progress.jsonl", tmp_path / "log.txt"
    commands = [[sys.executable, "-c", script, str(progress)] for script in scripts]
    result = contest.run(commands, [dict(os.environ)] * len(commands), progress, log, limit, {str(tmp_path): "there"})
    return result, log.read_text()


def test_who_is_not_done_is_stopped_with_all_it_started(tmp_path: Path) -> None:
    grandchild = tmp_path / "pid"
    result, _ = run_script(
        tmp_path,
        f"""
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(grandchild)!r}, "w").write(str(child.pid))
file = open(sys.argv[1], "w", buffering=1)
for k in (1, 2):
    file.write(json.dumps({{"at": time.time(), "round": k, "accuracy": 10.0 * k}}) + "\\n")
file.write('{{"at": 17')
file.flush()
time.sleep(600)
""",
        limit=1.5,
    )
    assert result["stopped"]
    assert not result["done"]
    assert (result["rounds"], result["accuracy"]) == (2, 20.0)
    assert result["wall_seconds"] >= 1.5
    child, until = int(grandchild.read_text()), time.monotonic() + LONG
    while _runs(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(number: int) -> bool:
    status = subprocess.run(["ps", "-o", "stat=", "-p", str(number)], capture_output=True, text=True).stdout.strip()
    return bool(status) and not status.startswith("Z")


def test_one_that_fails_ends_the_others_and_leaves_its_reason(tmp_path: Path) -> None:
    begun = time.monotonic()
    waits = "import time; print('\\x1b[92mwaiting\\x1b[0m', flush=True); time.sleep(600)"
    result, log = run_script(tmp_path, waits, f"raise SystemExit('no device at {tmp_path}/x')")
    assert time.monotonic() - begun < LONG
    assert "no device at there/x" in result["error"]
    assert result["rounds"] == 0
    assert "\x1b" not in log
    assert str(tmp_path) not in log


def test_a_good_end_without_being_done_is_an_error(tmp_path: Path) -> None:
    result, _ = run_script(tmp_path, "pass")
    assert "did not say that it was done" in result["error"]


def test_logs_lose_their_middle() -> None:
    lines = [str(k) for k in range(1000)]
    kept = contest.shortened("\n".join(lines)).splitlines()
    assert kept[:60] == lines[:60]
    assert kept[60] == "... 880 lines left out ..."
    assert kept[61:] == lines[-60:]
    assert contest.shortened("a\nb\n") == "a\nb\n"


def entry(who: str, **facts: Any) -> dict[str, Any]:
    plain = {
        "who": who, "seed": 0, "first_round_ended": 3.0, "seconds_a_round": 0.25, "rounds": 1500, "wall_seconds": 30.0,
        "accuracy": 70.4, "whole_run_seconds": 30.0, "reckoned": False, "device": "a device",
    }  # fmt: skip
    return plain | facts


def test_the_table_marks_what_was_not_measured() -> None:
    head = module("head_to_head")
    runs = [
        entry("ours"),
        entry("pfl", rounds=400, whole_run_seconds=301.0, reckoned=True, wall_seconds=90.0, processes=5),
        entry("ours", whole_run_seconds=20.0),
        entry("pfl", whole_run_seconds=250.0),
        entry("flower", error="a | b\nc", whole_run_seconds=None, reckoned=True, seconds_a_round=None, accuracy=None),
    ]
    probes = [
        {"processes": 2, "how": "as shipped", "seconds_a_round": None, "error": "refused", "done": False, "rounds": 0},
        {"processes": 5, "how": "gloo", "seconds_a_round": 0.5, "done": False, "rounds": 9},
    ]
    report = {
        "runs": runs, "probes": probes, "rounds": 1500, "torch": "2", "command": "python x",
        "peers": {"pfl": {"pfl": "0.6.0"}, "flower": {"flwr": "1.41.0", "ray": "2"}},
    }  # fmt: skip
    text = head.table(report)
    assert "| pfl | 0 | 5 | 3.0 | 0.2500 | 400 | 90.0 | about 301 (reckoned) | 70.40 |" in text
    assert "| pfl | 0 | 1 | 3.0 | 0.2500 | 1,500 | 30.0 | 250.0 | 70.40 |" in text
    assert "| failed: a / b c |" in text
    assert "- pfl, seed 0: 10.0 times the seconds of ours (reckoned)" in text
    assert "- pfl, seed 0: 12.5 times the seconds of ours\n" in text
    assert "flower, seed" not in text
    assert "| 2 | as shipped | failed: refused |" in text
    assert "| 5 | gloo | 0.5000, stopped after 9 rounds |" in text, "it may have been chosen for its speed"
    assert "pfl-research 0.6.0, Flower 1.41.0, Ray 2" in text


@pytest.mark.skipif(not STORED.is_dir(), reason="the results are not part of this copy")
def test_the_stored_contest_is_what_the_documents_say() -> None:
    head = module("head_to_head")
    report = json.loads((STORED / "head_to_head.json").read_text())
    assert (STORED / "head_to_head.md").read_text() == head.table(report)
    page = (PEERS.parents[1] / "docs" / "benchmarks.md").read_text()
    for run in report["runs"]:
        assert (run["whole_run_seconds"], run["reckoned"]) == contest.whole_run(run, report["rounds"])
        _, _, processes, first, *_, accuracy = head.row(run)
        seconds = f"about {int(run['whole_run_seconds']):,}, reckoned" if run["reckoned"] else head.row(run)[7]
        mean = f"{run['seconds_a_round']:.{4 if run['who'] == 'ours' else 3 if run['who'] == 'pfl' else 2}f}"
        wanted = f"| {processes} | {first} | {mean} | {run['rounds']:,}"
        assert any(wanted in line and f"| {seconds} | {accuracy} %" in line for line in page.splitlines()), run["who"]
    logs = sorted(log.read_text() for log in (STORED / "logs").iterdir())
    assert len(logs) == len(report["runs"]) + len(report["probes"])
    assert not [text for text in logs if any(place in text for place in ("/tmp/", "/root/", "/home/", "/work/"))]


def test_a_long_log_is_shown_by_its_end() -> None:
    head = module("head_to_head")
    long = (
        "exit code 1: Traceback (most recent call last):\n" + "  File | x\n" * 90 + "InputError: device: no CUDA device"
    )
    shown = head.failed(long)
    assert shown.startswith("failed: exit code 1: ... ")
    assert shown.endswith("InputError: device: no CUDA device")
    assert len(shown) < 300
    assert not set("|\n") & set(shown)
    assert head.failed("exit code 1: short") == "failed: exit code 1: short"


def test_trials_of_pfl_leave_time_for_the_runs_and_the_fastest_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL does not join two processes, three never find one another, five are stopped on their way."""
    head, limits = module("head_to_head"), []

    def run(commands: list[Any], _e: Any, _p: Any, _l: Any, limit: float, _places: Any) -> dict[str, Any]:
        limits.append(limit)
        ends = {1: (25, 0.8), 2: (0, None), 3: (0, None), 5: (20, 0.4)}
        rounds, seconds = ends[len(commands)]
        result = {
            "rounds": rounds, "seconds_a_round": seconds, "startup_seconds": None, "wall_seconds": limit,
            "done": rounds == 25,
        }  # fmt: skip
        return result | ({"error": "duplicate GPU"} if len(commands) == 2 else {})

    monkeypatch.setattr(head.contest, "run", run)
    options = Namespace(
        out=tmp_path, kit=tmp_path, peers=[], rounds=1500, limit=200.0, processes=[1, 3, 5], probe_rounds=25,
        probe_limit=35.0, device="cpu",
    )  # fmt: skip
    contestants = head.Contest(options, tmp_path)
    assert contestants.best_processes() == (5, True)
    assert limits == [35.0] * 4
    errors = [probe.get("error") for probe in contestants.report["probes"]]
    assert errors == ["duplicate GPU", None, "stopped before its second round ended", None]


def test_pfl_may_have_fewer_turns_than_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, order = module("head_to_head"), []

    def run(_c: Any, _e: Any, _p: Any, log: Path, limit: float, _places: Any) -> dict[str, Any]:
        order.append((log.stem, limit))
        return contest.summary(said({"after": 1.0, "round": 1}, {"after": 2.0, "round": 2, "done": True}), 1000.0, 3.0)

    monkeypatch.setattr(head.contest, "run", run)
    monkeypatch.setattr(head, "images", lambda _: head.random_images(work.USERS, 10))
    for peer in ("pfl", "flower"):
        (tmp_path / "kit" / peer).mkdir(parents=True)
    words = ["--device", "cpu", "--rounds", "2", "--processes", "1", "--turns", "2", "--pfl-turns", "1"]
    words += ["--limit", "200", "--flower-limit", "70", "--kit", str(tmp_path / "kit"), "--out", str(tmp_path / "o")]
    monkeypatch.setattr(sys, "argv", ["head_to_head.py", *words])
    monkeypatch.setattr(head.signal, "signal", lambda *_: None)  # this process's own stays
    head.main()
    assert order == [
        ("01-ours-seed-0", 200.0), ("02-pfl-seed-0", 200.0), ("03-ours-seed-1", 200.0), ("04-flower", 70.0)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "it has no folder pfl"),
        (("--peers", "--turns", "0"), "--turns 0: accepted: 1 or more"),
        (("--peers", "--pfl-turns", "0"), "--pfl-turns 0: accepted: 1 or more"),
        (("--peers", "--rounds", "1"), "--rounds 1: accepted: 2 or more"),
        (("--peers", "--processes", "0"), "--processes 0: accepted: 1 or more"),
        (("--peers", "--limit", "0"), "--limit 0: accepted: seconds, more than 0"),
        (("--peers", "--flower-limit", "-1"), "--flower-limit -1: accepted: seconds, more than 0"),
        (("--peers", "--probe-limit", "0"), "--probe-limit 0: accepted: seconds, more than 0"),
        (("--peers", "--limit", "nan"), "--limit nan: accepted: seconds, more than 0"),
        (("--peers", "--device", "cpu", "--data-dir", "nowhere"), "data_batch_1.bin is not there"),
        (("--peers", "--device", "cpu", "--out", __file__), "accepted: a folder, or one to be made"),
        pytest.param(
            ("--peers", "--device", "cuda"),
            "torch sees no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has one"),
        ),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(
    words: tuple[str, ...], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["head_to_head.py", "--kit", str(tmp_path), "--out", str(tmp_path / "o"), *words])
    with pytest.raises(SystemExit) as end:
        module("head_to_head").main()
    assert end.value.code == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def small(tmp_path: Path) -> Any:
    """Four users of twenty images, the images bright in one channel."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 200, (80, 3, 32, 32), dtype=np.uint8)
    x[:, 1] += 50
    split = (x, rng.integers(0, 10, 80))
    scale = (0.25, 0.5, 0.25), (0.2, 0.25, 0.5)
    work.write_data(tmp_path, {"train": split, "test": split}, scale, {0: rng.permutation(80).reshape(4, 20)})
    return x


def test_images_are_standardised_per_channel(tmp_path: Path) -> None:
    x = small(tmp_path) / 255
    found, labels = work.Images(tmp_path, 0).split("test")
    np.testing.assert_allclose(found[:, 0].numpy(), (x[:, 0] - 0.25) / 0.2, atol=1e-5)
    np.testing.assert_allclose(found[:, 1].numpy(), (x[:, 1] - 0.5) / 0.25, atol=1e-5)
    np.testing.assert_allclose(found[:, 2].numpy(), (x[:, 2] - 0.25) / 0.5, atol=1e-5)
    assert labels.dtype == torch.int64


def test_the_net_is_the_published_one() -> None:
    model = work.simple_cnn()
    assert sum(p.numel() for p in model.parameters()) == 1_626_442
    bound = (6 / (3 * 9 + 32 * 9)) ** 0.5  # Glorot's, of the first convolution
    assert 0.9 * bound < float(model[0].weight.detach().abs().max()) <= bound


def test_peers_get_the_users_of_our_runs() -> None:
    labels = np.random.default_rng(1).integers(0, 10, work.USERS * work.IMAGES)
    config = RunConfig(
        dataset="random", model="lenet5", partition="iid", clients=work.USERS, cohort=str(work.COHORT), seed=3
    )
    ours = RunPlanner(config, labels, work.CLASSES, RandomSelector(cohort_size=work.COHORT, seed=3)).parts.indices
    theirs = module("pfl_cifar10").users(labels, 3)
    assert theirs.shape == (work.USERS, work.IMAGES)
    np.testing.assert_array_equal(theirs, np.stack(ours))


def test_a_user_of_flower_trains_one_epoch_from_the_servers_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(tmp_path)
    flower = module("flower_on_gpu")
    monkeypatch.setattr(torch, "set_num_threads", lambda many: None)  # an actor's, not this process's
    monkeypatch.setattr(work, "same_products", lambda: None)
    torch.manual_seed(0)  # rounding must not carry a pixel over ReLU's kink, as with some start models it does
    start, images = work.simple_cnn(), work.Images(tmp_path, 0)
    state = {name: value.clone() for name, value in start.state_dict().items()}
    flower.training(tmp_path, 0, "cpu")  # makes a net, which draws; dropout below draws alike
    torch.manual_seed(5)
    flower.train_locally(tmp_path, 0, "cpu", 2, state)

    torch.manual_seed(5)
    x, y = images.split("train")
    mine = images.users[2]
    for part in (mine[:10], mine[10:]):
        start.zero_grad()
        nn.functional.cross_entropy(start.train()(x[part]), y[part]).backward()
        with torch.no_grad():
            for parameter in start.parameters():
                parameter -= 0.1 * parameter.grad
    for name, value in start.state_dict().items():
        torch.testing.assert_close(state[name], value)


def test_processes_that_share_a_gpu_are_joined_by_gloo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda **how: asked.append(how))
    module("pfl_on_gpu").let_processes_share_the_gpu()
    torch.distributed.init_process_group(backend="nccl", init_method="tcp://localhost:1", rank=1, world_size=2)
    assert asked == [{"backend": "gloo", "init_method": "tcp://localhost:1", "rank": 1, "world_size": 2}]
    assert "gloo instead of nccl" in capsys.readouterr().out


def test_what_a_kit_leaves_out(tmp_path: Path) -> None:
    kept = ["ray/_raylet.so", "ray/dashboard/agent.py", "flwr/simulation/app.py", "numpydoc/x.py"]
    cut = [
        "numpy/__init__.py", "numpy.libs/a.so", "numpy-2.5.dist-info/METADATA", "ray/jars/ray_dist.jar", "bin/uv",
        "ray/dashboard/client/build/x.js", "ray/rllib/a.py", "flwr/tests/a.py", "flwr/__pycache__/a.pyc", "flwr/a.pyi",
    ]  # fmt: skip
    for name in (*kept, *cut):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    kit.cut(tmp_path, kit.PARTS["flower"].cut)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == sorted(kept)


def test_packages_that_pip_refuses_leave_no_kit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with a part of them would pass for a peer's."""

    def refuse(part: Any, folder: Path, python: str) -> None:
        (folder / "pfl").mkdir()
        raise subprocess.CalledProcessError(2, ["pip"])

    monkeypatch.setattr(kit, "install", refuse)
    monkeypatch.setattr(sys, "argv", ["kit.py", str(tmp_path), "--peers", "pfl"])
    with pytest.raises(SystemExit) as end:
        kit.main()
    assert end.value.code == 1
    assert "pip could not install pfl's packages (exit code 2)" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_kits_archive_gives_the_folder_back(tmp_path: Path) -> None:
    (tmp_path / "pfl" / "pfl").mkdir(parents=True)
    (tmp_path / "pfl" / "pfl" / "a.py").write_text("x = 1\n")
    archive = kit.pack(tmp_path / "pfl")
    subprocess.run([sys.executable, "-m", "tarfile", "-e", str(archive), str(tmp_path / "there")], check=True)
    assert (tmp_path / "there" / "pfl" / "pfl" / "a.py").read_text() == "x = 1\n"


def test_progress_is_in_the_file_as_soon_as_it_is_said(tmp_path: Path) -> None:
    progress = work.Progress(tmp_path / "p.jsonl")
    progress.round_ended(1)
    progress.round_ended(2, 12.3456)
    first, second = (json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines())
    assert set(first) == {"at", "round"}
    assert (second["round"], second["accuracy"]) == (2, 12.35)
