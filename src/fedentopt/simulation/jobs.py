"""What a person asks for, as runs to do: methods by name, with settings, or as objects; data and models of any kind.

`fedentopt compare` and the Python API both go through here, so that they mean the same.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fedentopt.algorithms import Algorithm
from fedentopt.errors import InputError
from fedentopt.own_code import code_digest, source_digest_of
from fedentopt.selection import Selector
from fedentopt.selection.selector import make_for_run
from fedentopt.settings import settings_of
from fedentopt.simulation.config import FIELDS, PARTS, RunConfig, option_of
from fedentopt.simulation.methods import (
    apply_settings,
    check_algorithm,
    check_seeds,
    check_selector,
    complete,
    parse_method,
)

if TYPE_CHECKING:
    from torch import nn

    from fedentopt.simulation.engine import Task

DEFAULT_METHODS = ("fedavg", "fedentopt", "fedentopt-dp")
DEFAULT_SEEDS = 3
DATASET_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # Digits are learnt in few rounds with larger steps, and a mirrored digit is no digit.
    "digits": {"rounds": 30, "lr": 0.03, "flip": 0.0},
}
"""Settings of a comparison on a data set, where nothing else is said."""


@dataclass(frozen=True)
class Job:
    """One run to do: its config, and objects of the user's own where names do not say everything.

    `label` is the method as the person wrote it. `code` is the digest of the user's code behind the run, None where
    some of it has no source that could be read.
    """

    config: RunConfig
    label: str
    algorithm: Algorithm | None = None
    selector: Callable[[RunConfig], Selector] | None = None
    model: Callable[[int], nn.Module] | None = None
    sources: tuple[Any, ...] = field(default=())

    @property
    def code(self) -> str | None:
        """Digest of the user's own code; empty where there is none."""
        given = [source_digest_of(thing) for thing in self.sources]
        if not all(given):
            return None
        objects = {name for name in self.config.own_code if self._is_object(name)}
        named = code_digest(name for name in self.config.own_code if name not in objects)
        if not given:
            return named
        return hashlib.sha256("\n".join([named, *given]).encode()).hexdigest()

    @property
    def stack_key(self) -> tuple[object, ...]:
        """Jobs with equal keys can share a stack (see `engine.stack_key`)."""
        from fedentopt.simulation.engine import stack_key

        return stack_key(self.task(None))

    def task(self, recorder: Any, code: str = "") -> Task:
        """The job for the engine, with who keeps it and the digest of its own code."""
        from fedentopt.simulation.engine import Task

        return Task(self.config, recorder, self.algorithm, self.selector, self.model, code)

    def _is_object(self, name: str) -> bool:
        return any(name == import_path(thing) for thing in self.sources)


def make_jobs(
    methods: Sequence[Any],
    *,
    settings: Mapping[str, Any],
    own: Mapping[str, Any] | None = None,
    offered: Mapping[str, Any] | None = None,
    seeds: int | Sequence[int] | None = None,
    model: Any = None,
) -> list[Job]:
    """The runs of a comparison: every method with every seed, methods in the order given.

    `settings` are those of all runs; `own` settings of single methods, applied where a method has them and refused
    where none has; `offered` likewise, but of no matter where none has. `epsilon` among the settings is that of the
    methods that ask for noise.
    """
    if isinstance(methods, str) or not isinstance(methods, Sequence):
        raise InputError(f"methods: {methods!r} cannot be used; accepted: a list, such as ['fedavg', 'fedentopt']")
    chosen = _seeds(seeds, settings)
    base = {name: value for name, value in settings.items() if name not in ("seed", "epsilon")}
    factory = None
    if model is not None and not isinstance(model, str):
        if not callable(model):
            raise InputError(f"model: {type(model).__name__}; accepted: a name, package.module:factory, or a callable")
        base["model"], factory = import_path(model), model
    elif model is not None:
        base["model"] = model
    asked = [_Method.read(method) for method in methods]
    if not asked:
        raise InputError("methods: the list is empty; accepted: at least one")
    asked = _with_own(asked, own or {}, offered or {})
    _check_distinct(asked)
    asked = [replace(method, settings=complete(method.settings)) for method in _with_epsilon(asked, settings)]
    for method in asked:
        if factory is not None and "model" in method.explicit:
            raise InputError(f"method: {method.label!r} names a model beside the one given; accepted: one of the two")
    jobs = []
    for method in asked:
        for seed in chosen:
            config = RunConfig.from_dict({**base, **method.settings, "seed": seed})
            sources = (*method.sources, *([factory] if factory is not None else []))
            algorithm = None if method.algorithm is None else copy.deepcopy(method.algorithm)
            jobs.append(Job(config, method.label, algorithm, method.selector, factory, sources))
    return jobs


