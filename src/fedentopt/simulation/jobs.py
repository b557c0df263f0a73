"""What a person asks for, as runs to do: methods by name, with settings, or as objects; data and models of any kind.

`fedentopt compare` and the Python API both go through here, so that they mean the same.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import inspect
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fedentopt.algorithms import Algorithm
from fedentopt.errors import InputError
from fedentopt.own_code import call_own, code_digest, find_own
from fedentopt.own_objects import held_beside_state, import_path, source_digest_of
from fedentopt.selection import Selector
from fedentopt.selection.selector import make_for_run
from fedentopt.settings import settings_of
from fedentopt.simulation.config import FIELDS, PARTS, RunConfig, known_keys, option_of
from fedentopt.simulation.methods import (
    apply_settings,
    check_algorithm,
    check_seeds,
    check_selector,
    check_set_up,
    complete,
    parse_method,
    settings_for,
)

if TYPE_CHECKING:
    from torch import nn

    from fedentopt.simulation.engine import Task

DEFAULT_METHODS = ("fedavg", "fedentopt", "fedentopt-dp")
DEFAULT_SEEDS = 3
DATASET_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # Digits are learnt in few rounds with larger steps, and a mirrored digit is no digit.
    "digits": {"rounds": 30, "lr": 0.03, "flip": 0.0},
    "mnist": {"flip": 0.0},
}
"""What `run`, `compare` and the API fill in for a data set where nothing else is said. `RunConfig` itself does not, so
that a config means the same whatever stands here."""


def dataset_defaults(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is filled in for the data set that `settings` name, or that a run without a name has."""
    return DATASET_DEFAULTS.get(settings.get("dataset", FIELDS["dataset"].default), {})


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
        objects = set(map(import_path, self.sources))
        names = [name for name in self.config.own_code if name not in objects]
        here = [name for name in names if name.startswith("__main__:")]  # in a script or a notebook, which is no module
        given = [source_digest_of(thing) for thing in (*self.sources, *(find_own("code", name) for name in here))]
        if not all(given):
            return None
        named = code_digest(name for name in names if name not in here)
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
    methods that ask for noise. What the settings leave open is filled in by `dataset_defaults`.
    """
    if isinstance(methods, str) or not isinstance(methods, Sequence):
        raise InputError(f"methods: {methods!r} cannot be used; accepted: a list, such as ['fedavg', 'fedentopt']")
    chosen = _seeds(seeds, settings)
    base = {name: value for name, value in settings.items() if name not in ("seed", "epsilon")}
    factory = None
    if model is not None and not isinstance(model, str):
        if not callable(model):
            raise InputError(f"model: {type(model).__name__}; accepted: a name, package.module:factory, or a callable")
        if hasattr(model, "state_dict") and not inspect.isclass(model):  # every seed starts with weights of its own
            raise InputError(
                f"model: {type(model).__name__} is a model itself; accepted: a function that takes the number of "
                f"classes and returns one"
            )
        base["model"], factory = import_path(model), model
    elif model is not None:
        base["model"] = model
    asked = [_Method.read(method, own or {}, offered or {}) for method in methods]
    if not asked:
        raise InputError("methods: the list is empty; accepted: at least one")
    _check_used(asked, own or {})
    _check_distinct(asked)
    asked = [replace(method, settings=complete(method.settings)) for method in _with_epsilon(asked, settings)]
    for method in asked:
        if factory is not None and "model" in method.explicit:
            raise InputError(f"method: {method.label!r} names a model beside the one given; accepted: one of the two")
    jobs = []
    for method in asked:
        for seed in chosen:
            asked_for = {**base, **method.settings, "seed": seed}
            config = RunConfig.from_dict({**dataset_defaults(asked_for), **asked_for})
            sources = (*method.sources, *([factory] if factory is not None else []))
            algorithm = None if method.algorithm is None else copy.deepcopy(method.algorithm)
            jobs.append(Job(config, method.label, algorithm, method.selector, factory, sources))
    return jobs


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
    used: frozenset[str] = frozenset()
    """Settings of single methods that it has."""
    fixed: bool = False
    """Whether a part of it is an object, which keeps its settings."""

    @classmethod
    def read(cls, given: Any, own: Mapping[str, Any], offered: Mapping[str, Any]) -> _Method:
        """From a name, an algorithm or a selector (class or object), or a pair of these.

        `own` and `offered` settings are worked into what a name or a class leaves open; an object has its own."""
        if isinstance(given, str):
            written = re.findall(r"[:,]\s*([A-Za-z_][\w.-]*)=", given)
            return cls(given, parse_method(given), explicit=frozenset(written)).with_own(own, offered)
        if isinstance(given, tuple) and len(given) == 2:
            parts = [cls.read(part, own, offered) for part in given]
            algorithm, selector = parts
            for key in (algorithm.used - algorithm.explicit) & (selector.used - selector.explicit):
                raise InputError(
                    f"{key}: is a setting of {algorithm.label} and of {selector.label}; accepted: algorithm.{key} and "
                    f"selector.{key}"
                )
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
                algorithm.used | selector.used,
                algorithm.fixed or selector.fixed,
            )
        if inspect.isclass(given) and issubclass(given, Algorithm):
            taken = settings_for("algorithm", given, own)
            made = call_own("algorithm", import_path(given), given, **dict(taken.values()))
            return replace(cls._algorithm(made), used=frozenset(taken))
        if isinstance(given, Algorithm):
            return replace(cls._algorithm(given), fixed=True)
        if inspect.isclass(given) and issubclass(given, Selector):
            taken = settings_for("selector", given, own)
            return replace(cls._selector(given, dict(taken.values())), used=frozenset(taken))
        if isinstance(given, Selector):
            return replace(cls._selector(given, {}), fixed=True)
        raise InputError(
            f"method: {given!r} cannot be used; accepted: a name such as 'fedprox:mu=0.1', an Algorithm, a Selector, "
            f"or a pair (algorithm, selector)"
        )

    def with_own(self, own: Mapping[str, Any], offered: Mapping[str, Any]) -> _Method:
        """The method, known by names, with those settings of single methods that it has."""
        mine = {**_of_its_own(offered, self.settings), **own}
        open_ones = {key: value for key, value in mine.items() if key not in self.explicit}
        settings, applied = apply_settings(self.settings, open_ones)
        return replace(self, settings=settings, used=frozenset(applied | (mine.keys() & self.explicit)))

    @classmethod
    def _algorithm(cls, given: Algorithm) -> _Method:
        registry = PARTS["algorithm"]
        known = given.name in registry and registry.get(given.name) is type(given)
        name = given.name if known else import_path(given)
        check_algorithm(given, name)
        settings = {"algorithm": name, "selector": "random", "epsilon": None}
        held = given.settings() | {k: v for k, v in vars(given).items() if isinstance(v, str | int | float | bool)}
        settings |= {f"algorithm.{key}": value for key, value in held.items()}
        label = repr(given)
        if type(given).__repr__ is Algorithm.__repr__:  # which does not show what is no declared setting
            label = f"{type(given).__name__}({', '.join(f'{key}={value!r}' for key, value in held.items())})"
        return cls(label, settings, None if known else given, None, () if known else (given,))

    @classmethod
    def _selector(cls, given: Any, taken: dict[str, Any]) -> _Method:
        registry = PARTS["selector"]
        kind: Any = given if inspect.isclass(given) else type(given)
        if inspect.isabstract(kind):
            missing = ", ".join(sorted(kind.__abstractmethods__))
            raise InputError(
                f"method: {kind.__name__} does not say how to {missing}; accepted: a class that has {missing}"
            )
        known = kind is given and kind.name in registry and registry.get(kind.name) is kind
        name = kind.name if known else import_path(given)
        settings: dict[str, Any] = {"algorithm": "fedavg", "selector": name, "epsilon": None}
        if known:
            return cls(kind.__name__, settings | {f"selector.{key}": value for key, value in taken.items()})
        if kind is given:
            declared = {key: one.default for key, one in settings_of(kind).items()} | taken

            def make(config: RunConfig) -> Selector:
                sizes = {"cohort_size": config.cohort_size, "clients": config.clients, "seed": config.seed}
                sizes |= {"rounds": config.rounds, **config.of("selector")}
                return check_selector(call_own("selector", f"{name}.for_run", make_for_run, kind, **sizes), name)

        else:
            check_set_up(given, name)
            if given.clients:
                raise InputError(f"method: {kind.__name__} has clients registered; accepted: a selector without any")
            fixed = ("selector", "cohort_size", "round", "seed", *given.memory())
            state = call_own("selector", f"{name}.state_dict", given.state_dict)
            declared = {key: value for key, value in state.items() if key not in fixed}
            held = held_beside_state(given)
            declared |= {key: value for key, value in held.items() if isinstance(value, str | int | float | bool)}

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
    if getattr(seeds, "ndim", 0) == 1:  # an array
        seeds = seeds.tolist()  # type: ignore[union-attr]
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
    """The settings of one method with `own` and, where it has them, `offered` ones worked in, and what they leave open
    filled in by `dataset_defaults`."""
    methods = {part: settings.get(part, FIELDS[part].default) for part in PARTS}
    made = _Method("+".join(methods.values()), {**methods, **settings}).with_own(own, offered)
    _check_used([made], own)
    return {**dataset_defaults(settings), **complete(made.settings)}


def _check_used(methods: Sequence[_Method], own: Mapping[str, Any]) -> None:
    """Refuse a setting that no method has."""
    for key in own:
        if not any(key in method.used for method in methods):
            names = ", ".join(method.label for method in methods)
            fixed = " (an object keeps those it was made with)" if any(method.fixed for method in methods) else ""
            bare = key.partition(".")[2]
            of_run = f" ({bare} alone is one of the run)" if bare in FIELDS else ""
            near = [] if of_run or key in known_keys() else difflib.get_close_matches(key, known_keys(), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError(
                f"{key}: no setting of {names}{fixed}{of_run}{hint}; `fedentopt methods` lists what each method has"
            )


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
    seen: dict[object, str] = {}
    for method in methods:
        meant = tuple(sorted((key, str(value)) for key, value in method.settings.items()))
        if meant in seen:
            both = f"{seen[meant]}, {method.label}"
            told = " (objects of one class are told apart by their plain values)" if method.fixed else ""
            raise InputError(f"method: {both} names a method more than once; accepted: each once{told}")
        if method.label in seen.values():  # results go by it
            raise InputError(f"method: {method.label} is the name of two methods; accepted: a name for each")
        seen[meant] = method.label


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
