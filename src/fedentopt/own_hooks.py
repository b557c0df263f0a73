"""A user's own class beside the contract that it is written for: hooks that nothing would call, or nothing could.

A hook under another name (`local_term`) is no error to Python: the class would run as if nothing were overridden.
A name is taken for a misspelt hook where all of this holds, so that helpers keep their names:

- it is close to a hook that the class does not write itself,
- neither the contract nor a setting has it, and
- no function of the class names it, as one would that calls its own helper.

Nor is one that was put on an object (`made.local_terms = ...`) where hooks are looked for in the class.

Besides (`check_attributes`): things that a class and the one it is joined to both keep under one name.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fedentopt.errors import InputError
from fedentopt.own_names import attributes_named_in, is_users
from fedentopt.settings import settings_of

CLOSE = 0.83  # `local_term` and `absrob` are; `local_steps` beside `local_terms`, `pushed` beside `push` are not
_BY_KEYWORD = ("for_run", "check_run")  # called with what a run has and they ask for; Python says what is missing

IF_NAMED = {"step": "round"}
"""What a hook is given beside its arguments where it has a parameter of that name."""


def check_hooks(
    part: str, name: str, made: Any, contract: type, hooks: Collection[str], *, in_class: bool = False
) -> None:
    """Refuse an object whose class, as far as it is the user's, misspells one of the `hooks` of its `contract`, writes
    a method where a value belongs or the reverse, or a method that takes other arguments than it is given; and one
    that has methods of its own where its class is asked: for class methods, and for all if `in_class`."""
    kinds = [kind for kind in type(made).__mro__ if _is_own(kind, contract)]
    written = {hook for hook in hooks if any(hook in vars(kind) for kind in kinds)}
    for public in _misspelt(kinds, contract):
        near = _nearest(public, [hook for hook in hooks if hook not in written])
        if near:
            raise InputError(
                f"{part}: {name!r} has {public}, which nothing reads; accepted: {near}, or _{public} for a helper"
            )
    for hook in sorted((set(hooks) - written) & getattr(made, "__dict__", {}).keys()):
        ours = inspect.getattr_static(contract, hook)
        # A user's class that has the hook from one of ours is found to have it, and then the object is asked.
        inherited = bool(kinds) and inspect.getattr_static(type(made), hook) is not ours
        if _is_method(ours) and (isinstance(ours, classmethod) or (in_class and not inherited)):
            raise InputError(
                f"{part}: {name!r} has {hook} on the object, where nothing reads it; accepted: a class with a method "
                f"{hook}{_signature(contract, hook)}"
            )
    for hook in sorted(written):
        _check_call(f"{part}: {name!r}", hook, made, contract)


def check_attributes(kind: type, joined: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse a class whose other part keeps something under a name that selection needs: each would find the other's
    there. `joined` are the attributes that the other part made, `now` those of the whole."""
    for name, value in joined.items():
        if now[name] is not value:
            raise InputError(
                f"{kind.__name__}: what selection is joined to keeps something as {name!r}, where selection keeps its "
                "own; accepted: another name for it"
            )


def _is_own(kind: type, contract: type) -> bool:
    """Whether the user wrote a class: in a package of theirs that is installed too, but not a library's mixin."""
    if kind.__module__.partition(".")[0] in ("fedentopt", "builtins"):
        return False
    return issubclass(kind, contract) or is_users(kind.__module__)


def _misspelt(kinds: list[type], contract: type) -> Iterator[str]:
    """Public names of classes that neither the contract nor the classes themselves read."""
    known = {*dir(contract), *attributes_named_in(kinds)}
    for kind in kinds:
        settings = settings_of(kind)
        yield from (key for key in vars(kind) if not (key.startswith("_") or key in known or key in settings))


def _nearest(name: str, hooks: list[str]) -> str | None:
    swapped = [hook for hook in hooks if sorted(hook) == sorted(name)]  # `jugde`, which is far by its ratio
    return next(iter([*swapped, *difflib.get_close_matches(name, hooks, n=1, cutoff=CLOSE)]), None)


def _check_call(where: str, hook: str, made: Any, contract: type) -> None:
    """Refuse a hook that cannot be called, or read, as the contract's is."""
    theirs, ours = inspect.getattr_static(made, hook), inspect.getattr_static(contract, hook)
    if not _is_method(ours):
        if _is_method(theirs):
            raise InputError(f"{where}: {hook} is a method; accepted: a value, or a property")
        return
    if not _is_method(theirs):
        kind = "a setting" if isinstance(theirs, dataclasses.Field) or hook in settings_of(type(made)) else "no method"
        raise InputError(f"{where}: {hook} is {kind}; accepted: a method {hook}{_signature(contract, hook)}")
    if hook in _BY_KEYWORD:
        return
    by_class = isinstance(ours, classmethod)
    try:
        taken = inspect.signature(getattr(type(made) if by_class else made, hook), follow_wrapped=False)
    except (TypeError, ValueError):  # a callable that does not tell
        return
    given = _arguments(contract, hook)
    asked = IF_NAMED.get(hook, "")
    more = {asked: asked} if asked in taken.parameters else {}
    try:
        taken.bind(*given, **more)
    except TypeError as error:
        raise InputError(
            f"{where}: {hook} cannot be called as it is ({error}); accepted: {'a class method ' if by_class else ''}"
            f"{hook}{_signature(contract, hook)}"
        ) from None


def takes(function: Any, name: str) -> bool:
    """Whether a function has a parameter of that name, or hands it on to one that has, as `torch.no_grad` does."""
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters
    except (TypeError, ValueError):  # a callable that does not tell
        return False
    hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return name in parameters or (hands_on and takes(getattr(function, "__wrapped__", None), name))


def _is_method(member: Any) -> bool:
    if isinstance(member, functools.partialmethod | functools.singledispatchmethod):  # methods once they are bound
        return True
    return callable(getattr(member, "__func__", member)) and not inspect.isclass(member)


def _arguments(contract: type, hook: str) -> list[str]:
    """What the contract's own hook takes by place, but for itself."""
    method = inspect.getattr_static(contract, hook)
    return list(inspect.signature(getattr(method, "__func__", method)).parameters)[1:]


def _signature(contract: type, hook: str) -> str:
    return f"({', '.join(_arguments(contract, hook))})"
