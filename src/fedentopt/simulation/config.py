"""One experiment as data: every setting that decides a run's numbers, and nothing that does not.

Where a run executes (device, trainer, workers, folders) is not part of it, so the same config gives the same
run id on every machine.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedentopt.algorithms import ALGORITHMS
from fedentopt.audit import POLICIES
from fedentopt.errors import InputError
from fedentopt.own_code import is_import_path
from fedentopt.partition import FORMS
from fedentopt.partition import parse as parse_partition
from fedentopt.registry import Registry
from fedentopt.selection import SELECTORS
from fedentopt.settings import Setting, amount, setting, settings_of
from fedentopt.simulation.lies import LIES

SMALL_DATASETS = ("digits", "brain-tumor-mri")  # where a minimum of 10 samples per client is never met
PARTS: dict[str, Registry[Any]] = {"algorithm": ALGORITHMS, "selector": SELECTORS}
"""The two parts of a method, and who knows them by name."""
LATER = (
    "speed_spread", "averaging", "validation", "client_accuracy", "audit", "size_cap", "server_images", "liars", "lie",
    "initialisation",
)  # fmt: skip
"""Fields that came after runs had been published: at their defaults they leave a run's identity as it was."""
LATER_OF_METHODS = {
    "selector.release": "fifo", "scaffold_start": "zero", "scaffold_divisor": "clients",
    "fednova_normaliser": "momentum",
}  # fmt: skip
"""The same for settings of methods, with their defaults."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run. Field help texts are the command line's help texts.

    `settings` are the algorithm's and the selector's own, by name (`{"mu": 0.1}`); where both have one of a name,
    `algorithm.NAME` and `selector.NAME` tell them apart.
    """

    dataset: str = setting(
        "digits", "data set: a name from `fedentopt data list`, an .npz file, or a folder of class folders"
    )
    fine_labels: bool = setting(False, "cifar100: the 100 fine labels instead of the 20 coarse ones")
    image_size: int | None = setting(None, "side of the square images (default: 32, medical data sets 224)", low=8)
    partition: str = setting("dir:0.1", f"how the data lies among the clients: {FORMS}")
    min_samples: int | None = setting(
        None,
        "fewest samples a client may get under dir:BETA and quantity:BETA (default 10; 1 for digits and "
        "brain-tumor-mri)",
        low=0,
    )
    clients: int = setting(100, "number of clients, K (under natural: as many as the data names)", low=1)
    validation: float = setting(
        0.0, "share of each client's training data that is held out and evaluated like the test split", low=0, below=1
    )
    model: str = setting(
        "lenet5",
        "lenet5, vgg11, vgg11-bn, efficientnet-b0, efficientnet-b3, efficientnet-lite0, or package.module:factory",
    )
    weights: str | None = setting(
        None,
        "start weights: a local safetensors file, or pretrained (efficientnet-lite0: ImageNet's, from an extra); the "
        "last layer may differ",
    )
    initialisation: str = setting(
        "network",
        "how random start weights are drawn: network (as the code that the network comes from does) or layers (by "
        "every layer's own default in torch)",
        choices=("network", "layers"),
    )
    algorithm: str = setting("fedavg", f"{', '.join(ALGORITHMS.names)}, or package.module:factory")
    selector: str = setting("random", f"{', '.join(SELECTORS.names)}, or package.module:factory")
    cohort: str = setting("10%", "clients per round, M: a number or a per cent of K", amount=True)
    epsilon: float | None = setting(
        None, "privacy budget of the label counts (Laplace noise of scale 1/epsilon); none: true counts", above=0
    )
    averaging: str = setting(
        "selector",
        "weights of the average: selector (the selector's where it defines some, else numbers of samples) or samples",
        choices=("selector", "samples"),
    )
    audit: str = setting(
        "off",
        "what to do about label reports that clients' training belies: off, warn, replace (select by estimates), "
        "quarantine (leave suspects out)",
        choices=POLICIES,
    )
    size_cap: float | None = setting(
        None, "reported numbers of samples count for at most so many times the median report; none: no limit", low=1
    )
    server_images: int = setting(
        0,
        "images per class that the audit looks at clients' models with, taken from the training data (20 or more "
        "tell well); 0: none",
        low=0,
    )
    liars: str = setting("0", "clients that lie about their labels: a number or a per cent of K", amount=True)
    lie: str = setting("uniform", "what liars claim; their data and training stay honest", choices=LIES)
    dropout: float = setting(0.0, "probability that a selected client drops out before it trains", low=0, high=1)
    stragglers: float = setting(
        0.0, "share of the clients that may run fewer local epochs (1 to --epochs, drawn each time)", low=0, high=1
    )
    speed_spread: float = setting(
        0.0,
        "spread of the clients' simulated speeds: seconds = samples * epochs / (1000 exp(spread * z)), z normal",
        low=0,
        high=10,
    )
    rounds: int = setting(100, "communication rounds", low=1)
    epochs: int = setting(5, "local epochs", low=1)
    batch_size: int = setting(64, "local batch size; the last partial batch is kept", low=1)
    lr: float = setting(0.01, "learning rate of round 1", above=0)
    lr_decay: float = setting(0.98, "factor on the learning rate after every round", above=0, high=1)
    weight_decay: float = setting(5e-4, "weight decay", low=0)
    momentum: float = setting(0.9, "momentum; the optimiser starts anew every round", low=0, below=1)
    jitter: float = setting(
        0.2, "colour jitter: brightness, contrast and saturation vary by this share; 0 is off", low=0
    )
    flip: float = setting(0.5, "probability of a horizontal flip", low=0, high=1)
    grayscale: float = setting(0.1, "probability of turning an image grey", low=0, high=1)
    evaluate_every: int = setting(1, "evaluate every n-th round (and always the last ten)", low=1)
    client_accuracy: bool = setting(
        False, "accuracy of the final model per client: on its held-out data, or by its labels from the test split's"
    )
    precision: str = setting(
        "fp32", "fp32 (TF32 products on CUDA), fp32-exact or bf16", choices=("fp32", "fp32-exact", "bf16")
    )
    seed: int = setting(0, "seed of everything that is drawn", low=0)
    settings: Any = field(default=())  # kept as ((part, name, value), ...)

    def __post_init__(self) -> None:
        for name, declared in FIELDS.items():
            # One spelling of a value, so that equal settings have one digest: 1 is 1.0, ten clients are "10".
            object.__setattr__(self, name, declared.check(getattr(self, name)))
        for part, registry in PARTS.items():
            name = getattr(self, part)
            if not is_import_path(name):
                registry.get(name)
        object.__setattr__(self, "settings", self._settings())
        object.__setattr__(self, "partition", str(parse_partition(self.partition)))
        if self.cohort_size < 1 or self.cohort_size > self.clients:
            raise InputError(
                f"cohort: {self.cohort!r} gives {self.cohort_size} of {self.clients} clients; "
                f"accepted: 1 to {self.clients}"
            )
        if self.number_of_liars > self.clients:
            raise InputError(f"liars: {self.liars!r} are more than there are clients; accepted: 0 to {self.clients}")
        if self.selector in SELECTORS:
            SELECTORS.get(self.selector).check_run(
                cohort_size=self.cohort_size, clients=self.clients, **self.of("selector")
            )
        brings = ALGORITHMS.get(self.algorithm).own_selector if self.algorithm in ALGORITHMS else None
        if brings is not None and self.selector != "random":
            raise InputError(
                f"selector: {self.selector!r} cannot go with {self.algorithm}, which draws its own clients; "
                f"accepted: random"
            )

    def _settings(self) -> tuple[tuple[str, str, Any], ...]:
        """The methods' own settings, checked, those of built-in methods with their defaults."""
        chosen: dict[tuple[str, str], Any] = {}
        for key, value in _pairs(self.settings):
            part, name = part_of(key, {part: getattr(self, part) for part in PARTS})
            chosen[part, name] = value
        found = []
        for part, registry in PARTS.items():
            method = getattr(self, part)
            if method in registry:
                declared = registry.settings(method)
                found += [(part, name, s.check(chosen.get((part, name), s.default))) for name, s in declared.items()]
            else:
                own = {name: _plain(name, value) for (owner, name), value in chosen.items() if owner == part}
                found += [(part, name, value) for name, value in own.items()]
        return tuple(sorted(found, key=lambda entry: entry[:2]))

    def of(self, part: str) -> dict[str, Any]:
        """The settings of the algorithm or of the selector, by name."""
        return {name: value for owner, name, value in self.settings if owner == part}

    @property
    def number_of_liars(self) -> int:
        """Clients that lie about their labels."""
        return amount(self.liars, self.clients, "liars")

    @property
    def cohort_size(self) -> int:
        """Clients per round, M."""
        return amount(self.cohort, self.clients, "cohort")

    @property
    def least_samples(self) -> int:
        """Fewest samples of a client under dir:BETA."""
        if self.min_samples is not None:
            return self.min_samples
        return 1 if self.dataset in SMALL_DATASETS else 10

    @property
    def method(self) -> str:
        """The method's name: fedavg, fedprox+fedentopt, fedentopt, fedentopt-dp, kl, ..."""
        suffix = "-dp" if self.epsilon is not None and self._reads_counts else ""
        names = [_short(self.algorithm)] if self.algorithm != "fedavg" or self.selector == "random" else []
        names += [_short(self.selector)] if self.selector != "random" else []
        return "+".join(names) + suffix

    @property
    def _reads_counts(self) -> bool:
        """Whether the method reads label counts; of own code only its selector is known to, without importing it."""
        selector = SELECTORS.get(self.selector).reads_label_counts if self.selector in SELECTORS else True
        return selector or (self.algorithm in ALGORITHMS and ALGORITHMS.get(self.algorithm).reads_label_counts)

    @property
    def own_code(self) -> tuple[str, ...]:
        """Import paths of the user's code behind this run."""
        registered = []
        for part, registry in PARTS.items():
            cls = registry.get(getattr(self, part)) if getattr(self, part) in registry else None
            if cls is not None and cls.__module__.partition(".")[0] != "fedentopt":
                registered.append(f"{cls.__module__}:{cls.__qualname__}")
        named = (name for name in (self.model, self.algorithm, self.selector) if is_import_path(name))
        return (*named, *registered)

    def to_dict(self) -> dict[str, Any]:
        """All settings, JSON-serialisable and flat: what a run's identity is made of.

        A method's setting with an option of its own goes by that name, at its default where the method is not used; any
        other by `algorithm.NAME` or `selector.NAME`.
        """
        known = {name: getattr(self, name) for name, declared in FIELDS.items()}
        for name in LATER:
            if known[name] == FIELDS[name].default:
                del known[name]
        for part, registry in PARTS.items():
            own = self.of(part)
            for option, (method, declared) in registry.options().items():
                used = method == getattr(self, part)
                known[option] = own.pop(declared.name) if used else declared.default
            known |= {f"{part}.{name}": value for name, value in own.items()}
        later = LATER_OF_METHODS.items()
        return {name: value for name, value in known.items() if (name, value) not in later}

    def changed(self) -> dict[str, Any]:
        """The settings of `to_dict` that do not have their defaults."""
        default = _defaults()
        own = {f"{p}.{n}": s.default for p, r in PARTS.items() for n, s in self._declared(p, r).items()}
        return {
            name: value
            for name, value in self.to_dict().items()
            if value != (default | own).get(name, FIELDS[name].default if name in FIELDS else None)
        }

    def _declared(self, part: str, registry: Registry[Any]) -> dict[str, Setting]:
        name = getattr(self, part)
        return registry.settings(name) if name in registry else {}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> RunConfig:
        """Settings by name, those of `to_dict` among them; an unknown name is refused, and so is a setting of a method
        that is not used, unless it has its default."""
        if not isinstance(settings, Mapping):
            raise InputError(f"settings: {settings!r} cannot be used; accepted: a mapping of names to values")
        for name in settings:
            if not isinstance(name, str):
                raise InputError(f"settings: {name!r} is no name; accepted: {', '.join(known_keys())}")
        fields = {name: value for name, value in settings.items() if name in FIELDS}
        methods = {part: fields.get(part, FIELDS[part].default) for part in PARTS}
        own: dict[str, Any] = {}
        for key, value in settings.items():
            if key in FIELDS:
                continue
            if key == "settings":
                own |= dict(_pairs(value))
                continue
            found = option_of(key)
            if found is None:
                part_of(key, methods)  # refuses what no method has
                own[key] = value
                continue
            part, method, declared = found
            if methods[part] == method:
                own[f"{part}.{declared.name}"] = value
            elif declared.check(value) != declared.default:
                registry = PARTS[part]
                mine = methods[part] in registry and key in registry.settings(methods[part])
                hint = f"; accepted for its own setting of that name: {part}.{key}" if mine else ""
                raise InputError(f"{key}: is a setting of {method}, which {methods[part]!r} does not use{hint}")
        return cls(**fields, settings=own)

    def replace(self, **changes: Any) -> RunConfig:
        """The same run with other settings; those of a method that is replaced go with it."""
        kept = {
            f"{part}.{name}": value
            for part, name, value in self.settings
            if changes.get(part, getattr(self, part)) == getattr(self, part)
        }
        given = changes.pop("settings", {})
        fields = {name: getattr(self, name) for name in FIELDS} | {n: v for n, v in changes.items() if n in FIELDS}
        others = {name: value for name, value in changes.items() if name not in FIELDS}
        qualified = {
            ".".join(part_of(name, {part: fields[part] for part in PARTS})): value for name, value in _pairs(given)
        }
        for name, value in others.items():
            found = option_of(name)
            if found is None:
                raise InputError(f"{name}: unknown setting; accepted: {', '.join(known_keys())}")
            qualified[f"{found[0]}.{found[2].name}"] = value
        return RunConfig(**fields, settings=kept | qualified)

    def digest(self) -> str:
        """Eight hexadecimal digits that depend on every setting and on nothing else."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:8]

    @property
    def run_id(self) -> str:
        """Folder name of the run: readable, and unique by the digest at its end."""
        part = self.partition.replace(":", "").replace(",", "-")[:60]  # the digest tells longer ones apart
        return f"{self.method}_{_short(self.dataset)}_{part}_{_short(self.model)}_s{self.seed}_{self.digest()}"


FIELDS: dict[str, Setting] = {name: s for name, s in settings_of(RunConfig).items() if name != "settings"}
"""The settings of every run, whatever its method."""


@functools.cache
def _defaults() -> dict[str, Any]:
    return RunConfig().to_dict()


def option_of(name: str) -> tuple[str, str, Setting] | None:
    """Part, method and setting of a name that has a command-line option of its own, None for any other."""
    for part, registry in PARTS.items():
        found = registry.options().get(name)
        if found is not None:
            return part, *found
    return None


def options() -> dict[str, Setting]:
    """All settings that have a command-line option: those of every run, then those of single methods."""
    own = {name: dataclasses.replace(s, name=name) for r in PARTS.values() for name, (_, s) in r.options().items()}
    return FIELDS | own


def known_keys() -> list[str]:
    """Names that settings of a run may have, apart from own methods' ones."""
    return sorted(options())


