"""A user's own classes, functions and objects, handed over as they are: known again by source and values."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import linecache
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import Field
from enum import Enum
from pathlib import Path, PurePath
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from fedentopt.own_code import code_digest
from fedentopt.own_names import attributes_named_in, functions_behind, is_users, made_from, read_by

_TOLD_BY_REPR = (bytes, complex, range, PurePath, Enum, np.generic, np.dtype)


def source_digest_of(thing: Any) -> str:
    """SHA-256 of the source of a class, function or object's class, with its bases outside this package, of what an
    object holds, of the values that what is written inside a function was made with, and of what the user's own global
    names stand for that the code reads: values, functions and classes with all that these read, modules. Where such
    a value cannot be told from others, the file that makes it counts. Empty where there is no source to read, or what
    is held or was given cannot be told. A `functools.partial` counts as its function with these arguments, a method as
    its function with its object."""
    return _digest_of(thing, [])


def _digest_of(thing: Any, met: list[Any]) -> str:
    """`source_digest_of`; `met` are the classes, functions and objects on the way to it, which may lead back."""
    try:
        if isinstance(thing, functools.partial):
            return _digest_with(thing.func, [thing.args, thing.keywords], met)
        if inspect.ismethod(thing):
            return _digest_with(thing.__func__, thing.__self__, met)
        cls = _code_of(thing)
        kinds = [cls]
        if inspect.isclass(cls):
            typed_in = cls.__module__ == "builtins"  # as a class is that was made without a module of its own
            kinds = [base for base in cls.__mro__ if _is_own(base) or (typed_in and base is cls)]
        met += [thing, *kinds]
        held = [_text(_state(thing), met)] if thing is not cls else []
        digest = hashlib.sha256("".join([*held, *(_text(_made_with(kind), met) for kind in kinds)]).encode())
    except (TypeError, ValueError, RecursionError):
        return ""
    for kind in kinds:
        try:
            source = inspect.getsource(kind)
        except (OSError, TypeError):
            source = _source_in_a_cell(kind)
        if not source:
            return ""
        digest.update(source.encode() + b"\0")
        try:
            taken = _text(_taken(kind, source), met)
        except (TypeError, ValueError, RecursionError):
            taken = _file_digest(kind.__module__)
            if not taken:
                return ""
        digest.update(taken.encode())
    return digest.hexdigest()


def _digest_with(function: Any, values: Any, met: list[Any]) -> str:
    """That of a function together with values that it will be called with; empty without a source."""
    source = _digest_of(function, met)
    return hashlib.sha256(f"{source} {_text(values, met)}".encode()).hexdigest() if source else ""


def _source_in_a_cell(kind: Any) -> str:
    """The source of a class of a notebook, whose module is no file, from where its functions were written; empty for
    anything else, and for a class without functions."""
    for function in _functions_of(kind) if inspect.isclass(kind) else ():
        code = function.__code__
        lines = linecache.getlines(code.co_filename)
        with suppress(SyntaxError):
            for node in ast.walk(ast.parse("".join(lines))):
                if not isinstance(node, ast.ClassDef) or node.name != kind.__name__:
                    continue
                if node.lineno <= code.co_firstlineno <= (node.end_lineno or 0):
                    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                    return "".join(lines[first - 1 : node.end_lineno])
    return ""


def _functions_of(kind: type) -> Iterator[FunctionType]:
    """The functions written in the body of a class; not those made for it, or written elsewhere."""
    for function in (one for member in vars(kind).values() for one in functions_behind(member)):
        code = function.__code__
        if code.co_qualname == f"{kind.__qualname__}.{code.co_name}":
            yield function


def _taken(kind: Any, source: str) -> dict[str, Any]:
    """What a function or class takes from the user's own global names."""
    functions = list(_functions_of(kind)) if inspect.isclass(kind) else [inspect.unwrap(kind)]
    taken = {f"{at} {function.__name__}": read_by(function) for at, function in enumerate(functions)}
    if "<locals>" not in kind.__qualname__ or kind.__name__ == "<lambda>":  # else `_made_with` has them
        taken["made from"] = made_from(kind, source)
    return {name: values for name, values in taken.items() if values}


def _file_digest(module: str) -> str:
    """Of the file, and those beside it that it imports, where all global names of a module come from; a notebook has
    none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or not Path(file).is_file():
        return ""
    return code_digest([f"{module}:all"]) or hashlib.sha256(Path(file).read_bytes()).hexdigest()


def held_beside_state(thing: Any) -> dict[str, Any]:
    """What an object of the user's with a `state_dict` holds beside it: attributes that the code of its class names."""
    state = thing.state_dict()
    named = attributes_named_in([kind for kind in type(thing).__mro__ if _is_own(kind)])
    others = (*state, "_round", "_table")  # a selector's own
    return {name: value for name, value in vars(thing).items() if name in named and name not in others}


