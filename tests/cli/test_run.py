"""`fedentopt run`, whole commands on the embedded digits."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress

from command_line import Said, commander
from configs import run_config
from fedentopt.algorithms import ALGORITHMS
from fedentopt.cli import run as run_command
from fedentopt.cli.settings import gather
from fedentopt.errors import InputError
from fedentopt.simulation.command import command_of
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.engine import RoundEvent
from fedentopt.simulation.progress import RoundTally, TimeLeftColumn, progress_bar

SMALL = shlex.split("--clients 20 --cohort 2 --buffer 3 --rounds 3 --epochs 1 --device cpu --workers 1")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    return commander(monkeypatch, capsys)


def rows(folder: Path) -> list[dict[str, str]]:
    """Rounds of a run, without the seconds they took."""
    with (folder / "rounds.csv").open(newline="") as file:
        return [{name: cell for name, cell in row.items() if name != "seconds"} for row in csv.DictReader(file)]


def settings_of(words: list[str]) -> RunConfig:
    """The config that `fedentopt run WORDS` would run."""
    import typer

    seen: list[dict] = []
    app = typer.Typer()
    options = run_command.setting_options(run_command.run_settings(), {})
    app.command()(run_command.command(seen.append, [*options, *run_command.shared_options()]))
    app(words, standalone_mode=False)
    request = gather(seen[0], settings=run_command.run_settings(), defaults={})
    return run_command.run_jobs(request)[0].config


def test_a_run_from_options_to_files_and_table(command: Callable[..., Said], tmp_path: Path) -> None:
    said = command(
        "run", *SMALL, "--selector", "fedentopt", "--epsilon", 0.5, "--dropout", 0.3, "--stragglers", 0.5,
        "--seed", 5, "--out", tmp_path, "--target", 5, "--target", 99.5,
    )  # fmt: skip
    assert said.code == 0, said.err
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert str(folder) in said.out
    assert "fedentopt-dp" in (tmp_path / "report.html").read_text()
    assert said.out.rstrip().endswith(str(tmp_path / "report.html"))
    assert {path.name for path in folder.iterdir()} == {
        "run.json", "rounds.csv", "label_counts.csv", "reported_counts.csv", "summary.json", "model.safetensors",
    }  # fmt: skip
    about = json.loads((folder / "run.json").read_text())
    assert about["config"]["seed"] == 5
    assert about["config"]["stragglers"] == 0.5
    assert about["device"] == "cpu"
    assert [row["round"] for row in rows(folder)] == ["1", "2", "3"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rounds_to"]["99.5"] is None
    assert "fedentopt-dp" in said.out
    assert f"{summary['accuracy']:.1f}" in said.out
    assert "to 99.5 %" in said.out
    # The recorded command makes the same run.
    assert settings_of(shlex.split(about["command"])[2:]).run_id == folder.name


def test_a_finished_run_is_not_repeated_and_its_figures_stay(command: Callable[..., Said], tmp_path: Path) -> None:
    first = command("run", *SMALL, "--out", tmp_path, "--json", "--no-page")
    (folder,) = tmp_path.iterdir()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    second = command("run", *SMALL, "--out", tmp_path, "--json", "--target", "7.5")
    assert "1 of 1 runs are finished already" in second.err
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    one, two = (json.loads(said.out)["runs"][0] for said in (first, second))
    assert "7.5" in two["rounds_to"]
    del two["rounds_to"]["7.5"]
    assert one == two
    again = command("run", *SMALL, "--out", tmp_path, "--no-resume")
    assert again.code == 0
    assert "finished already" not in again.err
    assert (folder / "summary.json").stat().st_mtime_ns != before["summary.json"]


def test_several_seeds_and_json(command: Callable[..., Said], tmp_path: Path) -> None:
    said = command("run", *SMALL, "--seeds", "0,3-4", "--out", tmp_path, "--json", "--target", 1)
    assert said.code == 0, said.err
    printed = json.loads(said.out)
    assert Path(printed["page"]).stat().st_size > 1000
    assert [run["seed"] for run in printed["runs"]] == [0, 3, 4]
    assert all((Path(run["path"]) / "summary.json").exists() for run in printed["runs"])
    (method,) = printed["methods"]
    accuracies = [run["accuracy"] for run in printed["runs"]]
    mean = sum(accuracies) / 3
    std = (sum((value - mean) ** 2 for value in accuracies) / 2) ** 0.5
    assert method["accuracy"] == {"mean": pytest.approx(mean), "std": pytest.approx(std)}
    assert method["rounds_to"]["1"]["reached"] == 3


def test_a_table_too_wide_for_eighty_columns_keeps_its_names_and_numbers_whole(
    command: Callable[..., Said], tmp_path: Path
) -> None:
    targets = [word for target in (95, 96, 97, 98, 99) for word in ("--target", target)]
    words = ["--algorithm", "scaffold", "--selector", "fedentopt", "--epsilon", 1, "--seeds", "0,1", "--no-page"]
    said = command("run", *SMALL, *words, *targets, "--out", tmp_path, columns=80)
    assert said.code == 0, said.err
    (line,) = [line for line in said.out.splitlines() if line.startswith("scaffold+fedentopt-dp ")]
    assert line.count("never") == 5
    assert line.count("±") == 2
    assert line.rstrip().endswith("MB")


def test_what_a_person_should_know_about_the_data_is_said(command: Callable[..., Said], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (60, 16, 16), dtype=np.uint8), np.arange(60) % 3
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x[y < 2], y_test=y[y < 2])
    own = ["--dataset", tmp_path / "own.npz", "--data-dir", tmp_path, "--partition", "iid", "--out", tmp_path / "out"]
    said = command("run", *SMALL, *own, "--clients", 4, "--no-page")
    assert said.code == 0, said.err
    assert f"{tmp_path / 'own.npz'}: no test images of 2" in said.err


def test_alone_and_in_a_sweep_are_the_same_run(command: Callable[..., Said], tmp_path: Path) -> None:
    command("run", *SMALL, "--seeds", "0,1", "--out", tmp_path / "sweep")
    command("run", *SMALL, "--seed", "1", "--out", tmp_path / "alone", "--no-page")
    (alone,) = (tmp_path / "alone").iterdir()
    assert rows(alone) == rows(tmp_path / "sweep" / alone.name)
    model = (alone / "model.safetensors").read_bytes()
    assert model == (tmp_path / "sweep" / alone.name / "model.safetensors").read_bytes()


LONG = shlex.split(
    "--clients 20 --cohort 2 --rounds 7 --epochs 1 --algorithm scaffold --dropout 0.2 --device cpu --workers 1 "
    "--checkpoint-every 1 --seed 2"
)
STOPPING = """
import os, signal, sys
from fedentopt.cli import main
from fedentopt.results.folder import RunFolder
from fedentopt.results.vector_files import VectorFiles
number, in_the_middle = int(os.environ["STOP_WITH"]), os.environ["STOP_AT"] == "middle"
save, append = RunFolder.save, VectorFiles._append
def save_and_stop(self, checkpoint):
    save(self, checkpoint)
    if checkpoint.round == 3:
        os.kill(os.getpid(), number)