def part_of(key: str, methods: Mapping[str, str]) -> tuple[str, str]:
    """Which part of the method the setting `key` belongs to, and its name there; refused where neither has it.

    What an own method has is known only to its code, so any name is taken for its own if nothing built in has it.
    """
    part, dot, name = key.partition(".")
    if dot and part in PARTS:
        known = PARTS[part].settings(methods[part]) if methods[part] in PARTS[part] else None
        if known is not None and name not in known:
            raise unknown_setting(name, methods)
        return part, name
    owners = [p for p, r in PARTS.items() if methods[p] in r and key in r.settings(methods[p])]
    found = option_of(key)
    if not owners and found is not None and methods[found[0]] == found[1]:
        return found[0], found[2].name
    own = [p for p, r in PARTS.items() if methods[p] not in r]
    if len(owners or own) > 1:
        both = " and ".join(methods[p] for p in (owners or own))
        raise InputError(f"{key}: may be a setting of {both}; accepted: algorithm.{key} or selector.{key}")
    if not owners and not own:
        raise unknown_setting(key, methods)
    return (owners or own)[0], key


def unknown_setting(key: str, methods: Mapping[str, str]) -> InputError:
    """The refusal of a setting that neither part of a method has."""
    known = [name for p, r in PARTS.items() if methods[p] in r for name in r.settings(methods[p])]
    names = "+".join(methods.values())
    near = difflib.get_close_matches(key, [*known, *known_keys()], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    accepted = f"{', '.join(known)}, or " if known else ""
    return InputError(f"{key}: unknown setting of {names}{hint}; accepted: {accepted}one of {', '.join(known_keys())}")


def _plain(name: str, value: Any) -> Any:
    """A setting of own code as a plain value, so that it can be written down and read again equal."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, list | tuple):
        return tuple(_plain(name, one) for one in value)
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise InputError(f"{name}: {value!r} cannot be kept; accepted: a number, text, true or false, or a list of these")


def _pairs(given: Any) -> list[tuple[str, Any]]:
    """(name, value) of a mapping, or of entries given as such or as (part, name, value) the way a config keeps them."""
    entries = given.items() if isinstance(given, Mapping) else given
    if not isinstance(given, Mapping | tuple | list) or not all(
        isinstance(entry, tuple | list) and len(entry) in (2, 3) for entry in entries
    ):
        raise InputError(f"settings: {given!r} cannot be used; accepted: a mapping of names to values")
    return [(".".join(map(str, names)), value) for *names, value in entries]


def _short(name: str) -> str:
    """A name that can stand in a folder's name; a path or an import path keeps its end."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[-24:].strip("-")
