"""One's own code: found by its import path, refused in one line, known again by its source."""

from __future__ import annotations

import functools
import hashlib
import inspect
import linecache
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from fedentopt import EntropySelector, own_code
from fedentopt.algorithms import FedProx
from fedentopt.errors import InputError
from fedentopt.own_code import code_digest, find_own, is_import_path, make_own, source_digest_of

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


# --- objects
class Base:
    """Not ours."""

    def go(self) -> int:
        return 1


class Child(Base):
    pass


def named(x: int = 1) -> int:
    return x


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_source_of_classes_objects_and_functions() -> None:
    base = 'class Base:\n    """Not ours."""\n\n    def go(self) -> int:\n        return 1\n'
    assert source_digest_of(Base) == source_digest_of(Base()) == sha(base + "\0")
    assert source_digest_of(Child) == source_digest_of(Child()) == sha("class Child(Base):\n    pass\n\0" + base + "\0")
    assert source_digest_of(named) == sha("def named(x: int = 1) -> int:\n    return x\n\0")
    assert len({source_digest_of(thing) for thing in (Base().go, Child().go, Base.go, Base)}) == 4


def test_source_of_lambdas_and_partials() -> None:
    one = lambda: 1  # noqa: E731
    two = lambda: 2  # noqa: E731
    assert source_digest_of(one) != source_digest_of(two)
    assert len(source_digest_of(one)) == 64
    partials = [functools.partial(named), functools.partial(named, 2), functools.partial(named, x=2)]
    digests = {source_digest_of(made) for made in partials} | {source_digest_of(functools.partial(one))}
    assert len(digests) == 4
    assert source_digest_of(functools.partial(named, x=2)) == source_digest_of(functools.partial(named, x=2))


def test_bases_of_this_package_do_not_count() -> None:
    class Mine(FedProx):
        pass

    assert source_digest_of(Mine) == sha("    class Mine(FedProx):\n        pass\n\0")
    # Nothing of one's own, which is not the same as a source that cannot be read.
    assert source_digest_of(FedProx) == source_digest_of(EntropySelector) == sha("")


def test_objects_are_known_by_what_they_hold() -> None:
    class Scaled:
        def __init__(self, factor: object) -> None:
            self.factor = factor

    def closing(factor: object) -> Callable[[], object]:
        return lambda: factor

    for make in (Scaled, closing):
        assert source_digest_of(make(1)) == source_digest_of(make(1)) != source_digest_of(make(2))
        assert source_digest_of(make(object())) == ""  # more than plain values: it cannot be known again
    assert source_digest_of(EntropySelector(3)) != source_digest_of(EntropySelector(3, buffer_size=1))


def made_class(factor: object, part: object = 1, start: object = 2) -> type:
    class Made:
        share = part

        def go(self, begin: object = start) -> object:
            return factor, begin, self.share, __class__

        def again(self) -> type:
            return Made

    return Made


def made_property(factor: object) -> type:
    class Made:
        @property
        def value(self) -> object:
            return factor

    class Child(Made):
        pass

    return Child


def made_function(factor: object) -> Callable[..., object]:
    def go(begin: object = factor) -> object:
        return begin

    return go


def made_cached(factor: object) -> Callable[..., object]:
    return functools.lru_cache(made_function(factor))


def made_cached_property(factor: object) -> type:
    class Made:
        @functools.cached_property
        def value(self) -> object:
            return factor

    return Made


def made_setter(factor: object) -> type:
    class Made:
        @property
        def value(self) -> int:
            return 1

        @value.setter
        def value(self, given: object) -> None:
            self.held = factor

    return Made


def made_partial_method(factor: object) -> type:
    class Made:
        def go(self, given: object) -> object:
            return given

        going = functools.partialmethod(go, factor)

    return Made


class Constant:
    def __init__(self, value: object) -> None:
        self.value = value

    def __get__(self, thing: object, kind: object = None) -> object:
        return self.value

    def __call__(self, classes: int) -> object:
        return self.value


def made_descriptor(factor: object) -> type:
    class Made:
        value = Constant(factor)

        def go(self) -> None: ...

    return Made


def made_without_gradients(factor: object) -> type:
    class Made:
        @torch.no_grad()
        def go(self) -> object:
            return factor

    return Made


def made_of_each_other(factor: object) -> type:
    def go() -> object:
        return Made, Other, factor

    class Made:
        def go(self) -> object:
            return go()

    class Other:
        def go(self) -> type:
            return Made

    return Made


@dataclass(frozen=True, slots=True)
class Slotted:
    value: object


class Named(NamedTuple):
    value: object


