"""Results belong to the code they were made with: a run of other own code is neither kept nor continued."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fedentopt.errors import InputError
from fedentopt.results.folder import RunFolder
from fedentopt.results.records import RunRecorder, RunStart
from fedentopt.simulation import engine
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.jobs import Job
from fedentopt.simulation.options import RunOptions
from fedentopt.simulation.sweep import run_sweep
from toy_run import CONFIG, drive

OLD, NEW = "0" * 60 + "aaaa", "f" * 60 + "bbbb"


class WithCode:
    """A recorder that is started with the digest of own code, as the engine will start it."""

    def __init__(self, recorder: RunRecorder, digest: str) -> None:
        self._recorder, self._digest = recorder, digest

    def start(self, start: RunStart) -> None:
        self._recorder.start(replace(start, code_digest=self._digest))

    def __getattr__(self, name: str) -> object:
        return getattr(self._recorder, name)


class ToyEngine:
    """Drives toy runs with the code of the day."""

    def __init__(self) -> None:
        self.digest, self.driven = OLD, 0

    def simulate(self, tasks, data, options, progress=None) -> None:
        for task in tasks:
            self.driven += 1
            drive(WithCode(task.recorder, self.digest), task.config)

    def sweep(self, out: Path, *configs: RunConfig, **more: object) -> None:
        options = RunOptions(out=str(out), **more)
        run_sweep([self.job(config) for config in configs or (CONFIG,)], options)

    def job(self, config: RunConfig) -> Job:
        class WithDigest(Job):
            code = self.digest  # type: ignore[assignment]

        return WithDigest(config, config.method)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ToyEngine:
    toy = ToyEngine()
    monkeypatch.setattr(engine, "run_stack", toy.simulate)
    return toy


def refusal(folder: Path) -> str:
    start = f"code: the code behind {CONFIG.method} has changed since {folder} was made (digest 00000000, now ffffffff)"
    return re.escape(f"{start}; bring the old code back, give another folder, or ")


def test_the_digest_is_kept_in_run_json_where_there_is_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG)
    drive(WithCode(folder, OLD))
    assert json.loads((folder.path / "run.json").read_text())["code"] == {"digest": OLD}
    assert (folder.is_of_code(OLD), folder.is_of_code(NEW), folder.is_of_code("")) == (True, False, True)
    plain = RunFolder(tmp_path / "plain", CONFIG)
    drive(plain)
    assert "code" not in json.loads((plain.path / "run.json").read_text())
    assert plain.is_of_code(NEW)  # as far as it is known
    assert RunFolder(tmp_path / "nowhere", CONFIG).is_of_code(NEW)


def test_a_finished_run_of_other_code_is_refused(toy: ToyEngine, tmp_path: Path) -> None:
    toy.sweep(tmp_path)
    toy.sweep(tmp_path)
    assert toy.driven == 1
    toy.digest = NEW
    with pytest.raises(InputError, match=refusal(tmp_path / CONFIG.run_id) + r"repeat the runs \(--no-resume\)"):
        toy.sweep(tmp_path, replace(CONFIG, seed=5), CONFIG)
    assert toy.driven == 1  # before anything else trains
    toy.sweep(tmp_path, resume=False)
    assert RunFolder(tmp_path, CONFIG).is_of_code(NEW)
    toy.sweep(tmp_path)
    assert toy.driven == 2


def test_an_unfinished_run_of_other_code_is_refused(toy: ToyEngine, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG)
    drive(WithCode(folder, OLD), stop_after=5)
    toy.digest = NEW
    with pytest.raises(InputError, match=refusal(folder.path)):
        toy.sweep(tmp_path)
    assert toy.driven == 0
    # The folder refuses it too, whoever drives it.
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    with pytest.raises(InputError, match=refusal(folder.path) + "start the run again with --no-resume"):
        drive(WithCode(RunFolder(tmp_path, CONFIG), NEW))
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before
    toy.digest = OLD
    toy.sweep(tmp_path)
    assert RunFolder(tmp_path, CONFIG).is_finished()


def test_where_runs_cannot_be_repeated_in_place_that_is_no_way_out(toy: ToyEngine, tmp_path: Path) -> None:
    toy.sweep(tmp_path)
    toy.digest = NEW
    with pytest.raises(InputError, match=r"; bring the old code back or give another folder$"):
        run_sweep([toy.job(CONFIG)], RunOptions(out=str(tmp_path)), afresh="another folder")
