"""One's own classes, functions and objects: known again by their source and by their values."""

from __future__ import annotations

import functools
import hashlib
import inspect
import linecache
import math
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from fedentopt import EntropySelector
from fedentopt.algorithms import FedProx
from fedentopt.own_objects import source_digest_of
from fedentopt.selection import Selector


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
    for unknown in (object(), np.array([object()]), [object()]):
        assert source_digest_of(make(unknown)) == ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.5, "0.5"), ({1, 2}, {1, 3}), (np.float32(0.1), np.float32(0.2)), (np.int64(1), np.int32(1)), (b"1", b"2"),
        (range(1), range(2)), (Path("a"), Path("b")), (signal.Signals.SIGINT, signal.Signals.SIGTERM), (int, float),
        (max, np.mean), (np.exp, np.log), (math.sin, math.cos), (nn.ReLU, nn.GELU), (torch.float32, torch.bfloat16),
        (Slotted(1), Slotted(2)), (functools.partial(max, 1), functools.partial(max, 2)),
        (Constant(1).__call__, Constant(2).__call__), (torch.no_grad(), torch.enable_grad()),
        (np.ones(2), np.zeros(2)), (np.ones(2), np.ones(2, np.float32)), (np.ones((1, 2)), np.ones((2, 1))),
        (torch.ones(3)[1:], torch.tensor([1.0, 2.0])), (torch.tensor(1), torch.tensor(2)),
        (torch.ones(2).bfloat16(), torch.ones(2).half()), (np.eye(3).T[:2], np.eye(3)[1:]),
    ],
)  # fmt: skip
def test_values_that_are_told_apart(one: object, other: object) -> None:
    first, again, second = (source_digest_of(Constant(value)) for value in (one, one, other))
    assert first == again != second
    assert len(first) == len(second) == 64


@pytest.mark.parametrize(
    "value",
    [
        torch.Generator(),
        torch.eye(2).to_sparse(),
        torch.ones(2, device="meta"),
        np.array([object()]),
        np.ma.masked_array([1, 2], [True, False]),
        threading.Lock(),
        np.random.default_rng(1),
        iter([1]),
    ],
    ids=lambda value: type(value).__name__,
)
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


READING = """
import logging
import math
from torch import nn
from fedentopt.algorithms import Algorithm, LocalTerms

WIDTH, FACTOR, log = 8, 0.1, logging.getLogger("mine")
images = object()

def block(width):
    return nn.Linear(WIDTH, width)

def net(classes):
    log.info("made")
    return nn.Sequential(block(classes), *(block(math.ceil(2.5)) for _ in range(2))).images

def sized(classes, width=WIDTH):
    return nn.Linear(width, classes)

class Near(Algorithm):
    def local_terms(self, client):
        return LocalTerms(mu=FACTOR)

class Doubled(Near):
    twice = 2 * FACTOR
    def local_terms(self, client, width=WIDTH):
        return LocalTerms(mu=self.twice)

pair = [lambda classes: nn.Linear(8, classes), lambda classes: nn.Linear(16, classes)]
several = [lambda classes, width=width: nn.Linear(width, classes) for width in (8, 16)]
"""


