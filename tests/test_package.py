"""The package as it is installed: light to import, and whole without any extra."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from doc_blocks import blocks

pytestmark = pytest.mark.xdist_group("package")  # one wheel is enough

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "torchvision", "flwr", "ray", "sklearn", "scipy", "matplotlib", "plotly", "PIL", "opendp", "pandas")


def modules_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after a statement."""
    code = (
        f"{statement}\nimport sys, json\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(said.stdout))


def test_import_is_light() -> None:
    held = modules_after("import fedentopt; fedentopt.EntropySelector, fedentopt.RandomSelector, fedentopt.KLSelector")
    assert "numpy" in held
    assert held.isdisjoint({*HEAVY, "rich", "typer", "click"})


def test_selection_library_is_light() -> None:
    parts = (
        "labels", "privacy", "partition", "selection.measures", "selection.fedentropy", "selection.trial",
        "tables", "plan",
    )  # fmt: skip
    held = modules_after("import " + ", ".join(f"fedentopt.{part}" for part in parts))
    assert held.isdisjoint({*HEAVY, "rich", "typer", "click"})


def test_command_line_loads_nothing_heavy() -> None:
    assert modules_after("import fedentopt.cli").isdisjoint(HEAVY)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Where the build backend is installed nothing has to be fetched.
    here = ["--no-isolation"] if importlib.util.find_spec("hatchling") else []
    build = [sys.executable, "-m", "build", "--wheel", *here, "--outdir", str(folder), str(ROOT)]
    said = subprocess.run(build, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    (path,) = folder.glob("*.whl")
    return path


def requirements(wheel: Path) -> list[Requirement]:
    """What the wheel itself asks for."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    lines = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    return [Requirement(line.removeprefix("Requires-Dist: ")) for line in lines]


def needed(wanted: list[Requirement]) -> set[str]:
    """Names of all distributions these requirements bring in, without extras."""
    names: set[str] = set()
    while wanted:
        requirement = wanted.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = requirement.name.lower().replace("_", "-")
        if name not in names:
            names.add(name)
            wanted += [Requirement(line) for line in importlib.metadata.requires(name) or []]
    return names


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel and what it asks for, and nothing else; its folder of programs.

    The required packages are links to those of this environment, so that nothing has to be fetched.
    """
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    names = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", names))
    programs = Path(sysconfig.get_path("scripts", "venv", names))
    for name in needed(requirements(wheel)):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or [] if not file.parts[0].startswith((".", "_"))}:
            (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--quiet", str(wheel)], check=True)
    return programs


def run(program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    outside = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "FEDENTOPT_DATA")
    }
    return subprocess.run([program, *words], capture_output=True, text=True, check=False, env=outside)


def test_bare_wheel_selects(bare: Path, tmp_path: Path) -> None:
    here = run(bare / "python", "-c", "import fedentopt; print(fedentopt.__file__)").stdout
    assert str(bare.parent) in here
    for name in HEAVY:
        assert run(bare / "python", "-c", f"import {name}").returncode == 1
    counts = tmp_path / "counts.csv"
    counts.write_text("client,cat,dog\na,9,0\nb,0,9\nc,9,0\nd,0,9\n")
    said = run(bare / "fedentopt", "select", str(counts), "--cohort", "2", "--buffer", "50%", "--rounds", "4", "--json")
    assert said.returncode == 0, said.stderr
    assert [entry["entropy"] for entry in json.loads(said.stdout)["rounds"]] == [1, 1, 1, 1]
    assert run(bare / "fedentopt", "select", str(counts), "--sweep", "--cohort", "1,2").returncode == 0
    bad = run(bare / "fedentopt", "select", str(counts), "--cohort", "2", "--buffer", "3")
    assert bad.returncode == 2
    assert "--buffer: '3' gives 3 clients; accepted: at most 2" in bad.stderr


def test_bare_wheel_plans(bare: Path, tmp_path: Path) -> None:
    """Page included: its charts need no library, and its style is that of the other page."""
    counts, page = tmp_path / "counts.csv", tmp_path / "plan.html"
    counts.write_text("site;cat;dog\na;9;0\nb;0;9\nc;9;0\nd;0;9\ne;0;0\n")
    said = run(bare / "fedentopt", "plan", str(counts), "--rounds", "5", "--out", str(page), "--json")
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["recommendation"]["selector"] == "fedentopt"
    assert "left out, no samples: 'e'" in said.stderr
    assert page.read_text(encoding="utf-8").count("<svg") > 10
    (tmp_path / "counts.xlsx").write_bytes(b"")
    refused = run(bare / "fedentopt", "plan", str(tmp_path / "counts.xlsx"))
    assert refused.returncode == 2
    assert "pip install 'fedentopt[tables]'" in refused.stderr


def test_bare_wheel_has_its_other_light_commands(bare: Path, tmp_path: Path) -> None:
    from fedentopt import __version__

    assert run(bare / "fedentopt", "--version").stdout == f"fedentopt {__version__}\n"
    for words in (["--help"], ["select", "--help"], ["bench", "selection", "--help"], ["partition", "--help"]):
        assert run(bare / "fedentopt", *words).returncode == 0, words
    for words, argument in ((["select"], "CSV file of label counts"), (["partition"], "dir:BETA, classes:J or iid.")):
        assert argument in run(bare / "fedentopt", *words, "--help").stdout
    save = "import numpy, sys; numpy.save(sys.argv[1], numpy.arange(100) % 4)"
    assert run(bare / "python", "-c", save, str(tmp_path / "y.npy")).returncode == 0
    split = ("partition", "classes:2", "--labels", str(tmp_path / "y.npy"), "--clients", "5", "--json")
    said = run(bare / "fedentopt", *split)
    assert said.returncode == 0, said.stderr
    noise = "from fedentopt.privacy import secure_laplace; secure_laplace([1, 2], 0.5)"
    refused = run(bare / "python", "-c", noise)
    assert "install fedentopt[flower]" in refused.stderr


def test_bare_wheel_says_which_extra_a_command_needs(bare: Path, tmp_path: Path) -> None:
    heavy = (
        ["compare", "--out", tmp_path / "out"],
        ["run", "--out", tmp_path / "out"],
        ["reproduce", "table1", "--out", tmp_path / "out"],
        ["data", "list"],
        ["data", "verify", "digits"],
        ["partition", "iid", "--dataset", "digits"],
        ["bench", "engine"],
    )
    for words in heavy:
        said = run(bare / "fedentopt", *map(str, words))
        assert said.returncode == 2, (words, said.stderr)
        assert "pip install 'fedentopt[sim]'" in said.stderr, words
        assert "Traceback" not in said.stderr


def test_make_knows_what_the_readme_starts_with() -> None:
    shown = {command for block in blocks(ROOT / "README.md") for command in re.findall(r"^make \w+", block.code, re.M)}
    assert shown == {"make demo", "make test"}
    for target in ("setup", "demo", "test", "lint", "bench"):
        said = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stderr


def test_wheel_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "fedentopt/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith("tests") for name in names)
    plain = {r.name for r in requirements(wheel) if r.marker is None or "extra" not in str(r.marker)}
    assert plain == {"numpy", "typer", "rich"}
    extras = " ".join(str(r.marker) for r in requirements(wheel))
    assert all(f'extra == "{name}"' in extras for name in ("sim", "flower", "ray", "dev"))


def test_bounds_admit_what_flower_pins(wheel: Path) -> None:
    """Flower 1.41 pins typer 0.20, rich 14 and Ray 2.55.1; both must install into one environment."""
    pinned = {"typer": "0.20.0", "rich": "14.0.0", "ray": "2.55.1", "flwr": "1.41.0"}
    seen = set()
    for requirement in requirements(wheel):
        if requirement.name in pinned:
            seen.add(requirement.name)
            assert requirement.specifier.contains(pinned[requirement.name]), requirement
    assert seen == set(pinned)
