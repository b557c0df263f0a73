"""Settings: types, bounds and their messages; words, TOML and Python give one value; classes that declare them."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any, ClassVar, Optional

import numpy as np
import pytest

import settings_without_future
from fedentopt.errors import InputError
from fedentopt.settings import Configurable, Setting, read_toml, setting, settings_of


def declared(default: Any, annotation: Any, **rule: Any) -> Setting:
    """A setting called `x`."""
    return Setting.of("x", setting(default, "what it does", **rule), annotation)


# --- types and bounds
ACCEPTED = [
    (declared(1, int), 5, 5),
    (declared(1, int), np.int64(5), 5),
    (declared(1, int), np.uint8(5), 5),
    (declared(1.0, float), 5, 5.0),
    (declared(1.0, float), np.float64(0.25), 0.25),
    (declared(1.0, float), np.float32(0.25), 0.25),
    (declared(1.0, float), np.int32(2), 2.0),
    (declared(1.0, float), np.array(2.5), 2.5),
    (declared(True, bool), False, False),
    (declared(True, bool), np.bool_(False), False),
    (declared("a", str), "b", "b"),
    (declared("a", str), np.str_("b"), "b"),
    (declared(None, "int | None"), None, None),
    (declared(None, "int | None"), 3, 3),
    (declared("10%", str, amount=True), 10, "10"),
    (declared("10%", str, amount=True), np.int64(10), "10"),
    (declared("10%", str, amount=True), "20%", "20%"),
    (declared((), "tuple[float, ...]"), [1, 2.5], (1.0, 2.5)),
    (declared("a", str, choices=("a", "b")), "b", "b"),
    (declared(1, int, low=1, high=3), 1, 1),
    (declared(1, int, low=1, high=3), 3, 3),
    (declared(0.5, float, above=0, below=1), 1e-300, 1e-300),
]


@pytest.mark.parametrize(("one", "value", "expected"), ACCEPTED)
def test_a_value_comes_out_in_the_declared_type(one: Setting, value: Any, expected: Any) -> None:
    found = one.check(value)
    assert found == expected
    assert type(found) is type(expected)


REFUSED = [
    (declared(1, int), 2.0, "x: 2.0 has the wrong type; accepted: int"),
    (declared(1, int), True, "x: True has the wrong type; accepted: int"),
    (declared(1, int), np.bool_(True), "x: True has the wrong type; accepted: int"),
    (declared(1, int), np.float64(2.0), "x: 2.0 has the wrong type; accepted: int"),
    (declared(1, int), "2", "x: '2' has the wrong type; accepted: int"),
    (declared(1.0, float), "fast", "x: 'fast' has the wrong type; accepted: float"),
    (declared(1.0, float), None, "x: None has the wrong type; accepted: float"),
    (declared(1.0, float), True, "x: True has the wrong type; accepted: float"),
    (declared(None, "float | None"), "0.5", "x: '0.5' has the wrong type; accepted: float or nothing"),
    (declared(False, bool), 1, "x: 1 has the wrong type; accepted: bool"),
    (declared("a", str), 1, "x: 1 has the wrong type; accepted: str"),
    (
        declared("10%", str, amount=True),
        2.5,
        "x: 2.5 has the wrong type; accepted: a whole number, or a per cent such as '10%'",
    ),
    (
        declared("10%", str, amount=True),
        True,
        "x: True has the wrong type; accepted: a whole number, or a per cent such as '10%'",
    ),
    (declared("a", str, choices=("a", "b")), "c", "x: 'c' is unknown; accepted: a, b"),
    (declared(1, int, low=1), 0, "x: 0 is out of range; accepted: at least 1"),
    (declared(1, int, high=3), 4, "x: 4 is out of range; accepted: at most 3"),
    (declared(1.0, float, above=0), 0, "x: 0.0 is out of range; accepted: above 0"),
    (declared(1.0, float, below=1), 1.0, "x: 1.0 is out of range; accepted: below 1"),
    (declared(1.0, float, low=0, below=1), -0.5, "x: -0.5 is out of range; accepted: at least 0 and below 1"),
    (declared(1.0, float, above=0.5, high=2.5), 3, "x: 3.0 is out of range; accepted: above 0.5 and at most 2.5"),
    (declared(1.0, float), float("nan"), "x: nan is out of range; accepted: finite numbers"),
    (declared(1.0, float), float("-inf"), "x: -inf is out of range; accepted: finite numbers"),
    (declared(1.0, float, above=0), float("inf"), "x: inf is out of range; accepted: above 0"),
    (declared(1.0, float), 10**400, "x: a number of more than 30 digits is out of range; accepted: finite numbers"),
    (declared(1, int, low=1), 10**2000, "x: a number of more than 30 digits is out of range; accepted: at least 1"),
    (declared((), "tuple[float, ...]", high=100), [1, 101], "x: 101 is out of range; accepted: at most 100"),
    (declared((), "tuple[float, ...]"), 1.0, "x: 1.0 has the wrong type; accepted: any number of float"),
    (declared((), "tuple[str, ...]"), "ab", "x: 'ab' has the wrong type; accepted: any number of str"),
]


@pytest.mark.parametrize(("one", "value", "words"), REFUSED)
def test_a_refusal_names_the_setting_the_value_and_what_would_do(one: Setting, value: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        one.check(value)
    assert str(caught.value) == words


def test_bounds_in_words() -> None:
    assert declared(1, int).bounds() == ""
    assert declared(1, int, low=1).bounds() == "at least 1"
    assert declared(1, int, above=0, below=1).bounds() == "above 0 and below 1"
    assert declared(1, float, low=1e-8, high=1).bounds() == "at least 1e-08 and at most 1"
    assert declared("a", str, choices=("a", "b")).bounds() == "a, b"


# --- words and TOML
@pytest.mark.parametrize(
    ("one", "word", "expected"),
    [
        (declared(1, int), "7", 7),
        (declared(1.0, float), "7", 7.0),
        (declared(1.0, float), "1e+3", 1000.0),
        (declared(None, "float | None"), " None ", None),
        (declared(None, "str | None"), "none", None),
        (declared("a", str), "none", "none"),
        (declared(False, bool), "Yes", True),
        (declared(False, bool), "0", False),
        (declared(False, bool), "true", True),
        (declared("10%", str, amount=True), "20%", "20%"),
        (declared((), "tuple[float, ...]"), "3, 4.5", (3.0, 4.5)),
        (declared((1,), "tuple[int, ...]"), "7", (7,)),
        (declared((), "tuple[str, ...]"), 'a, "b,c"', ("a", "b,c")),
        (declared((1,), "tuple[int, ...]"), "", ()),
    ],
)
def test_words_of_a_command_line(one: Setting, word: str, expected: Any) -> None:
    found = one.from_word(word)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("one", "word", "words"),
    [
        (declared(1, int), "2.5", "x: '2.5' cannot be used; accepted: a whole number"),
        (declared(1.0, float), "quick", "x: 'quick' cannot be used; accepted: a number"),
        (declared(1.0, float), "none", "x: 'none' cannot be used; accepted: a number"),
        (declared(None, "int | None"), "many", "x: 'many' cannot be used; accepted: a whole number or none"),
        (declared(False, bool), "maybe", "x: 'maybe' cannot be used; accepted: true or false"),
        (declared((), "tuple[float, ...]"), "3,x", "x: 'x' cannot be used; accepted: a number"),
        (declared((), "tuple[float, ...]"), "3\n4", "x: '3\\n4' cannot be used; accepted: a number"),
    ],
)
def test_words_that_cannot_be_read(one: Setting, word: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        one.from_word(word)
    assert str(caught.value) == words


def test_toml_gives_the_value_a_word_gives(tmp_path: Path) -> None:
    known = {
        "lr": declared(0.1, float), "rounds": declared(1, int), "cohort": declared("10%", str, amount=True),
        "epsilon": declared(None, "float | None"), "soft": declared(False, bool),
        "target": declared((), "tuple[float, ...]"),
    }  # fmt: skip
    path = tmp_path / "run.toml"
    lines = ["lr = 1", "rounds = 3", "cohort = 10", 'epsilon = "none"', "soft = true", "target = [50, 60.5]", "own = 3"]
    path.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    values = read_toml(path, known, extra=["own"])
    assert values == {
        "lr": 1.0, "rounds": 3, "cohort": "10", "epsilon": None, "soft": True, "target": (50.0, 60.5), "own": 3
    }  # fmt: skip
    assert [type(values[name]) for name in ("lr", "rounds", "cohort")] == [float, int, str]
    path.write_text("target = 70")
    assert read_toml(path, known) == {"target": (70.0,)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr = true", "lr: True cannot be used; accepted: a number (in {path})"),
        ("rounds = 2.0", "rounds: 2.0 cannot be used; accepted: a whole number (in {path})"),
        ('soft = "yes"', "soft: 'yes' cannot be used; accepted: true or false (in {path})"),
        ("lrr = 1", "lrr: unknown setting in {path}; did you mean lr?"),
        ("zzz = 1", "zzz: unknown setting in {path}; accepted: lr, own, rounds, soft"),
        (f"lr = 1{'0' * 400}", "lr: the number is too large; accepted: up to about 1e308 (in {path})"),
        ('own = "a\\u0000b"', "own: 'a\\x00b' holds a null character; accepted: text without (in {path})"),
    ],
)
def test_a_toml_file_that_is_wrong_is_named(text: str, words: str, tmp_path: Path) -> None:
    known = {"lr": declared(0.1, float), "rounds": declared(1, int), "soft": declared(False, bool)}
    known = {name: Setting(name, one.kind, one.default) for name, one in known.items()}
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_toml(path, known, extra=["own"])
    assert str(caught.value) == words.format(path=path)


def test_files_that_are_no_toml(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config: .*run.toml cannot be read: No such file"):
        read_toml(tmp_path / "run.toml", {})
    (tmp_path / "run.toml").write_text("a = = 1")
    with pytest.raises(InputError, match=r"config: .*run.toml is not TOML: "):
        read_toml(tmp_path / "run.toml", {})
    (tmp_path / "run.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(InputError, match=r"config: .*run.toml is not TOML: .*utf-8"):
        read_toml(tmp_path / "run.toml", {})


# --- classes
class Base(Configurable):
    width: int = setting(3, "how wide", low=1)
    rate: float = setting(0.5, "how fast", above=0)
    shared: ClassVar[int] = 7


class Child(Base):
    rate: float = setting(0.25, "how fast, here", above=0, high=1)
    depth: float | None = setting(None, "how deep")


class Grandchild(Child):
    width = 5
    shared = 8


def test_settings_are_inherited_the_bases_first() -> None:
    assert list(settings_of(Child)) == ["width", "rate", "depth"]
    assert settings_of(Base)["rate"].default == 0.5
    assert (settings_of(Child)["rate"].default, settings_of(Child)["rate"].high) == (0.25, 1)
    assert settings_of(Child)["width"] == settings_of(Base)["width"]
    child = Child(width=4)
    assert child.settings() == {"width": 4, "rate": 0.25, "depth": None}
    assert repr(child) == "Child(width=4, rate=0.25, depth=None)"
    assert Child.shared == 7


def test_a_plain_value_in_a_subclass_is_another_default() -> None:
    assert Grandchild().settings() == {"width": 5, "rate": 0.25, "depth": None}
    assert settings_of(Grandchild)["width"].default == 5
    assert settings_of(Grandchild)["width"].help == "how wide"
    assert Grandchild(width=1).width == 1
    assert Child().width == 3
    assert (Grandchild.shared, Child.shared) == (8, 7)
    with pytest.raises(InputError, match="shared: no setting of Grandchild; accepted: width, rate, depth"):
        Grandchild(shared=9)
    with pytest.raises(InputError, match="width: 0 is out of range; accepted: at least 1"):
        Grandchild(width=0)


def test_what_is_given_is_checked_and_put_into_the_declared_type() -> None:
    child = Child(width=np.int64(2), rate=1)
    assert (type(child.width), type(child.rate)) == (int, float)
    with pytest.raises(InputError, match=r"rate: 1\.5 is out of range; accepted: above 0 and at most 1"):
        Child(rate=1.5)
    with pytest.raises(InputError, match="speed: no setting of Child; accepted: width, rate, depth"):
        Child(speed=3)
    with pytest.raises(InputError, match="widht: no setting of Child; did you mean width"):
        Child(widht=3)
    with pytest.raises(TypeError):
        Child(4)  # type: ignore[misc]


class WithInit(Base):
    """Its own constructor decides what is set, and what it leaves has its default."""

    def __init__(self, times: int = 2) -> None:
        super().__init__(rate=0.1 * times)
        self.times = times


def test_an_own_constructor_stays() -> None:
    made = WithInit(3)
    assert made.times == 3
    assert made.settings() == {"width": 3, "rate": pytest.approx(0.3)}
    with pytest.raises(InputError, match=r"rate: 0\.0 is out of range"):
        WithInit(0)


class Heir(WithInit):
    """A plain subclass."""


class Further(Heir):
    """One more."""


class Declaring(WithInit):
    """The constructor it would inherit cannot take this."""

    height: int = setting(1, "how high", low=1)


class Defaulting(WithInit):
    """Nor of this."""

    width = 5


@pytest.mark.parametrize("kind", [Heir, Further])
def test_a_constructor_that_a_base_has_written_is_inherited(kind: type[WithInit]) -> None:
    made = kind(3)
    assert made.times == 3
    assert made.settings() == {"width": 3, "rate": pytest.approx(0.3)}
    assert kind().times == 2
    with pytest.raises(InputError, match=f"width: no setting of {kind.__name__}; accepted: times"):
        kind(width=4)  # type: ignore[call-arg]
    assert Declaring(height=2, rate=0.2).settings() == {"width": 3, "rate": 0.2, "height": 2}
    assert Defaulting().settings() == {"width": 5, "rate": 0.5}


class Postponed(Configurable):
    """As written under `from __future__ import annotations`: every annotation is text."""

    a: int = setting(1)
    b: float | None = setting(None)
    c: Optional[float] = setting(None)  # noqa: UP045
    d: typing.Optional[int] = setting(None)  # noqa: UP045
    e: bool = setting(False)
    f: str = setting("x")
    g: tuple[float, ...] = setting(())
    h: "int" = setting(2)  # noqa: UP037
    i: ClassVar[int] = 3
    j: typing.ClassVar[int] = 4


def test_annotations_as_text_and_as_types_mean_the_same() -> None:
    as_text = settings_of(Postponed)
    as_types = settings_of(settings_without_future.Immediate)
    assert as_text == as_types
    kinds = {name: (one.kind, one.optional, one.many) for name, one in as_text.items()}
    assert kinds == {
        "a": ("int", False, False), "b": ("float", True, False), "c": ("float", True, False),
        "d": ("int", True, False), "e": ("bool", False, False), "f": ("str", False, False),
        "g": ("float", False, True), "h": ("int", False, False),
    }  # fmt: skip
    assert Postponed(c=1).c == settings_without_future.Immediate(c=1).c == 1.0
    assert type(Postponed(c=1).c) is float