def append_and_stop(stream, file, *row):
    append(stream, file, *row)
    if in_the_middle and file.name == "vectors-000003.f32":
        stream.flush()
        os.kill(os.getpid(), number)
RunFolder.save, VectorFiles._append = save_and_stop, staticmethod(append_and_stop)
main()
"""


def stopped(out: Path, signal_number: int, at: str) -> tuple[int, str]:
    """Run as a process of its own, to which the signal comes when it has saved round 3, or is about to."""
    words = [sys.executable, "-c", STOPPING, "run", *LONG, "--out", str(out)]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "STOP_WITH": str(int(signal_number)), "STOP_AT": at}
    done = subprocess.run(words, env=settings, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def straight_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the run that is never stopped, made by the first test that needs it."""
    return tmp_path_factory.mktemp("straight") / "out"


@pytest.mark.parametrize(
    ("signal_number", "at", "next_round"),
    [(signal.SIGKILL, "end", 4), (signal.SIGKILL, "middle", 3), (signal.SIGINT, "end", 5), (signal.SIGTERM, "end", 5)],
)
def test_stopped_in_the_middle_and_continued_is_the_straight_run(
    command: Callable[..., Said], tmp_path: Path, straight_out: Path, signal_number: int, at: str, next_round: int
) -> None:
    code, err = stopped(tmp_path / "stopped", signal_number, at)
    (folder,) = (tmp_path / "stopped").iterdir()
    assert (folder / "checkpoint.safetensors").exists()
    assert (folder / "vectors-000003.f32.part").exists() == (at == "middle")
    assert not (folder / "summary.json").exists()
    if signal_number != signal.SIGKILL:
        assert code == 130
        assert err.count("stopping after this round") == 1
        assert "the same command continues there" in err
        assert "Traceback" not in err
    else:
        assert code == -signal.SIGKILL
    assert command("run", *LONG, "--out", tmp_path / "stopped").code == 0
    (resumed,) = json.loads((folder / "run.json").read_text())["resumed"]
    assert resumed["round"] == next_round  # Ctrl-C and SIGTERM let the round in work come to its end
    assert not list(folder.glob("vectors-*"))
    if not straight_out.exists():
        assert command("run", *LONG, "--out", straight_out, "--no-page").code == 0
    (straight,) = straight_out.iterdir()
    assert rows(folder) == rows(straight)
    assert (folder / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()


def test_a_file_gives_settings_and_options_win(command: Callable[..., Said], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'partition = "classes:2"\nclients = 12\ncohort = 2\nbuffer = "2"\nrounds = 9\nepochs = 1\nlr = 1\n'
        f'epsilon = 0.1\nselector = "kl"\nseeds = [1, 2]\ndevice = "cpu"\nworkers = 1\nout = "{tmp_path}/out"\n'
        "target = 20\n"
    )
    said = command("run", "--config", file, "--rounds", 2, "--seed", 7, "--lr", 0.05, "--epsilon", "none", "--json")
    assert said.code == 0, said.err
    (run,) = json.loads(said.out)["runs"]
    config = json.loads((Path(run["path"]) / "run.json").read_text())["config"]
    assert RunConfig.from_dict(config) == run_config(  # flip: digits are not mirrored
        partition="classes:2",
        clients=12,
        cohort="2",
        rounds=2,
        epochs=1,
        lr=0.05,
        flip=0.0,
        selector="kl",
        seed=7,
    )
    assert run["path"].startswith(f"{tmp_path}/out/")
    assert "--buffer: kl has no such setting, so 2 is not used" in said.err


def test_one_run_has_one_id_however_it_was_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('lr = 1\ncohort = 10\nalgorithm = "fedprox"\nmu = 0\n')
    table = tmp_path / "table.toml"
    table.write_text('lr = 1\ncohort = 10\nalgorithm = "fedprox"\n[settings]\nmu = 0\n')
    words = ["--lr", "1", "--cohort", "10", "--algorithm", "fedprox"]
    asked = [["--config", str(file)], ["--config", str(table)], [*words, "--mu", "0"], [*words, "--set", "mu=0"]]
    expected = run_config(lr=1.0, cohort="10", algorithm="fedprox", mu=0.0, rounds=30, flip=0.0).run_id
    assert [settings_of(one).run_id for one in asked] == [expected] * 4


def test_every_setting_is_an_option_and_survives_the_trip() -> None:
    config = run_config(
        dataset="my data.npz", fine_labels=True, image_size=40, partition="iid", min_samples=0, clients=11,
        model="a.b:c", weights="w.safetensors", algorithm="fedrs", selector="fedentopt", cohort="3", buffer="20%",
        epsilon=1e-05, dropout=0.25, stragglers=0.1, rounds=12, epochs=2, batch_size=7, lr=0.3, lr_decay=0.5,
        weight_decay=0.0, momentum=0.0, fedrs_alpha=0.1, fedrs_soft=True, jitter=0.0, flip=0.0, grayscale=1.0,
        evaluate_every=4, precision="bf16", seed=12345, averaging="samples", speed_spread=0.5,
    )  # fmt: skip
    others = {"mu", "scaffold_variant", "fedlc_tau", "clusters", "concat_share", "concat_max_rounds"}
    assert config.to_dict().keys() - config.changed().keys() == others
    assert settings_of(shlex.split(command_of(config))[2:]) == config


def test_settings_of_own_methods_survive_the_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_settings.py").write_text(
        "from fedentopt.algorithms import Algorithm, setting\n\n"
        "class Own(Algorithm):\n"
        "    often: int | None = setting(5)\n"
        "    never: int | None = setting(None)\n"
        "    word: str = setting('a')\n"
        "    steps: tuple[float, ...] = setting((1.0, 2.0))\n"
        "    names: tuple[str, ...] = setting(())\n"
    )
    own = ["--algorithm", "own_settings:Own"]
    for words in ([], ["often=none"], ["never=3", "word=b c"], ["steps=0.5"], ["steps=3,4,5", "often=7"]):
        config = settings_of([*own, *(part for word in words for part in ("--set", word))])
        assert settings_of(shlex.split(command_of(config))[2:]) == config, words
    assert settings_of([*own, "--set", "steps=3,4"]).of("algorithm")["steps"] == (3.0, 4.0)
    (tmp_path / "run.toml").write_text('[settings]\nnames = ["a,b", "", "c d", "\'", "\\""]\n')
    config = settings_of([*own, "--config", "run.toml"])
    assert config.of("algorithm")["names"] == ("a,b", "", "c d", "'", '"')
    assert settings_of(shlex.split(command_of(config))[2:]) == config
    for names in ([" a", "b"], ["a", " b"], ["a "], [" "], ["a\nb", 'c"'], ["a\r\n"]):
        (tmp_path / "run.toml").write_text(f"[settings]\nnames = {json.dumps(names)}\n")
        config = settings_of([*own, "--config", "run.toml"])
        assert settings_of(shlex.split(command_of(config))[2:]) == config, names