def import_path(thing: Any) -> str:
    """`module:name` of a class, a function, or an object's class: how a config names it."""
    named = thing if inspect.isclass(thing) or inspect.isroutine(thing) else type(thing)
    return f"{named.__module__}:{named.__qualname__}"


@dataclass(frozen=True)
class _Method:
    """A method as it was asked for."""

    label: str
    settings: dict[str, Any]
    algorithm: Algorithm | None = None
    selector: Callable[[RunConfig], Selector] | None = None
    sources: tuple[Any, ...] = ()
    explicit: frozenset[str] = frozenset()
    """Keys that stand behind the method's name: they are meant for it, and nothing overrides them."""

    @classmethod
    def read(cls, given: Any) -> _Method:
        """From a name, an algorithm or a selector (class or object), or a pair of these."""
        if isinstance(given, str):
            written = re.findall(r"[:,]\s*([A-Za-z_][\w.-]*)=", given)
            return cls(given, parse_method(given), explicit=frozenset(written))
        if isinstance(given, tuple) and len(given) == 2:
            parts = [cls.read(part) for part in given]
            algorithm, selector = parts
            if algorithm.settings["selector"] != "random" or selector.settings["algorithm"] != "fedavg":
                raise InputError(f"method: {given!r} cannot be used; accepted: a pair (algorithm, selector)")
            merged = {**selector.settings, **algorithm.settings, "selector": selector.settings["selector"]}
            merged["epsilon"] = next((p.settings["epsilon"] for p in parts if p.settings["epsilon"] is not None), None)
            return cls(
                f"{algorithm.label}+{selector.label}",
                merged,
                algorithm.algorithm,
                selector.selector,
                (*algorithm.sources, *selector.sources),
                algorithm.explicit | selector.explicit,
            )
        if isinstance(given, Algorithm) or (inspect.isclass(given) and issubclass(given, Algorithm)):
            return cls._algorithm(given() if inspect.isclass(given) else given)
        if isinstance(given, Selector) or (inspect.isclass(given) and issubclass(given, Selector)):
            return cls._selector(given)
        raise InputError(
            f"method: {given!r} cannot be used; accepted: a name such as 'fedprox:mu=0.1', an Algorithm, a Selector, "
            f"or a pair (algorithm, selector)"
        )

    @classmethod
    def _algorithm(cls, given: Algorithm) -> _Method:
        registry = PARTS["algorithm"]
        known = given.name in registry and registry.get(given.name) is type(given)
        name = given.name if known else import_path(given)
        check_algorithm(given, name)
        settings = {"algorithm": name, "selector": "random", "epsilon": None}
        held = given.settings() | {k: v for k, v in vars(given).items() if isinstance(v, str | int | float | bool)}
        settings |= {f"algorithm.{key}": value for key, value in held.items()}
        return cls(repr(given), settings, None if known else given, None, () if known else (given,))

    @classmethod
    def _selector(cls, given: Any) -> _Method:
        registry = PARTS["selector"]
        kind: Any = given if inspect.isclass(given) else type(given)
        known = kind is given and kind.name in registry and registry.get(kind.name) is kind
        name = kind.name if known else import_path(given)
        settings: dict[str, Any] = {"algorithm": "fedavg", "selector": name, "epsilon": None}
        if known:
            return cls(kind.__name__, settings)
        if kind is given:
            declared = {key: one.default for key, one in settings_of(kind).items()}

            def make(config: RunConfig) -> Selector:
                sizes = {"cohort_size": config.cohort_size, "clients": config.clients, "seed": config.seed}
                return check_selector(make_for_run(kind, rounds=config.rounds, **sizes, **config.of("selector")), name)

        else:
            if given.clients:
                raise InputError(f"method: {kind.__name__} has clients registered; accepted: a selector without any")
            fixed = ("selector", "cohort_size", "round", "seed", *given.memory())
            declared = {key: value for key, value in given.state_dict().items() if key not in fixed}

            def make(config: RunConfig) -> Selector:
                if given.cohort_size != config.cohort_size:
                    raise InputError(
                        f"method: {kind.__name__} selects {given.cohort_size} clients, the run {config.cohort_size}; "
                        f"accepted: cohort={given.cohort_size}, or the class"
                    )
                made: Selector = copy.deepcopy(given)
                made.seed = config.seed  # every seed of a comparison draws its own
                return check_selector(made, name)

        settings |= {f"selector.{key}": value for key, value in declared.items()}
        shown = ", ".join(f"{key}={value!r}" for key, value in declared.items() if value is not None)
        return cls(f"{kind.__name__}({shown})" if shown else kind.__name__, settings, None, make, (given,))


