"""The page's parts about what servers believed: where they are, where not, and what their numbers are."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import run_config
from fedentopt.audit import Audit, Change
from fedentopt.errors import InputError
from fedentopt.report import render_runs, write_report
from fedentopt.report.belief import drawn, liars_among_all, liars_among_chosen, threshold
from fedentopt.report.grouping import group_runs
from fedentopt.report.payload import LEVELS, group_payload
from fedentopt.results.label_counts import LabelTable
from fedentopt.results.reading import RunResult, find_runs
from fedentopt.results.records import ClientRecord, RoundRecord
from fedentopt.results.rounds import RoundTable
from result_folders import write_run
from watched_runs import CLIENTS, LIARS, METHODS, write_watched

CLASSES = tuple("abcdefghij")
HEADS = ("What the server believed", "Suspects beside honest clients")


def of_page(text: str) -> dict[str, Any]:
    (coded,) = re.findall(r'class="data" data-group="0">([^<]*)</script>', text)
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(coded)))
    return found


def table_of(text: str, number: int = 0) -> tuple[list[str], dict[str, list[str]]]:
    """Heads and rows of the table of beliefs, as shown."""
    table = re.search(rf'<table id="belief-{number}">.*?</table>', text, re.S)
    assert table is not None
    lines = [
        [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<t[hd][ >].*?</t[hd]>", line, re.S)]
        for line in re.findall(r"<tr.*?</tr>", table[0], re.S)
    ]
    return lines[0], {row[0]: row[1:] for row in lines[1:]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_watched(tmp_path_factory.mktemp("watched"), *METHODS)


def test_the_page_shows_what_was_believed_and_what_was_true(folder: Path) -> None:
    text = write_report(folder).read_text()
    assert all(f"<h2>{head}</h2>" in text for head in HEADS)
    assert '<a href="#belief">' in text
    data, runs = of_page(text), find_runs(folder)
    assert len(data["methods"]) == 4
    for method in data["methods"]:
        mine = [run for run in runs if method["label"] == label_of(run)]
        assert len(mine) == 2
        belief = method["belief"]
        expected = np.mean([run.rounds.believed_entropy for run in mine], axis=0)
        assert belief["figures"]["believed_entropy"]["mean"] == pytest.approx(expected.tolist(), abs=6e-5)
        assert belief["liarsAmongAll"] == 100 * LIARS / CLIENTS
        assert ("estimate_error" in belief["figures"]) == (method["label"] != "fedentopt")
        assert ("suspicion_auc" in belief["figures"]) == (belief["policy"] != "off")
        for run, shown in zip(mine, method["runs"], strict=True):
            clients = shown["clients"]
            assert run.clients is not None
            assert clients["liar"] == [client.liar for client in run.clients]
            assert clients["suspected"] == [client.suspected for client in run.clients]
            assert clients["chosen"] == shown["times"]
            assert clients["unseen"] == sum(client.observed == 0 for client in run.clients)
            assert (clients["verdicts"] is None) == (belief["policy"] == "off")


def label_of(run: RunResult) -> str:
    audit = run.config.get("audit")
    return run.method + (f" (audit={audit})" if audit else "")


def test_the_table_counts_suspects_of_all_seeds(folder: Path) -> None:
    heads, rows = table_of(write_report(folder).read_text())
    assert heads == [
        "Method", "Cohort entropy (bits)", "Believed (bits)", "Liars among clients %", "Liars among the chosen %",
        "Error of estimates", "AUC of suspicion", "Liars suspected", "Others suspected",
    ]  # fmt: skip
    for label, cells in rows.items():
        runs = [run for run in find_runs(folder) if label_of(run) == label]
        clients = [client for run in runs for client in run.clients or ()]
        assert float(cells[0].split()[0]) == pytest.approx(np.mean([run.rounds.entropy for run in runs]), abs=6e-4)
        assert cells[2] == "25"
        picks = sum(client.chosen for client in clients)
        lying = sum(client.chosen for client in clients if client.liar)
        assert float(cells[3].split()[0]) == pytest.approx(100 * lying / picks, abs=0.06)
        if "audit" not in label:
            assert cells[5:] == ["–", "–", "–"]
            continue
        assert cells[6] == f"{sum(bool(c.suspected) for c in clients if c.liar)} of {2 * LIARS}"
        assert cells[7] == f"{sum(bool(c.suspected) for c in clients if not c.liar)} of {2 * (CLIENTS - LIARS)}"
        assert not cells[6].startswith("0 ")


def test_without_liars_nobody_is_called_one(tmp_path: Path) -> None:
    write_watched(tmp_path, {"audit": "warn"}, {}, seeds=1)
    text = write_report(tmp_path).read_text()
    heads, rows = table_of(text)
    assert heads == ["Method", "Cohort entropy (bits)", "Believed (bits)", "Error of estimates", "Suspected"]
    assert rows["fedentopt (audit=warn)"][-1] == f"0 of {CLIENTS}"
    assert list(rows) == ["fedentopt (audit=warn)"]  # the run without an audit believes what it is told
    watched = {method["label"]: method for method in of_page(text)["methods"]}["fedentopt (audit=warn)"]
    assert watched["belief"]["liarsAmongAll"] is None
    assert watched["belief"]["liars"]["x"] == []
    assert set(watched["runs"][0]["clients"]["liar"]) == {False}


def test_a_page_of_runs_that_believe_what_they_are_told_has_none_of_it(tmp_path: Path) -> None:
    write_run(tmp_path, run_config(clients=20, rounds=3), classes=CLASSES)
    text = write_report(tmp_path).read_text()
    assert not any(f"<h2>{head}</h2>" in text for head in HEADS)
    assert 'href="#belief"' not in text
    assert of_page(text)["methods"][0]["belief"] is None


def test_results_without_clients_csv_show_the_rounds(folder: Path) -> None:
    older = []
    for run in find_runs(folder):
        older.append(RunResult(run.about, run.summary, labels=run.labels, rounds=run.rounds))
    text = render_runs(older)
    _, rows = table_of(text)
    assert {cells[6] for cells in rows.values()} == {"–"}
    assert rows["fedentopt (audit=replace)"][5] != "–"
    methods = of_page(text)["methods"]
    assert {method["runs"][0]["clients"] for method in methods} == {None}
    assert all(method["belief"]["liars"]["x"] for method in methods)


def test_a_broken_file_makes_no_page(tmp_path: Path) -> None:
    write_watched(tmp_path, {"audit": "warn"}, seeds=1)
    (file,) = tmp_path.glob("*/clients.csv")
    file.write_text(file.read_text().replace("0,no", "0,perhaps", 1))
    with pytest.raises(InputError, match=r"clients\.csv: client '0', column liar: 'perhaps' cannot be used"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def run_of(records: Sequence[RoundRecord], **config: Any) -> RunResult:
    labels = LabelTable.of(np.ones((8, 2)), ("a", "b"))
    return RunResult({"config": config}, {}, labels=labels, rounds=RoundTable.of(records, 2))


def test_liars_are_counted_among_all_picks_so_far() -> None:
    shared: dict[str, Any] = {"entropy": 1.0, "classes_covered": 2, "bytes_up": 0, "bytes_down": 0, "seconds": 0.0}
    records = [
        RoundRecord(round=1, clients=(0, 1), trained=(0,), liars_chosen=2.0, **shared),
        RoundRecord(round=2, clients=(2, 3), trained=(), liars_chosen=0.0, **shared),
        RoundRecord(round=3, clients=(2, 3), trained=(), **shared),  # not known
        RoundRecord(round=4, clients=(4,), trained=(4, 5), liars_chosen=1.0, **shared),  # one was sent away
    ]
    found = liars_among_chosen(run_of(records)).tolist()
    assert found[:2] == [100.0, 50.0]
    assert math.isnan(found[2])
    assert found[3] == 50.0
    assert liars_among_all(run_of([], liars="3")) == 37.5
    assert liars_among_all(run_of([], liars="25%")) == 25.0
    assert liars_among_all(run_of([], liars="101%")) == 100.0  # refused since, but there are pages of such runs
    assert math.isnan(liars_among_all(run_of([])))


def test_whoever_the_audit_suspects_stands_above_the_line() -> None:
    audit = Audit(4, "warn")
    rng = np.random.default_rng(0)
    changes = {}
    for client in range(40):
        counts = np.full(4, 1.0)
        counts[client % 4] = 30.0
        audit.report(client, np.full(4, 10.0) if client < 8 else counts)
        changes[client] = Change(0.5 * (counts / counts.sum() - 0.25) + rng.normal(0, 0.01, 4), 33.0)
    audit.observe(changes, untrained=True)
    entries, suspects = audit.entries(), audit.suspects()
    line = threshold([record(client, entry.score, entry.distance) for client, entry in entries.items()])
    assert line is not None
    assert set(suspects) == set(range(8))
    above = {client for client, entry in entries.items() if entry.distance > line}
    assert set(suspects) <= above < set(entries)
    assert threshold([record(0, 1.0, 0.5)] * 9) is None  # nobody stands out
    assert threshold([record(0, 1.0, 0.5), record(1, 2.0, 0.7)]) is None  # too few to suspect anybody


def record(client: int, suspicion: float | None, distance: float | None, suspected: bool = False) -> ClientRecord:
    return ClientRecord(client, False, 1, 1, suspicion, suspected, distance, 0.5, 0.1, 5.0, 5.0)


def test_of_many_clients_some_are_drawn_and_all_counted(folder: Path) -> None:
    clients = [record(client, 0.0, 0.1, suspected=client in (7, 500)) for client in range(1000)]
    kept = [client.client for client in drawn(clients, 10)]
    assert len(kept) == 12
    assert {0, 7, 500, 999} <= set(kept)
    assert kept == sorted(kept)
    assert drawn(clients, 1000) == clients
    runs = find_runs(folder)
    runs[0].clients = tuple(clients)
    group = group_runs(runs)[0]
    [note] = [note for note in group_payload(group, LEVELS[-1])["thinned"] if "watched" in note]
    assert note == "of the clients that were watched, 100 and the suspects are drawn"
    assert not any("watched" in note for note in group_payload(group, LEVELS[0])["thinned"])