def cells(monkeypatch: pytest.MonkeyPatch, *sources: str) -> dict[str, Any]:
    """What a notebook knows after these cells."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    for number, cell in enumerate(sources):
        name = f"/tmp/ipykernel_2/{number}.py"
        monkeypatch.setitem(linecache.cache, name, (len(cell), None, cell.splitlines(keepends=True), name))
        exec(compile(cell, name, "exec"), vars(main))
    return vars(main)


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("= 8, 0.1", "= 16, 0.1", {"block", "net", "sized", "Doubled"}),
        ("= 8, 0.1", "= 8, 0.2", {"Near", "Doubled"}),
        ("= 8, 0.1", "= 8, 0.0", {"Near", "Doubled"}),
        ("Linear(WIDTH, width)", "Linear(width, WIDTH)", {"block", "net"}),
        ('getLogger("mine")', 'getLogger("other")', set()),
        ("images = object()", "images = 1", set()),
    ],
)  # fmt: skip
def test_what_is_read_from_other_cells_counts(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str, changed: set[str]
) -> None:
    names = ("block", "net", "sized", "Near", "Doubled")
    before, again, after = (
        {name: source_digest_of(known[name]) for name in names}
        for known in (cells(monkeypatch, source) for source in (READING, READING, READING.replace(old, new)))
    )
    assert before == again
    assert all(before.values())
    assert {name for name in names if before[name] != after[name]} == changed


def test_a_name_given_another_value_counts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known = cells(monkeypatch, READING)
    before = source_digest_of(known["Near"]())
    exec("FACTOR = 3.0", known)
    assert source_digest_of(known["Near"]()) not in ("", before)
    exec("FACTOR = object()", known)  # nobody could tell it from another
    assert source_digest_of(known["Near"]()) == ""


NOTING = """
from fedentopt.algorithms import Algorithm, LocalTerms

notes, calls, kept = [], 0, []

class Noting(Algorithm):
    def local_terms(self, client):
        global calls
        calls += 1
        notes.append(client)
        return LocalTerms(mu=0.1)

    def mix(self, round):
        kept.append(round)
        return kept[0]
"""


def test_what_code_only_writes_down_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped goes on in the same notebook, whatever it has noted until then."""
    known = cells(monkeypatch, NOTING)
    before = source_digest_of(known["Noting"])
    exec("notes.append(3); calls = 7", known)
    assert source_digest_of(known["Noting"]) == before
    exec("kept.append(3)", known)  # which the code reads as well
    assert source_digest_of(known["Noting"]) not in ("", before)


def test_lambdas_of_one_line_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    known = cells(monkeypatch, READING)
    digests = {source_digest_of(made) for made in (*known["pair"], *known["several"])}
    assert len(digests) == 4
    assert "" not in digests


def test_modules_of_ones_own_that_are_read_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    digests = []
    for width in (8, 8, 16):
        (tmp_path / "my_blocks.py").write_text(f"WIDTH = {width}\n")
        monkeypatch.delitem(sys.modules, "my_blocks", raising=False)
        digests.append(source_digest_of(cells(monkeypatch, USING_A_MODULE)["net"]))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("name", ["my_prior", "__main__"])
def test_what_a_file_makes_counts_by_the_file_where_it_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    digests = []
    for size in (8, 8, 16):
        path = tmp_path / "my_prior.py"
        path.write_text(f"import torch\nprior = torch.Generator().manual_seed({size})\ndef read():\n    return prior\n")
        module = ModuleType(name)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(path.read_text(), str(path), "exec"), vars(module))
        linecache.checkcache(str(path))
        digests.append(source_digest_of(vars(module)["read"]))
    assert digests[0] == digests[1] != digests[2]
    assert "" not in digests


USING_A_MODULE = """
import my_blocks

def net(classes):
    return my_blocks.WIDTH
"""


def test_settings_of_a_module_of_torch_count() -> None:
    smooth = [nn.CrossEntropyLoss(label_smoothing=value) for value in (0.1, 0.1, 0.2)]
    first, again, other = (source_digest_of(Constant(loss)) for loss in smooth)
    assert first == again != other
    assert source_digest_of(Constant(nn.Linear(1, 1))) == ""


class Later(Selector):
    """A selector with a constructor of its own, whose argument is no declared setting."""

    def __init__(self, cohort_size: int, seed: int = 0, start: object = 0) -> None:
        super().__init__(cohort_size, seed)
        self._start = start

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        return available[self._start :][: self.cohort_size].tolist()


def test_a_selector_is_known_by_what_it_holds_beside_its_state() -> None:
    assert source_digest_of(Later(2, start=1)) == source_digest_of(Later(2, start=1)) != source_digest_of(Later(2))
    assert source_digest_of(Later(2, start=object())) == ""
