"""A deployment of real processes with certificates: a site is killed, the server is killed and restarted."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="NVFlare is not installed")

from fedentopt.nvflare import LabelAwareFedAvg
from fedentopt.nvflare import state as states
from flower_processes import wait_for
from nvflare_processes import SERVER, Deployment

pytestmark = pytest.mark.slow

ROUNDS = 500  # more than are waited for
SETTINGS = {"cohort_size": 2, "buffer_size": 1, "num_rounds": ROUNDS, "train_timeout": 3, "state": "study", "seed": 3}
COHORT = re.compile(r"round (\d+): cohort \[(.*?)\]")


def cohorts(log: str) -> dict[int, list[str]]:
    return {int(number): re.findall(r"'(.*?)'", names) for number, names in COHORT.findall(log)}


def test_a_site_dies_the_server_dies_and_the_study_goes_on(tmp_path: Path) -> None:
    job = tmp_path / "job"
    make = f"jobs.make('study', owner_counts=True, train_args='--seconds 0.3', **{SETTINGS!r})"
    with Deployment(tmp_path, sites=3) as fleet:
        done = subprocess.run(
            [sys.executable, "-c", f"import jobs; {make}.export({str(job)!r})"],
            env=fleet.environment, cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        for site in fleet.sites:
            owner = {"label-epsilon": 1.0, "label-report-file": str(tmp_path / f"{site}.json")}
            counted = {"labels": "site_labels:labels", "num-classes": 4}
            (fleet.kits / site / "local" / "fedentopt.json").write_text(json.dumps(owner | counted))
        fleet.start(SERVER, *fleet.sites)
        folder = fleet.kits / SERVER / "fedentopt" / "study"

        def rounds() -> int:
            found = states.load(folder)
            return 0 if found is None else found.rounds

        first = fleet.submit(job / "study", sites=3)
        wait_for("a round", lambda: rounds() >= 1, 90)
        fleet.kill("site-1")
        wait_for("a round without site-1", lambda: "site site-1 did not train" in fleet.log(first), 60)
        seen = rounds()
        wait_for("another round", lambda: rounds() > seen, 60)
        fleet.kill(SERVER)
        before = cohorts(fleet.log(first))
        saved = tmp_path / "saved"
        shutil.copytree(folder, saved)
        done_rounds = states.load(saved).rounds

        fleet.start(SERVER, "site-1")
        second = fleet.submit(job / "study", sites=3)
        wait_for("rounds after the restart", lambda: rounds() >= done_rounds + 3, 120)
        after = cohorts(fleet.log(second))

    assert min(after) == done_rounds, "the round after the last that was kept"
    if done_rounds in before:
        assert after[done_rounds] == before[done_rounds], "the cohort that was training when the server died"
    kept = states.load(saved)
    again = LabelAwareFedAvg(num_classes=4, **SETTINGS)
    again.members.load_state_dict(kept.meta["members"], {})
    again.failing.load_state_dict(states.read_pauses(kept.meta["failing"]))
    free = [site for site in fleet.sites if again.failing.over(site, done_rounds)]
    assert after[done_rounds] == list(again.members.select(free).clients)

    now = states.load(folder)
    reports = {entry["site"]: entry for entry in now.meta["members"]["sites"]}
    assert reports == {entry["site"]: entry for entry in kept.meta["members"]["sites"]}, "nobody was asked twice"
    for site in fleet.sites:
        draws = json.loads((tmp_path / f"{site}.json").read_text())["clients"][""]
        assert [draw["counts"] for draw in draws] == [reports[site]["counts"]], "one draw, and it is what was sent"
    model = now.arrays["model"]["numpy_key"]
    assert np.isfinite(model).all()
    assert model.min() >= now.rounds, "every round had a usable reply, which moved the model by 1 or more"
