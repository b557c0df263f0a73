"""What a run's server knows of each client: kept with the run, read back, refused where it is broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import watched_runs
from fedentopt.cli.result_table import as_json, print_methods
from fedentopt.errors import InputError
from fedentopt.results.aggregate import by_method
from fedentopt.results.clients import clients_csv, read_clients, verdicts
from fedentopt.results.folder import RunFolder
from fedentopt.results.reading import read_run
from fedentopt.results.records import ClientRecord
from fedentopt.simulation.engine import RunOptions, Stack, Task, run_stack
from fedentopt.simulation.result import Result
from watched_runs import CLIENTS, COHORT, DATA, LIARS, LYING, ROUNDS, config, in_memory
from watched_runs import METHODS as WATCHED

HEADER = "client,liar,chosen,observed,suspicion,suspected,distance,agreement,estimate_error,reported_size,true_size"
KNOWN = ClientRecord(0, True, 3, 2, 1 / 3, False, 0.1, -0.5, 0.25, 30.0, 10.0)
UNKNOWN = ClientRecord(1, None, 0, None, None, None, None, None, None, None, None)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "clients.csv"
    file.write_text(clients_csv([KNOWN, UNKNOWN]))
    assert file.read_text().splitlines() == [
        HEADER, f"0,yes,3,2,{1 / 3!r},no,0.1,-0.5,0.25,30.0,10.0", "1,,0,,,,,,,,",
    ]  # fmt: skip
    assert read_clients(file, ["0", "1"]) == (KNOWN, UNKNOWN)
    # By name, in the order of the label table whatever that of the lines.
    file.write_text(clients_csv([UNKNOWN, KNOWN], ["a, b", '"c"']))
    assert read_clients(file, ["a, b", '"c"']) == (KNOWN, UNKNOWN)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([HEADER.replace(",distance", ""), "0,,0,,,,,,,"], "column 'distance' is missing; expected client,liar"),
        ([HEADER, "0,,0"], "line 2 has 3 cells, the header has 11"),
        ([HEADER, "0,maybe,0,,,,,,,,"], "client '0', column liar: 'maybe' cannot be used; accepted: yes, no, or"),
        ([HEADER, "0,,-1,,,,,,,,"], "column chosen: '-1' cannot be used; accepted: a whole number from 0 on"),
        ([HEADER, "0,,,,,,,,,,"], "column chosen: '' cannot be used"),
        ([HEADER, "0,,0,1.5,,,,,,,"], "column observed: '1.5' cannot be used; accepted: a whole number from 0 on, or"),
        ([HEADER, "0,,0,,nan,,,,,,"], "column suspicion: 'nan' cannot be used; accepted: a number, or nothing"),
        ([HEADER, "0,,0,,,,far,,,,"], "column distance: 'far' cannot be used"),
        ([HEADER, "0,,0,,,,,,,,", "7,,0,,,,,,,,"], "client '7' has no row in label_counts.csv"),
        ([HEADER, "0,,0,,,,,,,,", "0,,0,,,,,,,,"], "client '0' is listed twice; accepted: one line per client"),
        ([HEADER, "0,,0,,,,,,,,"], "client '1' has no line; accepted: one line per client"),
        ([], "column 'client' is missing"),
    ],
)
def test_a_broken_file_is_named_with_the_place(tmp_path: Path, lines: list[str], message: str) -> None:
    file = tmp_path / "clients.csv"
    file.write_text("\n".join(lines))
    with pytest.raises(InputError) as refused:
        read_clients(file, ["0", "1"])
    assert str(refused.value).startswith(f"{file}: ")
    assert message in str(refused.value)


def test_records_are_what_the_server_knows_after_the_last_round() -> None:
    stack = Stack([Task(config(**m), watched_runs.toy.Memory()) for m in WATCHED], DATA, torch.device("cpu"),
                  RunOptions(device="cpu"), None)  # fmt: skip
    outcomes = stack.run(lambda: False)
    for method, outcome, run in zip(WATCHED, outcomes, stack.runs, strict=True):
        planner, clients = run.planner, outcome.client_records
        assert clients is not None
        assert [c.client for c in clients] == list(range(CLIENTS))
        assert [c.client for c in clients if c.liar] == list(planner.liars)
        times = Counter(client for record in outcome.records for client in record.clients)
        trained = Counter(client for record in outcome.records for client in record.trained)
        assert [c.chosen for c in clients] == [times[k] for k in range(CLIENTS)]
        assert [c.true_size for c in clients] == planner.counts.sum(axis=1).tolist()
        inferring, watching = method.get("selector") == "inferred", "audit" in method
        seen = [trained[k] + inferring for k in range(CLIENTS)]  # a census sees everybody once
        assert [c.observed for c in clients] == (seen if inferring or watching else [None] * CLIENTS)
        assert all((c.estimate_error is None) == (not c.observed) for c in clients)
        assert all((c.reported_size is None) == inferring for c in clients)
        if watching:
            assert planner.audit is not None
            suspects = planner.audit.suspects()
            assert suspects
            assert {c.client for c in clients if c.suspected} == set(suspects)
            assert {c.client: c.suspicion for c in clients if c.observed} == planner.audit.suspicions()
            liar = next(c for c in clients if c.liar and c.observed)
            claimed = planner.reported[liar.client] / planner.reported[liar.client].sum()
            estimate = planner.audit.estimate(liar.client)
            assert estimate is not None
            assert liar.distance == pytest.approx(abs(estimate.shares - claimed).sum() / 2)
        else:
            assert {(c.suspected, c.suspicion, c.distance) for c in clients} == {(None, None, None)}


def test_memory_and_folder_keep_the_same_and_other_runs_none(tmp_path: Path) -> None:
    watched_runs.write_watched(tmp_path, WATCHED[1], {}, {"size_cap": 3.0}, seeds=1)
    files = []
    for folder in tmp_path.iterdir():
        run = read_run(folder)
        files.append(sorted(path.name for path in folder.iterdir()))
        if run.config.get("audit") == "quarantine":
            assert run.clients == in_memory(**WATCHED[1]).clients is not None
        else:
            assert run.clients is None
    usual = ["label_counts.csv", "model.safetensors", "rounds.csv", "run.json", "summary.json"]
    assert sorted(files) == [sorted([*usual, "reported_counts.csv", "clients.csv"]), usual, usual]
    assert in_memory().clients is None


@pytest.mark.parametrize("settings", [WATCHED[1] | {"epsilon": 0.5}, WATCHED[3]])
def test_a_run_that_was_stopped_ends_with_the_same_clients(tmp_path: Path, settings: dict[str, Any]) -> None:
    one = config(**settings)
    paths = []
    for name in ("straight", "stopped"):
        folder = RunFolder(tmp_path / name, one)
        paths.append(folder.path / "clients.csv")
        if name == "stopped":
            stops = Stack([Task(one, folder)], DATA, torch.device("cpu"), RunOptions(device="cpu"), None)
            rounds = iter(range(3))
            with pytest.raises(KeyboardInterrupt):
                stops.run(lambda rounds=rounds: next(rounds, None) is None)
            unfinished = read_run(folder.path)
            assert not unfinished.finished
            assert unfinished.clients is not None
            chosen = sum(client.chosen for client in unfinished.clients)
            assert 0 < chosen == COHORT * len(unfinished.rounds) < COHORT * ROUNDS
            folder = RunFolder(tmp_path / name, one)
        run_stack([Task(one, folder)], DATA, RunOptions(device="cpu"))
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_run_that_starts_afresh_leaves_no_clients_of_an_older_one(tmp_path: Path) -> None:
    one = config(**WATCHED[1])
    run_stack([Task(one, RunFolder(tmp_path, one))], DATA, RunOptions(device="cpu"))
    again = RunFolder(tmp_path, one, resume=False)
    # What an earlier version wrote in its place had no such file.
    source = watched_runs.toy.Memory()
    run_stack([Task(one, source)], DATA, RunOptions(device="cpu"))
    assert source.outcome is not None
    again.start(source.begun)
    again.finish(replace(source.outcome, client_records=None))
    assert read_run(again.path).clients is None


def test_results_have_the_clients_as_a_frame() -> None:
    runs = [in_memory(**WATCHED[2]), in_memory(**WATCHED[3]), in_memory()]
    result = Result(runs, ["audited", "inferred", "plain"])
    frame = result.clients
    assert list(frame.columns) == ["method", "seed", *HEADER.split(",")]
    assert frame.groupby("method").size().to_dict() == {"audited": CLIENTS, "inferred": CLIENTS}
    assert frame.liar.sum() == 2 * LIARS
    audited = frame[frame.method == "audited"]
    assert audited.chosen.tolist() == runs[0].times_selected.tolist()
    assert audited[audited.suspected].liar.all()
    assert frame[frame.method == "inferred"].suspected.isna().all()
    assert frame.distance.dtype == float
    assert Result(runs[2:], ["plain"]).clients.empty


def test_verdicts_count_by_who_lies() -> None:
    clients = [replace(KNOWN, suspected=True), KNOWN, replace(KNOWN, liar=False), replace(KNOWN, liar=False)]
    found = verdicts(clients)
    assert str(found) == "1 of 2 liars suspected, 0 of 2 honest"
    assert found is not None
    assert found.to_dict() == {"liars": {"suspected": 1, "of": 2}, "honest": {"suspected": 0, "of": 2}}
    assert str(verdicts(clients[2:])) == "0 of 2 honest suspected"
    assert str(verdicts([replace(UNKNOWN, suspected=True)])) == "1 of 1 clients suspected"
    assert verdicts([UNKNOWN]) is None


def test_a_comparison_says_whom_the_audit_suspects(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [in_memory(**WATCHED[1], seed=seed) for seed in (0, 1)] + [in_memory(**LYING)]
    methods = by_method(runs)
    print_methods(methods, [])
    text = capsys.readouterr().out
    caught = sum(bool(c.suspected) for run in runs[:2] for c in run.clients if c.liar)
    accused = sum(bool(c.suspected) for run in runs[:2] for c in run.clients if not c.liar)
    [line] = [line for line in text.splitlines() if "suspected" in line]
    honest = 2 * (CLIENTS - LIARS)
    assert line.split("  ")[-1] == f"{caught} of {2 * LIARS} liars suspected, {accused} of {honest} honest"
    assert line.startswith("fedentopt (audit=quarantine)")
    assert "audit at the end, 2 seeds together" in text
    audited, plain = as_json(runs, methods, [])["methods"]
    assert audited["suspected"]["liars"] == {"suspected": caught, "of": 2 * LIARS}
    assert "suspected" not in plain
    print_methods(by_method([in_memory()]), [])
    assert "audit" not in capsys.readouterr().out
