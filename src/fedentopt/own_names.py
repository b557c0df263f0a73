"""What a user's function or class takes from the module, or the notebook, in which it is written: the names that it
reads there, and the values that such names had when it was made."""

from __future__ import annotations

import ast
import dis
import inspect
import logging
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import Field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

_LIBRARIES = frozenset(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_ADDING = ("append", "extend", "insert", "add", "update", "setdefault")


def read_by(function: Any) -> dict[str, Any]:
    """The values of the user's global names that the body of a function of theirs reads."""
    if not isinstance(function, FunctionType) or not is_users(function.__module__):
        return {}
    space = function.__globals__
    return {name: space[name] for name in sorted(set(_global_names(function.__code__))) if _has(space, name)}


def made_from(kind: Any, source: str) -> dict[str, Any]:
    """The defaults of a function, and the attributes of a class, that its source takes from names of the user's; of a
    lambda all defaults, and its place in a line that holds several."""
    if not is_users(kind.__module__):
        return {}
    if getattr(kind, "__name__", "") == "<lambda>":
        place = _column(kind.__code__) if source.count("lambda") > 1 else None
        return {name: value for name, value in (("place", place), ("", kind.__defaults__)) if value}
    try:
        [node] = ast.parse(textwrap.dedent(source)).body
    except (SyntaxError, ValueError):
        return {}
    if not isinstance(node, ast.ClassDef):
        return {"": given} if (given := _defaults(kind, node)) else {}
    written, members = [one for one in node.body if isinstance(one, ast.FunctionDef)], vars(kind)
    defaults = {one.name: given for one in written if (given := _defaults(members.get(one.name), one))}
    space = getattr(sys.modules.get(kind.__module__), "__dict__", {})
    attributes = {name: members[name] for name in _assigned(node, space) if name in members}
    return defaults | {name: value for name, value in attributes.items() if not isinstance(value, Field)}  # a setting


def attributes_named_in(kinds: list[type]) -> set[str]:
    """All names in the functions of these classes: those of the attributes that they set or read are among them."""
    functions = (one for kind in kinds for member in vars(kind).values() for one in functions_behind(member))
    return {name for one in functions for name in _all_names(one.__code__)}


def functions_behind(member: Any) -> Iterator[FunctionType]:
    """The functions that a member of a class is made of: those of a method or a property, and what is decorated too."""
    inside = (getattr(member, name, None) for name in ("fget", "fset", "fdel", "__func__", "func"))
    for one in (member, *inside):
        written = inspect.unwrap(one)
        if isinstance(one, FunctionType):
            yield one
        if isinstance(written, FunctionType) and written is not one:
            yield written


def is_users(module: str | None) -> bool:
    """Whether a module is the user's: a notebook, a script or a file of theirs, and no library."""
    if module is None or module.partition(".")[0] in ("fedentopt", "builtins"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module == "__main__" or module not in sys.modules
    path = Path(file)
    inside = any(folder in path.parents for folder in _LIBRARIES)
    return not inside and not {"site-packages", "dist-packages"} & set(path.parts)


def _has(space: Mapping[str, Any], name: str) -> bool:
    """Whether a name is there, and stands for something of the user's: a value, or code that is no library's."""
    value = space.get(name)
    if isinstance(value, ModuleType):
        return is_users(value.__name__)
    if inspect.isclass(value) or inspect.isroutine(value):
        return is_users(value.__module__)
    return name in space and not name.startswith("__") and not isinstance(value, logging.Logger)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A piece of code, and those written inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _all_names(code: CodeType) -> Iterator[str]:
    for one in _codes(code):
        yield from one.co_names


def _global_names(code: CodeType) -> Iterator[str]:
    """Global names that code reads; not those that it sets itself, nor lists and the like that it only adds to, such as
    notes on how training went: they are other ones after every run."""
    steps = [step for one in _codes(code) for step in dis.get_instructions(one)]
    own = {step.argval for step in steps if step.opname == "STORE_GLOBAL"}
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        added_to = after is not None and after.opname in ("LOAD_METHOD", "LOAD_ATTR") and after.argval in _ADDING
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval not in own and not added_to:
            yield step.argval


def _column(code: CodeType) -> int:
    """Where in its line a lambda's body begins."""
    return min((column for _, _, column, _ in code.co_positions() if column), default=0)


def _defaults(function: Any, node: ast.stmt) -> list[Any]:
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, FunctionType) or not isinstance(node, ast.FunctionDef):
        return []
    written = [*node.args.defaults, *(one for one in node.args.kw_defaults if one is not None)]
    taken = any(_takes(one, function.__globals__) for one in written)
    return [one for one in (function.__defaults__, function.__kwdefaults__) if one] if taken else []


def _assigned(node: ast.ClassDef, space: Mapping[str, Any]) -> Iterator[str]:
    for one in node.body:
        if isinstance(one, ast.Assign | ast.AnnAssign) and one.value is not None and _takes(one.value, space):
            for target in one.targets if isinstance(one, ast.Assign) else [one.target]:
                yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def _takes(node: ast.expr, space: Mapping[str, Any]) -> bool:
    """Whether an expression takes anything from names of the user's."""
    return any(_has(space, name.id) for name in ast.walk(node) if isinstance(name, ast.Name))
