"""Results belong to the data they were made from, not to a file's name; what is refused leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import toy
from command_line import Said, commander
from configs import run_config
from fedentopt.errors import InputError
from fedentopt.report.grouping import group_runs
from fedentopt.results.folder import RunFolder
from fedentopt.results.reading import find_runs
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.options import RunOptions
from fedentopt.simulation.sweep import run_sweep


def options(out: Path, cache: Path, **more: object) -> RunOptions:
    settings = {"out": str(out), "data_dir": str(cache), "device": "cpu", "workers": 1, "checkpoint_every": 1}
    return RunOptions(**(settings | more))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    return commander(monkeypatch, capsys)


def write(path: Path, seed: int) -> None:
    """Images of this seed with labels that are always the same."""
    rng = np.random.default_rng(seed)
    labels = {"y_train": np.arange(60) % 3, "y_test": np.arange(30) % 3}
    images = {f"x_{s}": rng.integers(0, 256, (n, 8, 8, 3), dtype=np.uint8) for s, n in (("train", 60), ("test", 30))}
    np.savez(path, **images, **labels)


def config(path: Path, **settings: object) -> RunConfig:
    base = {"dataset": str(path), "partition": "iid", "clients": 5, "cohort": "2", "rounds": 2, "epochs": 1}
    return run_config(**(base | {"model": "toy:linear", "image_size": 8} | settings))


def test_a_digest_tells_data_apart_and_itself_again() -> None:
    same, other = toy.images(seed=1), toy.images(seed=2)
    assert toy.images(seed=1).digest == same.digest != other.digest


def test_data_is_the_same_on_another_kind_of_processor_and_for_runs_of_versions_before(tmp_path: Path) -> None:
    """Statistics of pixels are sums that differ in the last bit with the order in which a processor adds."""
    data, out = toy.images(), tmp_path / "out"
    elsewhere = dataclasses.replace(data, std=tuple(np.nextafter(data.std, 1.0).tolist()))
    other = dataclasses.replace(data, x_train=255 - data.x_train)
    configs = [config(tmp_path / "mine.npz")]
    (run,) = run_sweep(configs, options(out, tmp_path), data=data)
    before = "9f05258019b24fa0"  # of `data`, as version 0.2.0 wrote it
    for noted, same, changed in ((None, [data, elsewhere], [other]), (before, [data], [other, elsewhere])):
        if noted is not None:
            file = run.path / "run.json"
            about = json.loads(file.read_text())
            about["dataset"]["digest"] = noted
            file.write_text(json.dumps(about))
        for given in same:
            assert run_sweep(configs, options(out, tmp_path), data=given)[0].summary == run.summary
        for given in changed:
            with pytest.raises(InputError, match="is not what .* was made from"):  # noqa: RUF043
                run_sweep(configs, options(out, tmp_path), data=given)


def test_finished_runs_of_a_file_that_has_changed_are_refused(tmp_path: Path) -> None:
    file, out, cache = tmp_path / "mine.npz", tmp_path / "out", tmp_path / "cache"
    write(file, 0)
    (first,) = run_sweep([config(file)], options(out, cache))
    (again,) = run_sweep([config(file)], options(out, cache))
    assert again.summary == first.summary
    write(file, 1)
    with pytest.raises(InputError, match=r"is not what .* was made from; bring the old data back"):
        run_sweep([config(file), config(file, selector="fedentopt", buffer="0")], options(out, cache))
    assert [run.config for run in find_runs(out)] == [config(file).to_dict()]
    (repeated,) = run_sweep([config(file)], options(out, cache, resume=False))
    assert repeated.about["dataset"]["digest"] != first.about["dataset"]["digest"]
    file.unlink()
    (kept,) = run_sweep([config(file)], options(out, cache))  # without its data a finished run stands
    assert kept.summary == repeated.summary


def test_a_run_does_not_go_on_with_other_images_of_the_same_labels(tmp_path: Path) -> None:
    file, out, cache = tmp_path / "mine.npz", tmp_path / "out", tmp_path / "cache"
    write(file, 0)
    stops = iter([False, True])

    class Stopping(RunFolder):
        def save(self, checkpoint: object) -> None:
            super().save(checkpoint)  # type: ignore[arg-type]
            if next(stops):
                raise KeyboardInterrupt

    cfg = config(file, rounds=4)
    with pytest.raises(KeyboardInterrupt):
        run_sweep([cfg], options(out, cache), recorder=lambda folder: Stopping(out, folder.config))
    write(file, 1)
    with pytest.raises(InputError, match="is not what .* was made from"):  # noqa: RUF043
        run_sweep([cfg], options(out, cache))
    write(file, 0)
    (run,) = run_sweep([cfg], options(out, cache))
    assert len(run.records) == 4


def test_runs_from_other_start_weights_under_one_name_are_refused(tmp_path: Path) -> None:
    file, data, out = tmp_path / "start.safetensors", toy.images(), tmp_path / "out"

    def draw(seed: int) -> None:
        torch.manual_seed(seed)
        save_file(toy.linear(3).state_dict(), file)

    draw(0)
    start = config(tmp_path / "mine.npz", weights=str(file))
    (first,) = run_sweep([start], options(out, tmp_path), data=data)
    later = start.replace(seed=1)
    with pytest.raises(KeyboardInterrupt):
        run_sweep([later], options(out, tmp_path), data=data, progress=lambda event: signal.raise_signal(signal.SIGINT))
    draw(1)
    for run in (start, later):
        with pytest.raises(InputError, match=r"^weights: the file is not the one that .* was made from; bring the old"):
            run_sweep([run], options(out, tmp_path), data=data)
    (other,) = run_sweep([start.replace(seed=2)], options(out, tmp_path), data=data)
    labels = [method.label for group in group_runs([first, other]) for method in group.methods]
    assert labels == sorted(f"fedavg (weights {run.about['weights']['digest'][:8]})" for run in (first, other))
    (repeated,) = run_sweep([start], options(out, tmp_path, resume=False), data=data)
    assert repeated.summary["accuracy"] != first.summary["accuracy"]
    file.unlink()  # finished runs stand
    assert run_sweep([start], options(out, tmp_path), data=data)[0].summary == repeated.summary


def test_a_refused_method_leaves_no_other_run_begun(command: Callable[..., Said], tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = command(
        "compare", "--method", "fedavg", "--method", "fedconcat", "--clients", 20, "--cohort", 2, "--rounds", 12,
        "--epochs", 1, "--seeds", 0, "--device", "cpu", "--out", out,
    )  # fmt: skip
    assert (said.code, "do not pay for fedconcat" in said.err.replace("\n", " ")) == (2, True)
    assert not list(tmp_path.glob("**/run.json"))


def test_a_full_disk_is_said_in_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch
    import torch
    from safetensors import SafetensorError

    from fedentopt.results.checkpoint import save_tensors

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(InputError, match=r"cannot write .*model: I/O error: No space left on device"):
        save_tensors(tmp_path / "model", {"w": torch.zeros(2)}, {})
    assert not list(tmp_path.iterdir())


def test_a_listed_fetch_goes_to_the_folder_that_was_listed(command: Callable[..., Said], tmp_path: Path) -> None:
    said = command("data", "list", "--data-dir", tmp_path, "--json")
    assert f"fedentopt data fetch cifar10 --data-dir {tmp_path}" in said.out


def test_the_package_can_be_run_as_a_module() -> None:
    said = subprocess.run([sys.executable, "-m", "fedentopt", "--version"], capture_output=True, text=True, check=True)
    assert "fedentopt" in said.stdout
