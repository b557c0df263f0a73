"""One's own code: found by its import path, refused in one line, known again by its source."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedentopt import own_code
from fedentopt.errors import InputError
from fedentopt.own_code import code_digest, find_own, is_import_path, make_own

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a file below the current directory, which is empty; what is imported from there is forgotten."""
    monkeypatch.chdir(tmp_path)
    known, loaded = set(sys.modules), set(own_code._LOADED)

    def put(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    yield put
    for name in set(sys.modules) - known:
        del sys.modules[name]
    for name in set(own_code._LOADED) - loaded:
        del own_code._LOADED[name]


def refusal(call: Callable[[], object]) -> str:
    """What an `InputError` says; it is one line."""
    with pytest.raises(InputError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- found by its path
@pytest.mark.parametrize("path", ["mine.py:Outer", "./mine:Outer", "sub/mine.py:Outer", "..mine:Outer"])
def test_a_file_in_the_place_of_a_module_is_refused_with_what_would_do(write: Write, path: str) -> None:
    write("mine.py", "class Outer: ...\n")
    assert refusal(lambda: find_own("model", path)) == (
        f"model: {path!r} names a file; accepted: a module and what is in it, such as mine:Outer, given in the "
        "folder of mine.py"
    )


def test_code_that_ends_the_process_does_not_end_the_command_unheard(write: Write) -> None:
    write("script.py", "import sys\nclass Mine: ...\nsys.exit(0)\n")
    write("later.py", "import sys\ndef make(): sys.exit('enough')\n")
    assert refusal(lambda: find_own("algorithm", "script:Mine")) == "algorithm: importing script raised SystemExit: 0"
    assert refusal(lambda: make_own("model", "later:make")) == "model: calling later:make raised SystemExit: enough"


def test_a_name_that_is_not_there_is_refused_with_those_that_are(write: Write) -> None:
    write("mine.py", "from pathlib import Path\nclass Outer: ...\ndef make(): ...\ndef _hidden(): ...\n")
    assert refusal(lambda: find_own("model", "mine:Uoter")) == (
        "model: mine has no attribute 'Uoter'; accepted: Outer, make"
    )


def test_which_names_are_import_paths() -> None:
    assert is_import_path("package.module:factory")
    assert not any(is_import_path(name) for name in ("fedavg", "module:", ":factory", ""))


def test_found_in_the_current_directory_and_the_path_is_left_as_it_was(write: Write) -> None:
    write("mine.py", "class Outer:\n    @staticmethod\n    def make():\n        return 7\n")
    before = list(sys.path)
    assert find_own("model", "mine:Outer.make")() == 7
    assert make_own("model", "mine:Outer.make") == 7
    assert sys.path == before


def test_arguments_and_settings_reach_the_factory(write: Write) -> None:
    write("mine.py", "def make(*given, **named):\n    return given, named\n")
    assert make_own("model", "mine:make", 1, 2, width=3) == ((1, 2), {"width": 3})


def test_what_is_not_there_is_refused(write: Write) -> None:
    write("mine.py", "number = 3\n")
    write("box/__init__.py", "")
    assert refusal(lambda: find_own("selector", "fedsgd")) == (
        "selector: 'fedsgd' is not of the form package.module:factory"
    )
    assert refusal(lambda: find_own("selector", "nowhere.deep:f")) == (
        "selector: no module 'nowhere' for 'nowhere.deep:f', nor in the current directory"
    )
    assert refusal(lambda: find_own("model", "box.missing:f")) == (
        "model: no module 'box.missing' for 'box.missing:f', nor in the current directory"
    )
    assert refusal(lambda: find_own("model", "mine:f")) == "model: mine has no attribute 'f'"
    assert refusal(lambda: find_own("model", "mine:number.g")) == "model: mine has no attribute 'number.g'"
    assert refusal(lambda: find_own("model", "mine:number")) == (
        "model: mine:number is int; accepted: a callable factory"
    )


def test_what_raises_is_refused_in_one_line(write: Write) -> None:
    write("needs.py", "import absent_for_test\n")
    write("divides.py", "1 / 0\n")
    write("broken.py", "x = (\n")
    write("raises.py", "def make():\n    raise RuntimeError('out of\\nideas')\n")
    assert refusal(lambda: find_own("model", "needs:f")) == (
        "model: importing needs raised ModuleNotFoundError: No module named 'absent_for_test'"
    )
    assert refusal(lambda: find_own("model", "divides:f")) == (
        "model: importing divides raised ZeroDivisionError: division by zero"
    )
    assert refusal(lambda: find_own("model", "broken:f")).startswith("model: importing broken raised SyntaxError: ")
    assert refusal(lambda: make_own("model", "raises:make")) == (
        "model: calling raises:make raised RuntimeError: out of"
    )


def test_what_own_code_itself_refuses_passes_as_it_is(write: Write) -> None:
    raising = "def make(width):\n    raise InputError(f'width: {width} is too wide')\n"
    write("careful.py", f"from fedentopt.errors import InputError\n{raising}")
    assert refusal(lambda: make_own("model", "careful:make", width=9)) == "width: 9 is too wide"


# --- known again by its source
FILES = {
    "mine.py": (
        "import near\nfrom other import thing\nimport pack.deep.leaf\nimport json\nimport far\n"
        "def make():\n    from lazy import late\n    return late\n"
    ),
    "near.py": "import indirect\n",
    "other.py": "thing = 1\n",
    "indirect.py": "value = 1\n",
    "lazy.py": "late = 1\n",
    "beside.py": "value = 1\n",
    "pack/__init__.py": "from . import listed\n",
    "pack/listed.py": "value = 1\n",
    "pack/unlisted.py": "value = 1\n",
    "pack/deep/__init__.py": "",
    "pack/deep/leaf.py": (
        "from .. import above\nfrom ..uncle import cousin\nfrom . import sibling\nfrom .self import x\n"
    ),
    "pack/above.py": "value = 1\n",
    "pack/uncle.py": "cousin = 1\n",
    "pack/deep/sibling.py": "value = 1\n",
    "pack/deep/self.py": "x = 1\n",
    "json.py": "beside = 1\n",
}
COVERED = set(FILES) - {"beside.py", "pack/unlisted.py"}


@pytest.mark.parametrize("edited", [*FILES, "elsewhere/far.py"])
def test_the_digest_covers_a_module_and_what_it_imports_from_beside_it(
    edited: str, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in FILES.items():
        write(name, text)
    write("elsewhere/far.py", "value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    before = code_digest(["mine:make"])
    assert before == code_digest(["mine:make"])
    (tmp_path / edited).write_text((tmp_path / edited).read_text() + "# changed\n")
    assert (code_digest(["mine:make"]) != before) == (edited in COVERED)
    assert "mine" not in sys.modules, "nothing is run for it"


def test_the_digest_of_a_module_inside_a_package(write: Write, tmp_path: Path) -> None:
    write("pack/__init__.py", "")
    write("pack/core.py", "from .part import x\nimport helper\n")
    write("pack/part.py", "x = 1\n")
    write("helper.py", "y = 1\n")
    seen = {code_digest(["pack.core:x"])}
    for name in ("pack/__init__.py", "pack/core.py", "pack/part.py", "helper.py"):
        (tmp_path / name).write_text((tmp_path / name).read_text() + "# changed\n")
        seen.add(code_digest(["pack.core:x"]))
    assert len(seen) == 5


def test_the_digest_does_not_depend_on_the_folder_nor_on_the_factory(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("here", "there"):
        write(f"{folder}/mine.py", "import near\n")
        write(f"{folder}/near.py", "x = 1\n")
    digests = []
    for folder in ("here", "there"):
        monkeypatch.chdir(tmp_path / folder)
        digests += [code_digest(["mine:a"]), code_digest(["mine:b", "mine:a", "fedavg"])]
    assert len(set(digests)) == 1
    assert len(digests[0]) == 64
    assert code_digest(["mine:a", "near:x"]) == code_digest(["near:x", "mine:a"]) != digests[0]


def test_no_digest_where_there_is_no_source(write: Write) -> None:
    assert code_digest([]) == code_digest(["fedavg", "random"]) == code_digest(["nowhere:f"]) == ""
    assert code_digest(["sys:exit"]) == ""
    write("broken.py", "x = (\n")
    assert code_digest(["broken:x"]) != ""


def test_of_an_installed_package_only_its_own_modules_count(write: Write, tmp_path: Path, monkeypatch) -> None:
    write("site-packages/lib/__init__.py", "import heavy\nfrom . import core\n")
    write("site-packages/lib/core.py", "x = 1\n")
    heavy = write("site-packages/heavy.py", "x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    before = code_digest(["lib:x"])
    heavy.write_text("x = 2\n")
    assert code_digest(["lib:x"]) == before
    (tmp_path / "site-packages/lib/core.py").write_text("x = 2\n")
    assert code_digest(["lib:x"]) != before


@pytest.mark.parametrize("edited", ["mine.py", "near.py", "pack/part.py"])
def test_an_edited_file_is_imported_anew(edited: str, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within a second and at the same length, which is all that cached bytecode looks at."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    values = {"mine.py": "1", "near.py": "1", "pack/part.py": "1"}
    texts = {
        "mine.py": "import near\nfrom pack.part import value\ndef make():\n    return {}, near.value, value\n",
        "near.py": "value = {}\n",
        "pack/part.py": "value = {}\n",
    }
    write("pack/__init__.py", "")

    def put() -> None:
        for name, text in texts.items():
            path = write(name, text.format(values[name]))
            os.utime(path, (1_700_000_000, 1_700_000_000))

    put()
    first = find_own("model", "mine:make")
    assert first() == (1, 1, 1)
    assert find_own("model", "mine:make") is first, "nothing was edited"
    values[edited] = "2"
    put()
    expected = tuple(int(value) for value in values.values())
    again = find_own("model", "mine:make")
    assert again() == expected
    assert again is not first
    assert make_own("model", "mine:make") == expected


def test_a_file_that_breaks_and_is_mended_is_what_it_is(write: Write) -> None:
    write("mine.py", "def make():\n    return 1\n")
    assert find_own("model", "mine:make")() == 1
    write("mine.py", "def make(:\n")
    assert "raised SyntaxError" in refusal(lambda: find_own("model", "mine:make"))
    write("mine.py", "def make():\n    return 333\n")
    assert find_own("model", "mine:make")() == 333
