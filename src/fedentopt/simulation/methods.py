"""From the name of a method to its settings, and from settings to the objects that run.

A method is written `ALGORITHM[+SELECTOR][-dp][:key=value,...]`: `fedavg`, `fedentopt`, `fedprox+fedentopt:mu=0.1`,
`fedentopt-dp:buffer=30%`. A selector alone goes with FedAvg, an algorithm alone with random selection. `-dp`: the
server sees label counts through Laplace noise. Keys are settings of the method, or of the run. One's own code goes by
its import path, with settings of its own behind it: `package.module:algorithm:beta=0.9+package.module:selector`.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from fedentopt.algorithms import AFTER_STEP, ALGORITHMS, IN_GRADIENT, Algorithm, overrides
from fedentopt.algorithms.algorithm import HOOKS
from fedentopt.errors import InputError
from fedentopt.own_code import find_own, is_import_path, make_own
from fedentopt.own_hooks import check_hooks
from fedentopt.selection import NEEDS, SELECTORS, Selector
from fedentopt.selection.own_selectors import check_own_selector
from fedentopt.selection.selector import make_for_run
from fedentopt.settings import Setting, setting, settings_of
from fedentopt.simulation.config import FIELDS, PARTS, RunConfig, option_of

DP_EPSILON = 0.5
"""Privacy budget that `-dp` stands for unless another one is given (the paper's)."""
MOST_SEEDS = 1000
_READ_COUNTS = [cls.name for registry in PARTS.values() for cls in registry if cls.reads_label_counts]
_NOT_BY_METHOD = ("algorithm", "selector", "seed")


def parse_method(name: str) -> dict[str, Any]:
    """The settings of a run (for `RunConfig.from_dict`) that the method called `name` stands for.

    `algorithm`, `selector` and `epsilon` (None without `-dp`) are always among them. Refused: unknown names and keys,
    values that a setting does not take, a key given twice, and `-dp` where nothing of the method looks at label counts.
    """
    text = name.strip()
    pieces = [_Piece(piece) for piece in _split(text)]
    parts = _parts(pieces)
    if parts is None:
        raise InputError(
            f"method: {name!r} is unknown; accepted: an algorithm ({', '.join(ALGORITHMS.names)}), a selector "
            f"({', '.join(SELECTORS.names)}), or both as in fedprox+fedentopt, with -dp behind a selector and "
            f":key=value behind all"
        )
    methods = {part: piece.name if piece else FIELDS[part].default for part, piece in parts.items()}
    private = any(piece.private for piece in pieces)
    if private and not _reads_counts(methods):
        raise InputError(
            f"method: {name!r} adds noise to label counts that it does not use; "
            f"accepted: -dp with {', '.join(_READ_COUNTS)}"
        )
    settings: dict[str, Any] = {**methods, "epsilon": DP_EPSILON if private else None}
    for piece in pieces:
        own = next(part for part, other in parts.items() if other is piece)
        others = [part for part in PARTS if part != own] if piece is pieces[-1] else []
        for key, word in piece.values:
            found = _setting(f"method: {name!r}", key, word, methods, [own, *others])
            if settings.keys() & found.keys() - {"epsilon"}:
                raise InputError(f"method: {name!r} gives {key} more than once; accepted: each setting once")
            settings |= found
    return settings


def apply_settings(settings: dict[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """A method's settings with those of `given` (`--set`, a TOML file's [settings]) that it has, and their names.

    Values are words or of the setting's type. A key that both parts have is refused: behind one of them it is clear.
    `algorithm.lr` is the algorithm's own and nothing else: where it has none, the run's is not meant.
    """
    methods = {part: settings.get(part, FIELDS[part].default) for part in PARTS}
    result, used = dict(settings), set()
    for given_key, value in given.items():
        named, dot, rest = given_key.partition(".")
        only, key = ([named], rest) if dot and named in PARTS else (list(PARTS), given_key)
        owners = [part for part in only if _declared(part, methods[part], key) is not None]
        if len(owners) > 1:
            both = " and ".join(methods[part] for part in owners)
            raise InputError(
                f"set: {key} is a setting of {both}; accepted: it behind one of them, as in NAME:{key}=..., or "
                f"algorithm.{key} and selector.{key}"
            )
        if not owners and given_key not in FIELDS:
            continue
        result |= _setting("set", key, value, methods, owners)
        used.add(given_key)
    return result, used


def settings_for(part: str, kind: type, given: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Those of `given` that a class of this part declares: name and value of the setting, by the key it was given."""
    declared, found = settings_of(kind), {}
    for given_key, value in given.items():
        named, dot, rest = given_key.partition(".")
        key = rest if dot and named == part else given_key
        option = option_of(key)
        name = option[2].name if option is not None and option[:2] == (part, getattr(kind, "name", "")) else key
        if name in declared:
            found[given_key] = (name, _checked(declared[name], value))
    return found


def complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a method with those that own classes declare checked and at their defaults where not given, so that
    one run has one id however it was asked for. Own code that cannot be imported is refused later, when it is made."""
    completed = dict(settings)
    for part in PARTS:
        name = settings.get(part, FIELDS[part].default)
        found = None if name in PARTS[part] or not is_import_path(name) else _own_or_none(part, name)
        if inspect.isclass(found) and issubclass(found, Algorithm | Selector):
            for key, declared in settings_of(found).items():
                given = completed.get(f"{part}.{key}", declared.default)
                completed[f"{part}.{key}"] = declared.check(given)
    return completed


def build_algorithm(config: RunConfig) -> Algorithm:
    """The algorithm a config names; one's own that cannot be honoured is refused by what is wrong with it."""
    settings = config.of("algorithm")
    if config.algorithm in ALGORITHMS:  # where a user may have registered one, too
        made = ALGORITHMS.get(config.algorithm)(**settings)
    else:
        made = _make("algorithm", config, Algorithm, settings)
    return check_algorithm(made, config.algorithm)


def check_algorithm(made: Any, name: str) -> Algorithm:
    """Refuse an own algorithm of the wrong type, or with declarations that contradict each other."""
    if not isinstance(made, Algorithm):
        kind = made.__name__ if isinstance(made, type) else type(made).__name__
        raise InputError(f"algorithm: {name!r} made a {kind}; accepted: an Algorithm")
    hooks = ("mix", "push", "absorb", "step", "evaluated", "groups", "local_loss")
    has = {hook for hook in hooks if overrides(made, hook)}
    for old, now in (
        ("correction", "push() and push_enters"),
        ("judges_soft_labels", "judge()"),
        ("model_vectors", "sends_down and sends_up"),
    ):
        if hasattr(made, old):
            raise InputError(f"algorithm: {name!r} sets {old}, which nothing reads; accepted: {now}")
    check_hooks("algorithm", name, made, Algorithm, HOOKS, in_class=True)
    if made.push_enters not in (IN_GRADIENT, AFTER_STEP):
        raise InputError(
            f"algorithm: {name!r} has push_enters {made.push_enters!r}; accepted: {IN_GRADIENT!r} or {AFTER_STEP!r}"
        )
    for declared in ("server_vectors", "client_vectors", "sends_down", "sends_up"):
        names = getattr(made, declared)
        if not isinstance(names, tuple) or not all(isinstance(one, str) for one in names):
            raise InputError(f"algorithm: {name!r} has {declared} {names!r}; accepted: a tuple of names")
    for sent, kept in (("sends_down", made.server_vectors), ("sends_up", made.client_vectors)):
        if not set(getattr(made, sent)) <= set(kept):
            raise InputError(f"algorithm: {name!r} sends {getattr(made, sent)!r}; accepted: names of {kept!r}")
    if "groups" in has and has & {"push", "absorb", "step", "evaluated"}:
        raise InputError(
            f"algorithm: {name!r} has groups and {', '.join(sorted(has - {'groups', 'mix'}))}; accepted: one of them"
        )
    if "local_loss" in has and overrides(made, "second_stage"):
        raise InputError(f"algorithm: {name!r} has a local_loss and a second stage; accepted: one of them")
    brings = made.own_selector
    if brings is not None and not (inspect.isclass(brings) and issubclass(brings, Selector)):
        raise InputError(f"algorithm: {name!r} has the own_selector {brings!r}; accepted: a class of the kind Selector")
    if made.keeps_models and "local_loss" not in has:
        raise InputError(f"algorithm: {name!r} keeps models for a local_loss that it does not have")
    if made.reads_losses and not has & {"mix", "step", "absorb"}:
        raise InputError(f"algorithm: {name!r} reads losses for a mix, step or absorb that it does not have")
    return made


def build_selector(config: RunConfig, algorithm: Algorithm) -> Selector:
    """The selector of a run: the one its algorithm brings, or the one its config names."""
    sizes = {"cohort_size": config.cohort_size, "seed": config.seed}
    settings = config.of("selector")
    if algorithm.own_selector is not None:
        if config.selector != "random":
            raise InputError(
                f"selector: {config.selector!r} cannot go with {config.algorithm}, which draws its own clients; "
                f"accepted: random"
            )
        brought = algorithm.own_selector(**sizes)
        return check_selector(brought, type(brought).__name__)
    if config.selector in SELECTORS:
        kind = SELECTORS.get(config.selector)
        made = make_for_run(kind, clients=config.clients, rounds=config.rounds, **sizes, **settings)
        return check_selector(made, config.selector)
    return check_selector(_make("selector", config, Selector, settings), config.selector)


def check_set_up(made: Any, name: str) -> None:
    """Refuse an own selector whose constructor has left out the base's."""
    if isinstance(made, Selector) and not hasattr(made, "_table"):
        raise InputError(
            f"selector: {name!r} is not set up; accepted: an __init__ that calls super().__init__(cohort_size, seed, "
            f"**settings)"
        )


def check_selector(made: Any, name: str) -> Selector:
    """Refuse an own selector that lacks a method, or needs what nobody can tell it."""
    if isinstance(made, type):
        raise InputError(f"selector: {name!r} made the class {made.__name__}; accepted: a Selector object")
    check_set_up(made, name)
    lacks = [method for method in ("register", "select", "state_dict", "load_state_dict") if not hasattr(made, method)]
    if lacks:
        raise InputError(
            f"selector: {name!r} made a {type(made).__name__} without {', '.join(lacks)}; accepted: a Selector"
        )
    needs: Any = getattr(made, "needs", frozenset())
    if isinstance(needs, str) or not isinstance(needs, Iterable) or not set(needs) <= NEEDS:
        raise InputError(f"selector: {name!r} needs {needs!r}; accepted: a set of {', '.join(sorted(NEEDS))}")
    if isinstance(made, Selector):
        check_own_selector(made, name)
    result: Selector = made
    return result


def parse_seeds(text: str) -> tuple[int, ...]:
    """Read `0,1,2`, `0-4` or a mixture. Refused: anything but whole numbers, a seed given twice, over 1000."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,15})\s*(?:-\s*([0-9]{1,15})\s*)?", part)
        if not match:
            raise InputError(f"seeds: {text!r} cannot be read; accepted: whole numbers such as 0,1,2 or 0-4")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise InputError(f"seeds: {part.strip()!r} runs backwards; accepted: such as 0-4")
        if last - first >= MOST_SEEDS:
            raise InputError(f"seeds: {part.strip()!r} are too many; accepted: at most {MOST_SEEDS}")
        seeds += range(first, last + 1)
    return check_seeds(seeds, text)


def check_seeds(seeds: Iterable[int], written: str | None = None) -> tuple[int, ...]:
    """Refuse a seed given twice; `written` is how they were given."""
    listed = list(seeds)
    shown = ",".join(map(str, listed)) if written is None else written
    twice = [str(seed) for seed, times in Counter(listed).items() if times > 1]
    if twice:
        raise InputError(f"seeds: {shown!r} gives {', '.join(twice)} more than once; accepted: each seed once")
    return tuple(listed)


def _split(text: str) -> list[str]:
    """The sides of the `+` that joins two methods. One inside a value (`note=a+b`) joins nothing: a name that cannot be
    a selector's stands behind it."""
    for plus in reversed([*re.finditer(r"\+(?=[A-Za-z_])", text)]):
        sides = [text[: plus.start()], text[plus.end() :]]
        name = _Piece(sides[1]).name
        if not _Piece(sides[0]).values or name in SELECTORS or is_import_path(name):
            return sides
    return [text]


class _Piece:
    """One side of a `+`: a name, whether `-dp` stands behind it, and its key=value pairs."""

    def __init__(self, text: str) -> None:
        match = re.fullmatch(r"(.*?)(?::([A-Za-z_][\w.-]*=.*))?", text.strip(), flags=re.DOTALL)
        assert match is not None
        name, tail = match[1].strip(), match[2]
        self.private = name.lower().endswith("-dp")
        name = name[:-3] if self.private else name
        self.name = name if is_import_path(name) else name.lower()
        pairs = re.split(r",(?=\s*[A-Za-z_][\w.-]*=)", tail) if tail else []
        self.values = [(key.strip(), word.strip()) for key, _, word in (pair.partition("=") for pair in pairs)]


def _parts(pieces: list[_Piece]) -> dict[str, _Piece | None] | None:
    """Which piece is the algorithm, which the selector; None where that cannot be."""

    def may_be(part: str, piece: _Piece) -> bool:
        return piece.name in PARTS[part] or is_import_path(piece.name)

    if len(pieces) == 1:
        alone = pieces[0]
        if is_import_path(alone.name):
            found = _own_or_none("method", alone.name)
            picks = inspect.isclass(found) and issubclass(found, Selector)
            return {"algorithm": None, "selector": alone} if picks else {"algorithm": alone, "selector": None}
        for part in PARTS:
            if alone.name in PARTS[part]:
                return {other: alone if other == part else None for other in PARTS}
        return None
    if len(pieces) == 2 and may_be("algorithm", pieces[0]) and may_be("selector", pieces[1]):
        return {"algorithm": pieces[0], "selector": pieces[1]}
    return None


def _own_or_none(part: str, name: str) -> Any:
    """Own code behind a name; None where it cannot be imported, which is said when it is to be used."""
    try:
        return find_own(part, name)
    except InputError:
        return None


def _reads_counts(methods: Mapping[str, str]) -> bool:
    for part, name in methods.items():
        found = PARTS[part].get(name) if name in PARTS[part] else _own_or_none(part, name)
        if getattr(found, "reads_label_counts", part == "selector"):
            return True
    return False


def _setting(where: str, key: str, value: Any, methods: Mapping[str, str], parts: list[str]) -> dict[str, Any]:
    """One setting as `RunConfig.from_dict` takes it: of the first of `parts` that has it, or of the run."""
    for part in parts:
        declared = _declared(part, methods[part], key)
        if declared is not None:
            return {f"{part}.{declared.name}": _checked(declared, value)}
    if key in FIELDS and key not in _NOT_BY_METHOD:
        return {key: _checked(FIELDS[key], value)}
    known = [name for part in parts for name in _all_declared(part, methods[part]) or ()]
    names = "+".join(methods[part] for part in parts if methods[part] != FIELDS[part].default) or "it"
    raise InputError(
        f"{where}: {key} is no setting of {names}; accepted: {', '.join(known) + ', or ' if known else ''}a setting "
        f"of the run, such as lr"
    )


def _checked(declared: Setting, value: Any) -> Any:
    """A value given as a word or as it is, in the setting's type: an own method's 1 is 1.0 before it is digested."""
    return declared.check(declared.from_word(value) if isinstance(value, str) else value)


def _declared(part: str, name: str, key: str) -> Setting | None:
    """The setting `key` (or, for one with an option of its own, that option's name) of a method."""
    known = _all_declared(part, name)
    if known is None:
        return Setting(key, "any", None)  # a factory that takes anything
    if key in known:
        return known[key]
    found = option_of(key)
    return known.get(found[2].name) if found is not None and found[:2] == (part, name) else None


def _all_declared(part: str, name: str) -> dict[str, Setting] | None:
    """The settings of a method, own ones included; None for a factory function that takes any keyword."""
    if name in PARTS[part]:
        return PARTS[part].settings(name)
    factory = find_own(part, name)
    if inspect.isclass(factory) and issubclass(factory, Algorithm | Selector):
        return settings_of(factory)
    known: dict[str, Setting] = {}
    for parameter in list(_parameters(part, name, factory).values())[1:]:
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            return None
        default = None if parameter.default is parameter.empty else parameter.default
        annotation = parameter.annotation if parameter.annotation is not parameter.empty else type(default)
        known[parameter.name] = Setting.of(parameter.name, setting(default), annotation)
    return known


def _parameters(part: str, name: str, factory: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):
        raise InputError(f"{part}: the settings of {name} cannot be told; accepted: a class or a function") from None


def _make(part: str, config: RunConfig, base: type, settings: Mapping[str, Any]) -> Any:
    """Call own code: a class with its settings, a factory function with the run's config and its settings."""
    path = getattr(config, part)
    factory = find_own(part, path)
    other = Selector if base is Algorithm else Algorithm
    if inspect.isclass(factory) and issubclass(factory, other):
        raise InputError(f"{part}: {path!r} is of the kind {other.__name__}; accepted: {base.__name__}")
    if inspect.isclass(factory) and issubclass(factory, base):
        known = settings_of(factory)
        for name in settings:
            if name not in known:
                raise InputError(f"{name}: no setting of {path}; accepted: {', '.join(known) or 'none'}")
        if issubclass(factory, Selector):
            sizes = {"cohort_size": config.cohort_size, "clients": config.clients, "seed": config.seed}
            if "rounds" in inspect.signature(factory.for_run).parameters:
                sizes["rounds"] = config.rounds
            return make_own(part, f"{path}.for_run", **sizes, **settings)
        return make_own(part, path, **settings)
    return make_own(part, path, config, **settings)