MAKERS = [
    made_class, functools.partial(made_class, 0), functools.partial(made_class, 0, 1), made_property, made_function,
    made_cached, made_cached_property, made_setter, made_partial_method, made_descriptor, made_without_gradients,
    made_of_each_other, Slotted, Named, Constant, lambda factor: Constant(factor).__call__,
    functools.partial(functools.partial, named),
]  # fmt: skip


@pytest.mark.parametrize("make", MAKERS)
def test_what_a_function_makes_is_known_by_the_values_it_was_made_with(make: Callable[..., Any]) -> None:
    for one, other in ((1, 2), ([1], [2]), (FedProx, EntropySelector), (named, Base)):
        assert source_digest_of(make(one)) == source_digest_of(make(one)) != source_digest_of(make(other))
        assert len(source_digest_of(make(other))) == 64
        if inspect.isclass(make(one)):
            assert source_digest_of(make(one)()) == source_digest_of(make(one)()) != source_digest_of(make(other)())
    for unknown in (object(), np.ones(2), [object()]):
        assert source_digest_of(make(unknown)) == ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.5, "0.5"), ({1, 2}, {1, 3}), (np.float32(0.1), np.float32(0.2)), (np.int64(1), np.int32(1)), (b"1", b"2"),
        (range(1), range(2)), (Path("a"), Path("b")), (signal.Signals.SIGINT, signal.Signals.SIGTERM), (int, float),
        (max, np.mean), (np.exp, np.log), (math.sin, math.cos), (nn.ReLU, nn.GELU), (torch.float32, torch.bfloat16),
        (Slotted(1), Slotted(2)), (functools.partial(max, 1), functools.partial(max, 2)),
        (Constant(1).__call__, Constant(2).__call__), (torch.no_grad(), torch.enable_grad()),
    ],
)  # fmt: skip
def test_values_that_are_told_apart(one: object, other: object) -> None:
    first, again, second = (source_digest_of(Constant(value)) for value in (one, one, other))
    assert first == again != second
    assert len(first) == len(second) == 64


@pytest.mark.parametrize("value", [torch.ones(2), threading.Lock(), np.random.default_rng(1), iter([1])], ids=str)
def test_values_that_cannot_be_told_from_others(value: object) -> None:
    assert source_digest_of(Constant(value)) == ""


@pytest.mark.parametrize("thing", [print, functools.partial(print)], ids=str)
def test_no_digest_of_what_has_no_source(thing: object) -> None:
    assert source_digest_of(thing) == ""


def test_no_digest_of_what_was_typed_in() -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("class Typed:\n    pass\ndef made():\n    return 1\n", space)
    assert source_digest_of(space["Typed"]) == source_digest_of(space["Typed"]()) == ""
    assert source_digest_of(space["made"]) == ""


CELL = """
from fedentopt.algorithms import Algorithm, LocalTerms, setting

def keep(cls):
    return cls

@keep
class Near(Algorithm):
    mu: float = setting(0.1, help="weight", low=0)
    def local_terms(self, client):
        return LocalTerms(mu=self.mu)

class Silent(Algorithm):
    pass

def make(factor):
    class Made(Algorithm):
        def local_terms(self, client):
            return LocalTerms(mu=factor)
    return Made
"""


def test_source_of_classes_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel runs a cell: its lines are known under the name it was compiled by, and __main__ is no file."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))

    def run(number: int, cell: str) -> dict[str, Any]:
        name, space = f"/tmp/ipykernel_1/{number}.py", {"__name__": "__main__"}
        monkeypatch.setitem(linecache.cache, name, (len(cell), None, cell.splitlines(keepends=True), name))
        exec(compile(cell, name, "exec"), space)
        return space

    first, again = run(1, CELL), run(2, "x = 1\n" + CELL)
    source = CELL.partition("return cls\n\n")[2].partition("\n\nclass")[0] + "\n"
    assert source_digest_of(first["Near"]) == source_digest_of(again["Near"]) == sha(source + "\0")
    assert source_digest_of(first["Near"](mu=0.3)) == source_digest_of(again["Near"](mu=0.3)) != ""
    assert source_digest_of(first["Near"](mu=0.3)) != source_digest_of(first["Near"](mu=0.4))
    edited = run(3, CELL.replace("mu=self.mu", "mu=2 * self.mu"))
    assert source_digest_of(edited["Near"]) not in ("", source_digest_of(first["Near"]))
    assert (
        source_digest_of(first["make"](1)) == source_digest_of(again["make"](1)) != source_digest_of(first["make"](2))
    )
    assert source_digest_of(first["Silent"]) == ""  # nothing says which cell it came from
