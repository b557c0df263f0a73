"""What leaves a site: the owner's file decides, the answer is drawn once, a refusal says nothing, weights are noisy."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="NVFlare is not installed")

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import FilterKey, FLContextKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace
from nvflare.private.fed.app.fl_conf import create_privacy_manager

from fedentopt.errors import InputError
from fedentopt.nvflare import ExampleWeight, LabelCounts
from fedentopt.nvflare.report import read_report, write_refusal

MINE = f"{__name__}:labels_of_mine"
HELD = [0, 0, 0, 1, 1, 3]


def labels_of_mine(site: str) -> list[int]:
    assert site == "oslo"
    return list(HELD)


def persons(site: str) -> list[str]:
    return ["ann", "ann", "ann", "ann", "bob", "bob"]


def labels_of_the_job(site: str) -> list[int]:
    return [2] * 100


def failing(site: str) -> list[int]:
    raise RuntimeError(f"cannot read the labels {HELD}")


@pytest.fixture(autouse=True)
def ledger_in_the_tests_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def site(folder: Path, owner: dict[str, Any] | str | None, *, simulated: bool = False, byoc: bool = False) -> FLContext:
    """The context of a task at a site whose owner wrote this file; `byoc`: of a job that may bring code."""
    for name in ("startup", "local"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    if owner is not None:
        (folder / "local" / "fedentopt.json").write_text(owner if isinstance(owner, str) else json.dumps(owner))
    workspace = Workspace(str(folder), "oslo")
    engine = SimpleNamespace(get_workspace=lambda: workspace, fire_event=lambda event, fl_ctx: None)
    fl_ctx = FLContextManager(engine=engine, identity_name="oslo", job_id="job").new_context()
    fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace, private=True)
    fl_ctx.set_prop(FLContextKey.SIMULATE_MODE, simulated, private=True)
    fl_ctx.set_prop(FLContextKey.JOB_META, {"byoc": byoc}, private=True)
    return fl_ctx


def ask(fl_ctx: FLContext, labels: str | None = None, num_classes: int | None = None) -> Shareable:
    return LabelCounts(labels, num_classes).execute("label_counts", Shareable(), fl_ctx, Signal())


def counts_of(reply: Shareable) -> list[float]:
    return [float(count) for count in read_report("oslo", reply, 4).counts]


def test_true_counts_leave_by_the_owners_word_only(tmp_path: Path) -> None:
    owner = {"label-epsilon": "none", "labels": MINE, "num-classes": 4}
    assert counts_of(ask(site(tmp_path, owner))) == [3, 2, 0, 1]


def test_the_noisy_answer_is_drawn_once_whatever_is_asked(tmp_path: Path) -> None:
    owner = {"label-epsilon": 0.5, "label-report-file": str(tmp_path / "kept.json"), "labels": MINE, "num-classes": 4}
    fl_ctx = site(tmp_path / "site", owner)
    first = from_shareable(ask(fl_ctx)).data
    assert first["epsilon"] == 0.5
    for number in range(100):  # a server that sends another job each time
        later = from_shareable(ask(fl_ctx, f"{__name__}:labels_of_the_job", 4 + number)).data
        assert later == first
    (tmp_path / "kept.json").unlink()
    assert from_shareable(ask(fl_ctx)).data == first, "the ledger has it too"


def test_what_is_counted_is_the_owners_where_the_owner_says_it(tmp_path: Path) -> None:
    fl_ctx = site(tmp_path, {"label-epsilon": "none", "labels": MINE, "num-classes": 4})
    assert counts_of(ask(fl_ctx, f"{__name__}:labels_of_the_job", 9)) == [3, 2, 0, 1]
    other = site(tmp_path / "other", {"label-epsilon": "none"}, byoc=True)
    assert counts_of(ask(other, f"{__name__}:labels_of_the_job", 4)) == [0, 0, 100, 0]


def test_a_job_without_the_right_to_bring_code_names_no_code_beyond_the_sites_list(tmp_path: Path) -> None:
    job = f"{__name__}:labels_of_the_job", 4
    fl_ctx = site(tmp_path, {"label-epsilon": "none"})
    assert dict(ask(fl_ctx, *job)) == dict(write_refusal())
    assert "is not in allow_list" in (tmp_path / "label-report.log").read_text()
    allowed = {"class_allow_list": [f"{__name__}.labels_of_the_job"]}
    (tmp_path / "local" / "resources.json").write_text(json.dumps(allowed))
    assert counts_of(ask(fl_ctx, *job)) == [0, 0, 100, 0]
    assert dict(ask(fl_ctx, f"{__name__}:labels_of_mine", 4)) == dict(write_refusal())
    assert dict(ask(fl_ctx, "os:getenv", 4)) == dict(write_refusal())


def test_persons_are_clipped(tmp_path: Path) -> None:
    owner = {"label-epsilon": "none", "labels": MINE, "num-classes": 4}
    owner |= {"persons": f"{__name__}:persons", "samples-per-person": 1}
    assert sum(counts_of(ask(site(tmp_path, owner)))) == 2, "one sample of ann, one of bob"


REFUSED: dict[str, dict[str, Any] | str | None] = {
    "no file": None,
    "no epsilon": {"labels": MINE, "num-classes": 4},
    "not JSON": "{",
    "a list": "[1]",
    "bad epsilon": {"label-epsilon": -1, "labels": MINE, "num-classes": 4},
    "noise without a file": {"label-epsilon": 1.0, "labels": MINE, "num-classes": 4},
    "classes without labels": {"label-epsilon": "none", "num-classes": 4},
    "labels without classes": {"label-epsilon": "none", "labels": MINE},
    "too few classes": {"label-epsilon": "none", "labels": MINE, "num-classes": 2},
    "no such function": {"label-epsilon": "none", "labels": "nowhere:labels", "num-classes": 4},
    "labels that raise": {"label-epsilon": "none", "labels": f"{__name__}:failing", "num-classes": 4},
    "misspelt": {"label-epsilon": "none", "labels": MINE, "num-classes": 4, "person": "x:y", "samples_per_person": 1},
    "persons without a bound": {"label-epsilon": "none", "labels": MINE, "num-classes": 4, "persons": "x:y"},
}


@pytest.mark.parametrize("why", REFUSED)
def test_every_refusal_reads_alike_and_the_owner_is_told_why(
    tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FEDENTOPT_LABEL_EPSILON", "none")  # a real site does not read it
    job = (None, None) if why.endswith(("labels", "classes")) else (MINE, 4)
    reply = ask(site(tmp_path, REFUSED[why]), *job)
    assert dict(reply) == dict(write_refusal())
    with pytest.raises(InputError, match="site oslo: refused; its log says why"):
        read_report("oslo", reply, 4)
    told = tmp_path / "label-report.log"
    assert "Error" in told.read_text()
    assert stat.S_IMODE(os.stat(told).st_mode) == 0o600
    assert str(HELD) not in caplog.text, "NVFlare streams this log to the server"
    assert "Traceback" not in caplog.text


def test_a_simulated_site_takes_its_epsilon_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDENTOPT_LABEL_EPSILON", "2.0")
    fl_ctx = site(tmp_path, None, simulated=True)
    first, again = (from_shareable(ask(fl_ctx, MINE, 4)).data for _ in range(2))
    assert first == again
    assert first["epsilon"] == 2.0
    assert (tmp_path / "label-report.json").is_file()


@pytest.mark.parametrize(
    ("owner", "steps"),
    [
        ({"label-epsilon": "none"}, 6),
        ({"label-epsilon": "none", "num-examples": "uniform"}, 1),
        ({"label-epsilon": 1.0, "num-examples": "exact"}, 6),
        ({"label-epsilon": 1.0, "num-examples": "uniform"}, 1),
        ({"label-epsilon": 1.0}, "noisy total"),
        ({}, 1),
    ],
)
def test_training_replies_weigh_what_the_owner_allows(tmp_path: Path, owner: dict[str, Any], steps: Any) -> None:
    kept = {"label-report-file": str(tmp_path / "kept.json"), "labels": MINE, "num-classes": 4}
    fl_ctx = site(tmp_path / "site", kept | owner)
    if steps == "noisy total":
        steps = max(1, sum(from_shareable(ask(fl_ctx)).data["label_counts"]))
    reply = DXO(DataKind.WEIGHTS, data={"w": np.ones(2)}, meta={"NUM_STEPS_CURRENT_ROUND": 6}).to_shareable()
    sent = from_shareable(ExampleWeight().process(reply, fl_ctx))
    assert sent.meta["NUM_STEPS_CURRENT_ROUND"] == steps
    assert np.array_equal(sent.data["w"], np.ones(2))


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF, DataKind.METRICS])
@pytest.mark.parametrize("data", [{"w": 1.0}, {}])
def test_no_kind_of_training_reply_tells_the_number_of_samples(tmp_path: Path, kind: str, data: dict[str, Any]) -> None:
    reply = DXO(kind, data=data, meta={"NUM_STEPS_CURRENT_ROUND": 6}).to_shareable()
    sent = ExampleWeight().process(reply, site(tmp_path, {"label-epsilon": 1.0, "num-examples": "uniform"}))
    assert from_shareable(sent).meta["NUM_STEPS_CURRENT_ROUND"] == 1
    assert from_shareable(sent).data == data


def test_the_policy_that_the_docs_give_filters_replies_of_jobs_without_the_filter(tmp_path: Path) -> None:
    fl_ctx = site(tmp_path, {"label-epsilon": 1.0, "num-examples": "uniform"})
    guide = (Path(__file__).parents[2] / "docs" / "nvflare.md").read_text()
    (policy,) = (block.split("```")[0] for block in guide.split("```json\n")[1:] if "task_result_filters" in block)
    (tmp_path / "local" / "privacy.json").write_text(policy)
    scope = create_privacy_manager(fl_ctx.get_workspace(), names_only=False).get_scope(None)
    (own,) = scope.task_result_filters[FilterKey.OUT]
    reply = DXO(DataKind.WEIGHTS, data={"w": np.ones(2)}, meta={"NUM_STEPS_CURRENT_ROUND": 6}).to_shareable()
    assert from_shareable(own.process(reply, fl_ctx)).meta["NUM_STEPS_CURRENT_ROUND"] == 1


def test_the_filter_leaves_label_reports_alone(tmp_path: Path) -> None:
    reply = ask(site(tmp_path, {"label-epsilon": "none", "labels": MINE, "num-classes": 4}))
    filtered = ExampleWeight().process(reply, site(tmp_path, None))
    assert counts_of(filtered) == [3, 2, 0, 1]
