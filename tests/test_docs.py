"""The documentation builds strictly, and what it says runs.

Blocks marked `bash` or `python` are run, page by page, in a folder of their own, in order; the Python blocks of a page
share their names. A comment `<!-- not run: reason -->` before a block exempts it, `<!-- file: path -->` says that it
shows a file of the repository. Every `fedentopt` command in any shell block, run or not, must be one the program takes.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer.main
import yaml

from doc_blocks import SHELL, Block, blocks
from fedentopt import __version__
from fedentopt.cli import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# Pages whose commands start servers and nodes; other tests start the same ones, on free ports.
RUN_ELSEWHERE = {
    "flower.md": ("flower/test_deployment.py", "flower/test_simulation.py"),
    "nvflare.md": ("nvflare/test_deployment.py", "nvflare/test_recipe.py"),
}
STARTS = {"flower.md": {"flower-superlink", "flwr run"}, "nvflare.md": {"nvflare poc start", "python job.py"}}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]


def of(page: Path) -> list[Block]:
    return blocks(page) if page.exists() else []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_docs_build_strictly(site: Path) -> None:
    built = {page.stem for page in site.glob("*.html")}
    assert {page.stem for page in DOCS.glob("*.md")} <= built
    for picture in ("clients", "cohorts", "entropy", "buffer", "cohort-size", "noise"):
        assert (site / "pictures" / f"{picture}.svg").is_file()


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    for page in site.glob("*.html"):
        loads = re.findall(r"<(?:script|link|img|iframe)[^>]*?\s(?:src|href)=[\"']?([^\s\"'>]+)", page.read_text())
        away = [url for url in loads if re.match(r"(?:https?:)?//", url)]
        assert away == [], f"{page.name} loads {away}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_shows_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name in RUN_ELSEWHERE:
        pytest.skip(f"starts servers; such steps are run by {', '.join(RUN_ELSEWHERE[page.name])}")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    bin_folder = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    names: dict[str, object] = {"__name__": "__main__"}
    for block in of(page):
        where = f"{page.name}:{block.line}"
        if block.file is not None:
            file = ROOT / block.file
            assert file.read_text() == block.code, f"{where}: is no longer {block.file}"
            (tmp_path / file.name).write_text(block.code)
        elif block.is_run and block.is_python:
            exec(compile(block.code, where, "exec"), names)
        elif block.is_run:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.code],
                cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300,
            )  # fmt: skip
            assert done.returncode == 0, f"{where} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"


def test_pages_run_elsewhere_have_their_tests() -> None:
    for page, files in RUN_ELSEWHERE.items():
        programs = {word for block in of(DOCS / page) for word in STARTS[page] if word in block.code}
        assert programs == STARTS[page], f"{page} starts no federation any more: let it be run here"
        assert [file for file in files if not (ROOT / "tests" / file).is_file()] == []


def _unrun() -> list[Block]:
    return [
        block
        for page in PAGES
        for block in of(page)
        if block.file is None and (block.is_python or block.language in SHELL)
        if not block.is_run or page.name in RUN_ELSEWHERE
    ]


@pytest.mark.parametrize("block", _unrun(), ids=lambda block: f"{block.page.name}:{block.line}")
def test_blocks_that_are_not_run_are_at_least_well_formed(block: Block) -> None:
    where = f"{block.page.name}:{block.line}"
    if not block.is_python:
        done = subprocess.run(["bash", "-n", "-c", block.code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{where}: {done.stderr}"
        return
    if "nvflare" in block.code:
        pytest.importorskip("nvflare", reason="NVFlare is not installed")
    # What it imports must be there, under these names.
    imports = [node for node in ast.walk(ast.parse(block.code)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    exec(compile(ast.Module(imports, type_ignores=[]), where, "exec"), {})


def _commands() -> list[tuple[str, list[str]]]:
    return [
        (f"{block.page.name}:{block.line}", words) for page in PAGES for block in of(page) for words in block.commands()
    ]


@pytest.mark.parametrize(
    ("where", "words"), _commands(), ids=lambda value: " ".join(value) if isinstance(value, list) else value
)
def test_every_command_shown_is_one_the_program_takes(where: str, words: list[str]) -> None:
    command: click.Command = typer.main.get_command(app)
    context = click.Context(command, info_name="fedentopt")
    while isinstance(command, click.Group):
        if words and words[0].startswith("-"):
            assert words[0] in {"--help", "--version"}, f"{where}: {words[0]}"
            return
        assert words, f"{where}: which command of {command.name}?"
        assert words[0] in command.commands, f"{where}: no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
        context = click.Context(command, info_name=command.name, parent=context)
    if "--help" in words:
        return
    try:
        command.parse_args(context, list(words))
    except click.UsageError as error:
        pytest.fail(f"{where}: fedentopt {command.name} {' '.join(words)}: {error.format_message()}")


def test_pictures_are_drawn_by_our_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    import make_pictures  # type: ignore[import-not-found,unused-ignore]

    # Few partitions and rounds: that the code runs and what it is called is the point, not the curves.
    monkeypatch.setattr(make_pictures, "PARTITIONS", 1)
    monkeypatch.setattr(make_pictures, "ROUNDS", 10)
    make_pictures.main(tmp_path)
    drawn = {file.name for file in tmp_path.iterdir()}
    assert drawn == {file.name for file in (DOCS / "pictures").iterdir()}
    shown = "".join(page.read_text() for page in DOCS.glob("*.md"))
    assert [name for name in drawn if f"pictures/{name}" not in shown] == []
    assert all(file.read_text().rstrip().endswith("</svg>") for file in tmp_path.iterdir())


def test_citation_names_the_paper_and_the_software() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == __version__
    assert citation["license"] == "Apache-2.0"
    (paper,) = citation["references"]
    assert paper["title"] == "Optimizing Federated Learning by Entropy-Based Client Selection"
    assert [author["family-names"] for author in paper["authors"]] == ["Lutz", "Steidl", "Müller", "Samek"]
    assert {"type": "other", "value": "arXiv:2411.01240"} in paper["identifiers"]


def test_changelog_has_this_version() -> None:
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_page_of_methods_is_what_the_registries_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    from make_methods import page  # type: ignore[import-not-found,unused-ignore]

    assert (DOCS / "methods.md").read_text(encoding="utf-8") == page(), "run python docs/make_methods.py"


def test_the_map_names_files_that_are_there() -> None:
    """Paths on the page of the map lie below the package, those of tests below the repository, and a file that names
    follow in brackets defines them."""
    text = (DOCS / "map.md").read_text(encoding="utf-8")
    files = set(re.findall(r"[\w./-]+\.(?:py|toml)\b", text))
    folders = set(re.findall(r"`([\w/]+/)`", text)) - {"src/fedentopt/"}
    assert len(files) > 30
    assert len(folders) > 10
    package = ROOT / "src" / "fedentopt"
    missing = [name for name in files if not (ROOT if name.startswith("tests/") else package).joinpath(name).is_file()]
    missing += [name for name in folders if not package.joinpath(name).is_dir()]
    assert sorted(missing) == []
    for file, names in re.findall(r"`([\w/]+\.py)` \(((?:`[\w.]+`(?:, )?)+)\)", text):
        code = (package / file).read_text(encoding="utf-8")
        for name in re.findall(r"\w+(?=`)", names):
            assert re.search(rf"\b(?:def|class) {name}\b", code), f"map.md: {name} is not defined in {file}"