@pytest.mark.parametrize("name", ALGORITHMS.names)
def test_settings_of_every_algorithm_survive_the_trip(name: str) -> None:
    other = {"scaffold_variant": "gradient", "fedrs_soft": True}
    changed = {s.name: other.get(s.option or "", _other(s.default)) for s in ALGORITHMS.settings(name).values()}
    config = RunConfig(algorithm=name, settings=changed)
    assert config.of("algorithm") == changed
    assert settings_of(shlex.split(command_of(config))[2:]) == config
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def _other(default: object) -> object:
    """Another value that is within the bounds, too."""
    return default + 1 if type(default) is int else default / 2 if isinstance(default, float) else default


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rounds x", "rounds: 'x' cannot be used; accepted: a whole number"),
        ("--rounds 2.5", "rounds: '2.5' cannot be used"),
        ("--rounds 0", "rounds: 0 is out of range"),
        ("--lr nan", "lr: nan is out of range"),
        ("--epsilon -1", "epsilon: -1.0 is out of range"),
        ("--epsilon some", "epsilon: 'some' cannot be used; accepted: a number or none"),
        ("--cohort 200", "cohort: '200' gives 200 of 100 clients"),
        ("--partition dir:0", "partition"),
        ("--algorithm fedsgd", "algorithm: 'fedsgd' is unknown"),
        ("--seeds 1,a", "seeds: '1,a' cannot be read"),
        ("--seeds 4-2", "seeds: '4-2' runs backwards"),
        ("--seeds 0,0-1", "seeds: '0,0-1' gives 0 more than once"),
        ("--set beta=1 --set beta=0.5", "set: 'beta=0.5' gives beta more than once; accepted: each setting once"),
        ("--seeds 0-9999999", "seeds: '0-9999999' are too many"),
        ("--seed 1 --seeds 1,2", "seeds: was given together with seed"),
        ("--device tpu", "device: 'tpu' is unknown"),
        ("--trainer fast", "trainer: 'fast' is unknown"),
        ("--workers 0", "workers: 0 is out of range"),
        ("--checkpoint-every 0", "checkpoint_every: 0 is out of range"),
        ("--target 101", "target: 101 is out of range"),
        ("--target nan", "target: nan is out of range"),
        ("--log wandb", "log: 'wandb' is unknown; accepted: tensorboard"),
        ("--config missing.toml", "config: missing.toml cannot be read"),
        ("--dataset no-such-data", "no-such-data"),
    ],
)
def test_wrong_input_is_refused_by_name_with_code_2(
    command: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = command("run", *shlex.split(words))
    assert said.code == 2
    assert message in said.err
    assert "Traceback" not in said.err
    assert said.out == ""
    assert not list(tmp_path.glob("out/*/*"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batchsize = 3", "batchsize: unknown setting in {file}; did you mean batch_size?"),
        ("batch-size = 3", "did you mean batch_size?"),
        ("[training]\nlr = 1", "training: unknown setting in {file}"),
        (
            "'algorithm.beta' = 0.5",
            "did you mean algorithm?; a setting that only some methods have stands under [setti",
        ),
        ("beta = 0.5", "; a setting that only some methods have stands under [settings]"),
        ("[settings]\nalgorithm.beta = 0.5", 'algorithm.beta is read as a table; accepted: the name in quotes, "algor'),
        ("lr = 'fast'", "lr: 'fast' cannot be used; accepted: a number (in {file})"),
        ("rounds = 2.0", "rounds: 2.0 cannot be used"),
        ("rounds = true", "rounds: True cannot be used"),
        ("fine_labels = 1", "fine_labels: 1 cannot be used; accepted: true or false"),
        ("seed = 1\nseeds = [1]", "seeds: was given together with seed"),
        ("seeds = [1.5]", "seeds: '1.5' cannot be read"),
        ("lr = ", "config: {file} is not TOML"),
        ("methods = ['fedavg']", "methods: unknown setting"),
    ],
)
def test_a_wrong_file_is_refused_by_key_and_name(
    command: Callable[..., Said], tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    said = command("run", "--config", file, "--out", tmp_path / "out")
    assert said.code == 2
    assert message.format(file=file) in said.err


def test_curves_for_tensorboard(command: Callable[..., Said], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # One run logs while it trains, the other was finished before anyone asked for curves.
    assert command("run", *SMALL, "--seed", 1, "--out", tmp_path).code == 0
    assert command("run", *SMALL, "--seeds", "0,1", "--out", tmp_path, "--log", "tensorboard").code == 0
    for folder in (path.parent for path in tmp_path.glob("*/run.json")):
        events = EventAccumulator(str(folder / "tensorboard")).Reload()
        curve = [(event.step, pytest.approx(event.value)) for event in events.Scalars("accuracy")]
        assert [(int(row["round"]), float(row["accuracy"])) for row in rows(folder)] == curve
        assert len(events.Scalars("cohort/entropy")) == 3


def test_tensorboard_that_is_not_installed_is_named(
    command: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    said = command("run", *SMALL, "--out", tmp_path, "--log", "tensorboard")
    assert said.code == 2
    assert "pip install 'fedentopt[tensorboard]'" in said.err


def test_torch_that_is_not_installed_is_named() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from fedentopt.cli import main\n"
        "sys.argv = ['fedentopt', 'run']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'fedentopt[sim]'" in done.stderr


def test_progress_counts_only_what_this_command_does() -> None:
    configs = [run_config(seed=0), run_config(seed=1), run_config(seed=0, selector="kl")]
    tally = RoundTally(configs)
    tally.add(RoundEvent(configs[0].run_id, 1, 100, 20.0))
    tally.add(RoundEvent(configs[1].run_id, 91, 100, 60.0))  # went on after 90 rounds of an earlier command
    tally.add(RoundEvent(configs[2].run_id, 1, 100, None))
    tally.add(RoundEvent(configs[2].run_id, 2, 100, None))
    assert (tally.done, tally.total) == (4, 210)
    assert tally.describe() == "fedavg 40.0 %"


def test_progress_names_four_methods_and_says_that_there_are_more() -> None:
    names = ("random", "kl", "fedentopt")
    configs = [run_config(selector=name) for name in names] + [run_config(algorithm="fedprox")]
    tally = RoundTally([*configs, run_config(algorithm="fednova")])
    assert tally.describe() == "training"
    for config in configs:
        tally.add(RoundEvent(config.run_id, 1, 9, 50.0))
    assert tally.describe() == "fedavg 50.0 % · kl 50.0 % · fedentopt 50.0 % · fedprox 50.0 %"
    tally.add(RoundEvent(run_config(algorithm="fednova").run_id, 1, 9, 50.0))
    assert tally.describe() == "fedavg 50.0 % · kl 50.0 % · fedentopt 50.0 % · fedprox 50.0 % …"


@pytest.mark.parametrize(("terminal", "show", "shown"), [
    (True, None, True), (False, None, False), (True, False, False), (False, True, True)
])  # fmt: skip
def test_progress_is_shown_on_terminals_unless_said_otherwise(terminal: bool, show: bool | None, shown: bool) -> None:
    with progress_bar([], Console(file=io.StringIO(), force_terminal=terminal), show=show) as advance:
        assert (advance is not None) == shown


def test_a_notebook_without_widgets_is_told_once_that_it_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = Console(file=screen)
    console.is_jupyter = True
    monkeypatch.setattr(console, "print", lambda text: screen.write(text))
    for found in (None, object()):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=found: found)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if found is None else "ignore")
            with progress_bar([], console) as advance:
                assert (advance is None) == (found is None)
    assert screen.getvalue().count("no progress bar: a notebook needs ipywidgets for one") == 1


@pytest.mark.parametrize("width", [60, 80, 200])
def test_progress_keeps_its_figures_in_a_narrow_terminal(width: int) -> None:
    configs = [run_config(), run_config(selector="kl"), run_config(algorithm="fedprox", selector="fedentopt")]
    screen = io.StringIO()
    with progress_bar(configs, Console(file=screen, force_terminal=True, width=width)) as advance:
        assert advance is not None
        for config in configs:
            advance(RoundEvent(config.run_id, 12, 240, 40.0))
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    last = [line for line in re.split(r"[\r\n]+", shown) if "rounds" in line][-1]
    assert re.search(r" +3/687 rounds \d:\d\d:\d\d left [-:0-9]+$", last), last
    assert len(last) <= width


def test_time_left_where_rounds_take_long_and_end_together() -> None:
    """Ten runs side by side, a round a minute: all of them report within a few milliseconds."""
    now = [0.0]
    column = TimeLeftColumn()
    bar = Progress(column, console=Console(file=io.StringIO()), get_time=lambda: now[0], auto_refresh=False)
    task = bar.add_task("rounds", total=1000)

    def left() -> str:
        return column.render(bar.tasks[0]).plain

    assert left() == "-:--:--"
    for number in range(3):
        for run in range(10):
            now[0] = 60.0 * (number + 1) + run / 1000
            bar.update(task, completed=10 * number + run + 1)
    assert left() == "1:37:00"
    now[0] += 45
    assert left() == "1:36:15"  # it counts down while nothing is heard
    now[0] += 15
    bar.update(task, completed=40, work=(40.0, 50.0))  # what is to come may cost less than what was done
    assert left() == "0:01:00"
    bar.update(task, completed=1000, work=(50.0, 50.0))
    assert left() == "0:00:00"


def test_ones_own_data_and_ones_own_model(
    command: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    labels = np.arange(90) % 3
    images = rng.integers(0, 60, (90, 12, 12, 3)) + 60 * labels[:, None, None, None]
    np.savez("own.npz", x_train=images[:60].astype(np.uint8), y_train=labels[:60],
             x_test=images[60:].astype(np.uint8), y_test=labels[60:])  # fmt: skip
    Path("own_net.py").write_text(
        "from torch import nn\n"
        "def small(num_classes):\n"
        "    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, num_classes))\n"
    )
    said = command(
        "run", "--dataset", "own.npz", "--image-size", 12, "--model", "own_net:small", "--partition", "dir:0.5",
        "--clients", 6, "--cohort", 3, "--min-samples", 1, "--rounds", 12, "--lr", 0.1, "--device", "cpu",
        "--workers", 1, "--out", "out", "--json",
    )  # fmt: skip
    assert said.code == 0, said.err
    (run,) = json.loads(said.out)["runs"]
    # Brightness alone tells the classes apart; a run that learns nothing stays at a third.
    assert run["final_accuracy"] > 60
    about = json.loads((tmp_path / run["path"] / "run.json").read_text())
    assert about["dataset"]["name"] == "own.npz"
    assert about["dataset"]["train"] == 60
    assert str(tmp_path) not in json.dumps(about)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("lr = " + "9" * 400, "lr: the number is too large"),
        ("target = [50, " + "9" * 400 + "]", "target: the number is too large"),
        (r'out = "a\u0000b"', r"out: 'a\x00b' holds a null character"),
        (r'data_dir = "a\u0000b"', r"data_dir: 'a\x00b' holds a null character"),
    ],
    ids=["number", "number in a list", "out", "data_dir"],
)
def test_values_of_a_file_that_nothing_can_hold_are_refused(
    command: Callable[..., Said], tmp_path: Path, line: str, told: str
) -> None:
    (tmp_path / "odd.toml").write_text(line)
    said = command("run", *SMALL, "--config", tmp_path / "odd.toml")
    assert said.code == 2
    assert told in said.err
    assert "odd.toml" in said.err


def test_folders_that_cannot_take_results_are_refused_before_training(
    command: Callable[..., Said], tmp_path: Path
) -> None:
    said = command("run", *SMALL, "--out", tmp_path / ("x" * 300))
    assert said.code == 2
    assert "cannot be used: File name too long" in said.err
    stray = tmp_path / os.fsdecode(b"caf\xe9")
    said = command("run", *SMALL, "--out", stray)
    assert said.code == 2
    assert "cannot stand on a page; accepted: a path in UTF-8, or any with --no-page" in said.err
    assert not stray.exists()
    assert command("run", *SMALL, "--out", stray, "--no-page").code == 0


def test_an_option_wins_over_the_settings_of_a_file_and_set_over_all(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('algorithm = "fedprox"\n[settings]\nmu = 0.3\nlr = 0.5\n')
    config = settings_of(["--config", str(file), "--mu", "0.7"])
    assert (config.of("algorithm")["mu"], config.lr) == (0.7, 0.5)
    assert settings_of(["--config", str(file), "--mu", "0.7", "--set", "mu=0.9"]).of("algorithm")["mu"] == 0.9


def test_an_option_is_of_its_own_method_alone(tmp_path: Path) -> None:
    assert settings_of(["--algorithm", "moon", "--mu", "0.5"]).of("algorithm")["mu"] == 1.0
    assert settings_of(["--algorithm", "moon", "--set", "mu=0.5"]).of("algorithm")["mu"] == 0.5
    assert settings_of(["--algorithm", "moon", "--set", "algorithm.mu=0.5"]).of("algorithm")["mu"] == 0.5


def test_one_name_in_both_parts_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "both.py").write_text(
        "from fedentopt.algorithms import Algorithm, setting\nfrom fedentopt.selection import Selector\n"
        "class A(Algorithm):\n    gamma: float = setting(0.1)\n"
        "class S(Selector):\n    gamma: float = setting(0.2)\n    def pick(self, available, losses):\n"
        "        return available[: self.cohort_size].tolist()\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["--algorithm", "both:A", "--selector", "both:S"]
    config = settings_of([*words, "--set", "algorithm.gamma=0.7"])
    assert (config.of("algorithm"), config.of("selector")) == ({"gamma": 0.7}, {"gamma": 0.2})
    assert settings_of(shlex.split(command_of(config))[2:]) == config
    assert settings_of(words).run_id == settings_of([*words, "--set", "selector.gamma=0.2"]).run_id
    with pytest.raises(InputError, match=r"set: gamma is a setting of both:A and both:S"):
        settings_of([*words, "--set", "gamma=1"])


@pytest.mark.parametrize("by", ["options", "file"])
def test_what_cannot_go_together_is_refused_from_options_and_from_a_file(
    command: Callable[..., Said], tmp_path: Path, by: str
) -> None:
    words: tuple[object, ...] = ("--algorithm", "fedlc", "--selector", "hics-fl")
    if by == "file":
        (tmp_path / "run.toml").write_text('algorithm = "fedlc"\nselector = "hics-fl"\n')
        words = ("--config", tmp_path / "run.toml")
    small = "--clients 10 --cohort 2 --rounds 1 --epochs 1 --device cpu --workers 1"
    said = command("run", *small.split(), *words, "--out", tmp_path / "out")
    assert said.code == 2
    assert "error: selector: 'hics-fl' reads labels from the bias of last layers, which fedlc changes" in said.err
