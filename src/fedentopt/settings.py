"""Settings: declared once, beside what they set, with their help and bounds; read from words, TOML and Python alike.

    mu: float = setting(1e-4, help="weight of the proximal term", low=0)

A class that declares settings this way (`RunConfig`, every algorithm, every selector, a user's own ones) has its
command-line options, TOML keys, rows in the docs and part of a run's identity made from them. A value comes out in the
type that was declared, so that the same run gets the same id whichever way it was asked for (`lr = 1`, `--lr 1.0`).
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
import functools
import inspect
import math
import re
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, dataclass_transform

from fedentopt.errors import InputError

WORDS = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}
_TYPES: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}


def setting(
    default: Any,
    help: str = "",
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
    amount: bool = False,
    option: str | None = None,
) -> Any:
    """Declare a setting in a class body; the annotation gives its type (int, float, str, bool, any of them | None, or
    any number of one of them: `tuple[float, ...]`).

    `low` and `high` are the least and most values accepted, `above` and `below` bounds that are not; `choices` the
    words accepted. `amount`: a number of clients (10) or a per cent of them ("10%"). `option`: the name of a
    command-line option of its own and of the key in a run's settings; without, `--set NAME=VALUE` sets it.
    """
    rule = {"low": low, "high": high, "above": above, "below": below}
    metadata = {"help": help, "rule": rule, "choices": tuple(choices), "amount": amount, "option": option}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Setting:
    """One declared setting. `kind` is the type of a value; `optional`: None is one; `many`: any number of values."""

    name: str
    kind: str
    default: Any
    help: str = ""
    optional: bool = False
    many: bool = False
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    amount: bool = False
    option: str | None = None

    @classmethod
    def of(cls, name: str, field: dataclasses.Field[Any], annotation: Any = None) -> Setting:
        """The setting that a dataclass field declares."""
        kind, optional, many = _read_annotation(field.type if annotation is None else annotation)
        about = field.metadata
        default = None if field.default is dataclasses.MISSING else field.default
        return cls(
            name, kind, default, about.get("help", ""), optional, many, **about.get("rule", {}),
            choices=about.get("choices", ()), amount=about.get("amount", False), option=about.get("option"),
        )  # fmt: skip

    def check(self, value: Any) -> Any:
        """The value in the setting's type; one of another type, or out of its bounds, is refused."""
        if not self.many:
            return self._check_one(value)
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise InputError(f"{self.name}: {value!r} has the wrong type; accepted: any number of {self.kind}")
        return tuple(self._check_one(one) for one in value)

    def from_word(self, word: str) -> Any:
        """The value that a word of a command line stands for; `none` where the setting may be left open. Any number of
        values have commas between them, and those that hold one themselves quotes around them, as in a CSV file."""
        if not self.many:
            return self._from_word(word)
        try:
            parts = [part for line in csv.reader([word.strip()], skipinitialspace=True) for part in line]
        except csv.Error:  # several lines
            raise self._unreadable(word) from None
        return tuple(self._from_word(part) for part in parts)

    def _from_word(self, word: str) -> Any:
        if self.optional and word.strip().lower() == "none":
            return None
        if self.kind == "bool":
            truth = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
            if word.strip().lower() in truth:
                return truth[word.strip().lower()]
            raise self._unreadable(word)
        try:
            return _TYPES.get(self.kind, str)(word)
        except ValueError:
            raise self._unreadable(word) from None

    def from_toml(self, value: Any) -> Any:
        """The value that a TOML value stands for; whole numbers pass as numbers, and `"none"` as in `from_word`."""
        if self.many:
            return tuple(self._from_toml(one) for one in (value if isinstance(value, list) else [value]))
        return self._from_toml(value)

    def bounds(self) -> str:
        """What is accepted, in words; empty where everything of the type is."""
        if self.choices:
            return ", ".join(self.choices)
        low = (
            f"above {self.above:g}"
            if self.above is not None
            else f"at least {self.low:g}"
            if self.low is not None
            else ""
        )
        high = (
            f"below {self.below:g}"
            if self.below is not None
            else f"at most {self.high:g}"
            if self.high is not None
            else ""
        )
        return " and ".join(part for part in (low, high) if part)

    def _from_toml(self, value: Any) -> Any:
        if self.optional and value == "none":
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if self.kind == "float" and number:
            return float(value)
        if self.amount and number:
            return str(value)  # `cohort = 10` beside `cohort = "10%"`
        if type(value) is _TYPES.get(self.kind, type(value)):
            return value
        raise self._unreadable(value)

    def _check_one(self, value: Any) -> Any:
        if self.optional and value is None:
            return None
        value = self._typed(value)
        if self.choices and value not in self.choices:
            raise InputError(f"{self.name}: {value!r} is unknown; accepted: {', '.join(self.choices)}")
        if isinstance(value, int | float) and not isinstance(value, bool) and not self._within(value):
            raise self._out_of_range(value)
        return value

    def _typed(self, value: Any) -> Any:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of NumPy's
            return self._typed(value.item())
        if self.kind == "float" and number:
            try:
                return float(value)
            except OverflowError:  # a whole number that no float can hold
                raise self._out_of_range(value) from None
        if self.amount and number and isinstance(value, int):
            return str(value)
        if self.kind not in _TYPES or type(value) is _TYPES[self.kind]:
            return value
        words = "a whole number, or a per cent such as '10%'" if self.amount else self.kind
        words += " or nothing" if self.optional else ""
        raise InputError(f"{self.name}: {value!r} has the wrong type; accepted: {words}")

    def _within(self, value: float) -> bool:
        return (
            abs(value) <= sys.float_info.max  # not so for infinity, NaN, and whole numbers that no float can hold
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def _out_of_range(self, value: float) -> InputError:
        long = isinstance(value, int) and abs(value) >= 10**30
        shown = "a number of more than 30 digits" if long else f"{value:g}" if self.many else repr(value)
        return InputError(f"{self.name}: {shown} is out of range; accepted: {self.bounds() or 'finite numbers'}")

    def _unreadable(self, value: Any) -> InputError:
        accepted = WORDS.get(self.kind, self.kind) + (" or none" if self.optional else "")
        return InputError(f"{self.name}: {value!r} cannot be used; accepted: {accepted}")


def settings_of(cls: type) -> dict[str, Setting]:
    """The settings that a class and its bases declare, by name, the bases' first."""
    return _declared_by(cls)


def _collect(cls: type) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for base in reversed(cls.__mro__):
        for name, annotation in _annotations(base).items():
            field = vars(base).get(name)
            if not isinstance(field, dataclasses.Field):
                field = vars(base).get("__dataclass_fields__", {}).get(name)
            if isinstance(field, dataclasses.Field) and "ClassVar" not in str(annotation):
                found[name] = Setting.of(name, field, annotation)
        for name in found.keys() & vars(base).keys() - _annotations(base).keys():  # `mu = 0.1` is another default
            found[name] = dataclasses.replace(found[name], default=vars(base)[name])
    for base in reversed(cls.__mro__):
        for name, field in vars(base).get("run_settings", {}).items():
            found[name] = Setting.of(name, field, type(field.default))
    return found


# Asked for every run of a sweep, and a class does not change.
_declared_by: Callable[[type], dict[str, Setting]] = functools.cache(_collect)


class KnownKeywords:
    """A class that refuses keyword arguments which its constructor does not take, naming them and those it takes."""

    def __new__(cls, *arguments: Any, **given: Any) -> Self:
        try:
            inspect.signature(cls.__init__).bind(None, *arguments, **given)
        except TypeError:
            taken = _keywords(cls)
            for name in given:
                if name not in taken:
                    raise unknown_keyword(cls, name) from None
        return super().__new__(cls)  # whatever else is wrong with the call, Python says


def unknown_keyword(cls: type, name: str) -> InputError:
    """The refusal of a keyword argument."""
    taken = [keyword for keyword in _keywords(cls) if keyword != name]
    near = difflib.get_close_matches(name, taken, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return InputError(f"{name}: no setting of {cls.__name__}{hint}; accepted: {', '.join(taken) or 'none'}")


def _keywords(cls: type) -> list[str]:
    """What a constructor takes by name: the settings of the class first, then what its signature names beside them. One
    that takes any keyword hands on those that it does not name to the constructor of a base."""
    named: list[str] = []
    open_ended = True
    for base in cls.__mro__:
        if open_ended and "__init__" in vars(base):
            parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
            named += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
            open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    beyond = getattr(cls, "run_settings", {})  # which are no arguments
    declared = [name for name in settings_of(cls) if name in named or (open_ended and name not in beyond)]
    return list(dict.fromkeys([*declared, *named]))


def _inherits_constructor(cls: type) -> bool:
    """Whether the constructor that a class would inherit is written out, not one that `dataclass` has made."""
    kinds = [kind for kind in cls.__mro__ if issubclass(kind, Configurable) and "__init__" in vars(kind)]
    code = getattr(vars(kinds[0])["__init__"], "__code__", None) if kinds else None
    return bool(kinds) and not getattr(code, "co_qualname", "").startswith("__create_fn__")


@dataclass_transform(kw_only_default=True, field_specifiers=(setting,))
class Configurable(KnownKeywords):
    """A class whose settings are its constructor's keyword arguments, checked; subclasses only declare them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        declared: Iterable[dataclasses.Field[Any]] = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
        inherited = {field.name: field for field in declared}
        for name in inherited.keys() & vars(cls).keys() - _annotations(cls).keys():  # `mu = 0.1` is another default
            field = inherited[name]
            cls.__annotations__[name] = field.type
            setattr(cls, name, dataclasses.field(default=vars(cls)[name], metadata=field.metadata))
        # A constructor that a base has written is inherited, as by any class; but it cannot know what is declared here.
        declares = any(isinstance(vars(cls).get(name), dataclasses.Field) for name in _annotations(cls))
        inherits = not declares and _inherits_constructor(cls)
        dataclasses.dataclass(kw_only=True, eq=False, repr=False, init=not inherits)(cls)

    def __post_init__(self) -> None:
        for name, declared in settings_of(type(self)).items():
            setattr(self, name, declared.check(getattr(self, name)))

    def settings(self) -> dict[str, Any]:
        """Values by name, of all that is declared."""
        return {name: getattr(self, name) for name in settings_of(type(self))}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.settings().items())})"


def amount(text: str | int, total: int, name: str) -> int:
    """Read a number of clients or a per cent of `total` (floored): "10", 10 or "10%". More than 100 % is refused."""
    raw = str(text).strip()
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)%", raw)
    if match:
        if float(match[1]) > 100:
            raise InputError(f"{name}: {text!r} is more than all clients; accepted: at most 100%")
        # 1e-9 keeps 29 % of 100 at 29 where binary fractions would floor it to 28.
        return math.floor(float(match[1]) * total / 100 + 1e-9)
    if re.fullmatch(r"\d{1,18}", raw):
        return int(raw)
    shown = f"{text!r}" if len(raw) < 60 else f"{raw[:20]!r}... ({len(raw)} characters)"
    raise InputError(f"{name}: {shown} is neither a number of clients (10) nor a per cent of them (10%)")


def read_toml(path: Path, known: Mapping[str, Setting], extra: Iterable[str] = ()) -> dict[str, Any]:
    """Read a file of `name = value`; its values get the types of the `known` settings, those named in `extra` are
    handed on as they are.

    Refused, naming the file: one that cannot be read, a key that is not known, a value of the wrong type.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        table = tomllib.loads(text)
    except OSError as error:
        raise InputError(f"config: {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError
        raise InputError(f"config: {path} is not TOML: {error}") from error
    accepted = [*known, *extra]
    values = {}
    for key, value in table.items():
        if key not in accepted:
            near = difflib.get_close_matches(key.replace("-", "_"), accepted, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; accepted: {', '.join(sorted(accepted))}"
            if "settings" in extra:
                hint += "; a setting that only some methods have stands under [settings]"
            raise InputError(f"{key}: unknown setting in {path}{hint}")
        if isinstance(value, str) and "\0" in value:  # a command line cannot hold it, and no path may
            raise InputError(f"{key}: {value!r} holds a null character; accepted: text without (in {path})")
        try:
            values[key] = known[key].from_toml(value) if key in known else value
        except OverflowError as error:  # a whole number that no float can hold
            raise InputError(f"{key}: the number is too large; accepted: up to about 1e308 (in {path})") from error
        except InputError as error:
            raise InputError(f"{error} (in {path})") from error
    return values


def _annotations(cls: type) -> dict[str, Any]:
    return inspect.get_annotations(cls)


def _read_annotation(annotation: Any) -> tuple[str, bool, bool]:
    """Type of one value, whether None is one, whether there may be many; from an annotation or its text."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        names = [getattr(part, "__name__", str(part)) for part in typing.get_args(annotation)]
        text = " | ".join("None" if name == "NoneType" else name for name in names)
    else:
        text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
        if typing.get_origin(annotation) is tuple:
            text = f"tuple[{getattr(typing.get_args(annotation)[0], '__name__', 'str')}, ...]"
    text = text.strip("'\" ")
    optional = re.fullmatch(r"(?:\w+\.)?Optional\[(.*)\]", text)
    text = f"{optional[1]} | None" if optional else text
    if text.startswith("tuple["):
        return text.removeprefix("tuple[").partition(",")[0], False, True
    options = [option.strip() for option in text.split("|")]
    kinds = [option for option in options if option != "None"]
    return (kinds or ["str"])[0], "None" in options, False