def _state(thing: Any) -> Any:
    """What an object holds; refused with a TypeError where Python cannot say."""
    if hasattr(thing, "_modules"):  # of torch, such as a loss function, whose settings are no part of its state
        return vars(thing)
    if hasattr(thing, "state_dict"):
        beside = held_beside_state(thing)
        return [thing.state_dict(), beside] if beside else thing.state_dict()
    kind: Any = type(thing)
    if kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__:
        raise TypeError(f"{kind.__name__} has a state of its own")
    _, (_, *given), state, *items = thing.__reduce_ex__(2)  # slots, and what a tuple, list or dict holds, too
    beyond = [given, *(list(each) for each in items if each is not None)]
    return [state, *beyond] if any(beyond) else state


def _made_with(kind: Any) -> Any:
    """The values that are in a function or a class and that its source alone does not tell, since the function in which
    it is written gave them: those closed over, defaults and, of a class, attributes."""
    if not inspect.isclass(kind):
        return _given(kind)
    if "<locals>" not in kind.__qualname__:
        return {}
    written = list(_functions_of(kind))
    attributes = {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith(("__", "_abc_"))  # Python's own
        and not isinstance(value, Field)  # a setting, which is part of a run's config
        and not (_is_access(value) or any(value is function for function in written))
    }
    given = {f"{at} {function.__qualname__}": _given(function) for at, function in enumerate(written)}
    return {name: values for name, values in {**given, "": attributes}.items() if values}


def _is_access(member: Any) -> bool:
    """Whether a member of a class only leads to functions, which are looked at themselves, or to a slot's value."""
    made = type(member).__module__ in ("builtins", "_collections") and inspect.isdatadescriptor(member)
    return made or isinstance(member, classmethod | staticmethod | functools.cached_property)


def _given(function: Any) -> list[Any]:
    """What a function has closed over, and the defaults of one written inside another."""
    function = inspect.unwrap(function, stop=inspect.isfunction)
    values = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    if "<locals>" in getattr(function, "__qualname__", ""):
        values += [one for one in (function.__defaults__, function.__kwdefaults__) if one]
    return values


def _text(held: Any, met: list[Any]) -> str:
    """Plain values as text; refused with a TypeError or ValueError where there are others."""
    return json.dumps(held, sort_keys=True, default=functools.partial(_known_again, met=met)) if held else ""


def _known_again(value: Any, met: list[Any]) -> Any:
    """A value that JSON does not know as one that it does."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, ModuleType):
        name = value.__name__
        return f"{name} {code_digest([f'{name}:all'])}" if is_users(name) else name
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return f"{value.dtype.descr} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    name = import_path(value)
    if name == "torch:Tensor" and str(value.layout) == "torch.strided" and not (value.is_meta or value.is_quantized):
        held = value.detach().cpu().contiguous().flatten().view(sys.modules["torch"].uint8)
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(held.numpy()).hexdigest()}"
    if isinstance(value, _TOLD_BY_REPR) or name in ("torch:dtype", "torch:device"):
        return f"{name} {value!r}"
    for number, one in enumerate(met):
        if one is value:
            return f"{name} {number}"
    digest = _digest_of(value, met) if type(value) is not object else ""
    told = f"{name} {digest}" if digest else _installed_as(value)
    if not told:
        raise TypeError(f"{type(value).__name__} cannot be told from others")
    return told


def _installed_as(thing: Any) -> str:
    """`module:name` of something without source that a library, or Python itself, has under the name it gives."""
    name = str(getattr(thing, "__qualname__", getattr(thing, "__name__", "")))
    home = getattr(thing, "__module__", None) or type(thing).__module__
    module = sys.modules.get(home)
    found = getattr(module, "__spec__", None) is not None and getattr(module, name, None) is thing
    return f"{home}:{name}" if found else ""


def import_path(thing: Any) -> str:
    """`module:name` of a class, a function, or an object's class: how a config names it."""
    named = _code_of(thing)
    return f"{named.__module__}:{named.__qualname__}"


def _code_of(thing: Any) -> Any:
    """A class or function itself, of an object its class."""
    routine = inspect.isroutine(thing) and hasattr(thing, "__qualname__")  # not an object that only has `__get__`
    return thing if inspect.isclass(thing) or routine else type(thing)


def _is_own(cls: type) -> bool:
    return cls.__module__.partition(".")[0] not in ("fedentopt", "builtins", "abc", "typing", "torch")