def _seeds(seeds: int | Sequence[int] | None, settings: Mapping[str, Any]) -> tuple[int, ...]:
    if seeds is None:
        return (settings["seed"],) if "seed" in settings else tuple(range(DEFAULT_SEEDS))
    if "seed" in settings:
        raise InputError("seeds: was given together with seed; accepted: one of the two")
    try:
        number = seeds if isinstance(seeds, Sequence) else operator.index(seeds)
        listed = [operator.index(seed) for seed in (number if isinstance(number, Sequence) else range(number))]
    except TypeError:
        number, listed = 0, []
    if isinstance(seeds, bool | str) or (isinstance(number, int) and number < 1):
        raise InputError(f"seeds: {seeds!r} is out of range; accepted: how many (3 is 0, 1, 2), or a list of seeds")
    if not listed:
        raise InputError("seeds: the list is empty; accepted: at least one seed")
    return check_seeds(listed)


def with_own(settings: Mapping[str, Any], own: Mapping[str, Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of one method with `own` and, where it has them, `offered` ones worked in."""
    methods = {part: settings.get(part, FIELDS[part].default) for part in PARTS}
    [made] = _with_own([_Method("+".join(methods.values()), {**methods, **settings})], own, offered)
    return complete(made.settings)


def _with_own(methods: list[_Method], own: Mapping[str, Any], offered: Mapping[str, Any]) -> list[_Method]:
    """Methods with the settings of single methods worked in; one of `own` that no method has is refused."""
    used: set[str] = set()
    made = []
    for method in methods:
        mine = {} if method.sources else {**_of_its_own(offered, method.settings), **own}  # an object has its settings
        settings, applied = apply_settings(
            method.settings, {key: value for key, value in mine.items() if key not in method.explicit}
        )
        made.append(replace(method, settings=settings))
        used |= applied | (mine.keys() & method.explicit)
    for key in own:
        if key not in used:
            names = ", ".join(method.label for method in methods)
            raise InputError(f"{key}: no setting of {names}; `fedentopt methods` lists what each method has")
    return made


def _of_its_own(offered: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The options among `offered` that belong to this very method, or to one it is a kind of: another's setting of that
    name is not meant."""
    mine = {}
    for name, value in offered.items():
        found = option_of(name)
        if found is not None and settings[found[0]] == found[1]:
            mine[name] = value
        elif found is not None and serves(name, found[0], settings[found[0]]):
            mine[f"{found[0]}.{found[2].name}"] = value
    return mine


def serves(option: str, part: str, method: str) -> bool:
    """Whether an option of its own is meant for this method: it, or what it is a kind of, declares it."""
    found = option_of(option)
    if found is None or found[0] != part or method not in PARTS[part]:
        return False
    return issubclass(PARTS[part].get(method), PARTS[part].get(found[1])) and found[2].name in PARTS[part].settings(
        method
    )


def _check_distinct(methods: Sequence[_Method]) -> None:
    seen = [tuple(sorted(((key, str(value)) for key, value in method.settings.items()))) for method in methods]
    if len(set(seen)) < len(seen):
        names = ", ".join(method.label for method in methods)
        raise InputError(f"method: {names} names a method more than once; accepted: each once")


def _with_epsilon(methods: list[_Method], settings: Mapping[str, Any]) -> list[_Method]:
    """The budget that all methods with noise share, where one is given."""
    if "epsilon" not in settings:
        return methods
    epsilon = settings["epsilon"]
    private = [method.label for method in methods if method.settings["epsilon"] is not None]
    names = ", ".join(method.label for method in methods)
    if epsilon is not None and not private:
        raise InputError(
            f"epsilon: {epsilon:g} is used by none of {names}; accepted: with a method such as fedentopt-dp"
        )
    if epsilon is None and private:
        raise InputError(f"epsilon: none cannot go with {', '.join(private)}; accepted: a number above 0")
    return [
        method
        if method.settings["epsilon"] is None or "epsilon" in method.explicit
        else replace(method, settings={**method.settings, "epsilon": epsilon})
        for method in methods
    ]
