"""A recipe makes a job that NVFlare's own parts can be built from again; the simulator runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="NVFlare is not installed")

from fedentopt import EntropySelector
from fedentopt.errors import InputError
from fedentopt.nvflare import LabelAwareFedAvg, LabelAwareRecipe, LabelAwareScaffold, NumpyFedEntOptRecipe
from fedentopt.server.local_training import LocalTraining
from nvflare_job import site_labels
from nvflare_processes import SCRIPTS, simulate

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "nvflare"


def recipe(**settings: Any) -> NumpyFedEntOptRecipe:
    base = {"name": "job", "model": [0.0], "min_clients": 2, "num_rounds": 5, "train_script": str(SCRIPTS / "train.py")}
    return NumpyFedEntOptRecipe(**base | {"cohort_size": 3, "num_classes": 4} | settings)


def exported(folder: Path, made: LabelAwareRecipe) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    made.export(str(folder))
    app = folder / "job" / "app"
    files = [str(path.relative_to(app / "custom")) for path in (app / "custom").rglob("*.py")]
    configs = (json.loads((app / "config" / f"config_fed_{role}.json").read_text()) for role in ("server", "client"))
    return (*configs, files)


def test_a_job_carries_its_settings_and_not_the_package(tmp_path: Path) -> None:
    settings = {
        "buffer_size": 5,
        "seed": 9,
        "state": "study",
        "train_timeout": 60,
        "exclude": ["site-9"],
        "target": [1, 2, 3, 4],
    }
    server, client, files = exported(tmp_path, recipe(labels="site_labels:labels", stop_cond="loss < 0.1", **settings))
    controller = server["workflows"][0]
    assert controller["path"] == "fedentopt.nvflare.controller.LabelAwareFedAvg"
    again = LabelAwareFedAvg(**controller["args"])
    for name, value in (settings | {"cohort_size": 3, "num_classes": 4, "num_rounds": 5, "num_clients": 3}).items():
        assert getattr(again, name) == value
    assert again.stop_cond == "loss < 0.1"
    assert again._ignore_result_error is True
    tasks = {tuple(each["tasks"]): each["executor"] for each in client["executors"]}
    assert tasks[("label_counts",)]["path"] == "fedentopt.nvflare.site.LabelCounts"
    assert tasks[("label_counts",)]["args"] == {"labels": "site_labels:labels", "num_classes": 4}
    filters = client["task_result_filters"]
    assert filters[0]["tasks"] == ["train"]
    assert filters[0]["filters"][0]["path"] == "fedentopt.nvflare.site.ExampleWeight"
    assert [Path(file).name for file in files] == ["train.py"], (
        "fedentopt is installed where the job runs, and not sent along"
    )
    assert json.loads((tmp_path / "job" / "meta.json").read_text())["min_clients"] == 2, "not the size of a cohort"


def test_scaffold_in_the_place_of_fedavg(tmp_path: Path) -> None:
    local = {"lr": 0.1, "batch_size": 32}
    server, _, _ = exported(tmp_path, recipe(scaffold=True, selector="divfl", seed=4, local=local))
    controller = server["workflows"][0]
    assert controller["path"] == "fedentopt.nvflare.controller.LabelAwareScaffold"
    again = LabelAwareScaffold(**controller["args"])
    assert again.members.selector.name == "divfl"
    assert again.steps == LocalTraining(lr=0.1, batch_size=32)
    assert again.num_rounds == 5
    with pytest.raises(InputError, match=r"stop_cond: 'loss < 0\.1' goes with FedAvg only"):
        recipe(scaffold=True, stop_cond="loss < 0.1")


def test_sites_with_settings_of_their_own(tmp_path: Path) -> None:
    made = recipe(labels="site_labels:labels")
    made.set_per_site_config({"site-1": {"train_args": "--seconds 1"}, "site-2": {}})
    made.export(str(tmp_path))
    for name in ("site-1", "site-2"):
        config = json.loads((tmp_path / "job" / f"app_{name}" / "config" / "config_fed_client.json").read_text())
        assert [each["tasks"] for each in config["executors"]] == [["*"], ["label_counts"]]


def test_a_recipe_of_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe

    class TorchRecipe(LabelAwareRecipe, FedAvgRecipe):
        pass

    model = {"class_path": "torch.nn.Linear", "args": {"in_features": 2, "out_features": 4}}
    script = str(SCRIPTS / "train.py")
    made = TorchRecipe(name="job", model=model, min_clients=2, train_script=script, cohort_size=2, num_classes=4)
    server, _, _ = exported(tmp_path, made)
    assert LabelAwareFedAvg(**server["workflows"][0]["args"]).cohort_size == 2


@pytest.mark.parametrize("labels", ["site_labels.labels", 5, ""])
def test_labels_that_no_site_could_find_are_refused_when_the_job_is_made(labels: Any) -> None:
    with pytest.raises(InputError, match=f"labels: {labels!r} is not accepted; accepted: module:function"):
        recipe(labels=labels)


@pytest.mark.slow
def test_scaffold_in_the_simulator_with_a_site_that_answers_nonsense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDENTOPT_LABEL_EPSILON", "none")
    settings = {"cohort_size": 2, "buffer_size": 1, "num_rounds": 4, "seed": 5, "scaffold": True, "train_timeout": 60}
    settings |= {"train_args": "--liar site-2", "query_timeout": 60}
    log = simulate(tmp_path, SCRIPTS / "jobs.py", "nonsense", "3", json.dumps(settings))
    picked = [re.findall(r"'(.*?)'", names) for names in re.findall(r"round \d+: cohort \[(.*?)\]", log)]
    selector = EntropySelector(2, 1, seed=5)
    selector.register({f"site-{number}": site_labels.counts(f"site-{number}") for number in (1, 2, 3)})
    paused: dict[str, int] = {}
    for number, cohort in enumerate(picked):
        available = [f"site-{k}" for k in (1, 2, 3) if paused.get(f"site-{k}", 0) <= number]
        assert cohort == list(selector.select(available).clients)
        if "site-2" in cohort:
            assert f"round {number}: site site-2 did not train: parameter 'numpy_key' holds numbers" in log
            paused["site-2"] = number + 2
    assert len(picked) == 4
    assert paused, "the test is about a site that is picked"
    assert "Finished Scaffold" in log


@pytest.mark.slow
def test_the_example_learns_digits_in_the_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setenv("FEDENTOPT_LABEL_EPSILON", "none")
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import digits  # type: ignore[import-not-found,unused-ignore]

    log = simulate(tmp_path, EXAMPLE / "job.py", "--rounds", "3", "--sites", "3")
    picked = [re.findall(r"'(.*?)'", names) for names in re.findall(r"round \d+: cohort \[(.*?)\]", log)]
    selector = EntropySelector(2, 1)  # a buffer of two would leave too few of three sites
    selector.register({name: np.bincount(digits.labels(name), minlength=10) for name in ("site-1", "site-2", "site-3")})
    assert picked == [list(selector.select().clients) for _ in range(3)]
    found = re.search(r"accuracy on all digits: ([\d.]+) %", log)
    assert found is not None
    assert float(found[1]) > 30
