"""What may be compared with what: runs of one setting side by side, seeds of one method together.

A *setting* is what the methods of a table share: data (one state of a file), partition, model, clients, cohort,
availability, rounds.
A *method* is everything else but the seed, a user's own code and weights included; where two methods of a setting carry
the same name (two buffer sizes, two values of mu, two states of a file), what differs is added to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedentopt.results.reading import RunResult, is_same_data
from fedentopt.selection import SELECTORS, EntropySelector, RandomSelector

SETTING = (
    "dataset", "fine_labels", "image_size", "partition", "model",
    "clients", "cohort", "dropout", "stragglers", "rounds",
)  # fmt: skip
PLAIN, BALANCED = RandomSelector.name, EntropySelector.name


@dataclass(frozen=True)
class Method:
    """The runs of one method in one setting, ordered by seed."""

    label: str
    name: str
    config: Mapping[str, Any]
    runs: tuple[RunResult, ...]

    @property
    def finished(self) -> tuple[RunResult, ...]:
        """The runs whose figures count."""
        return tuple(run for run in self.runs if run.finished)


@dataclass(frozen=True)
class Group:
    """One setting with its methods."""

    title: str
    methods: tuple[Method, ...]

    def plain(self) -> Method | None:
        """Federated averaging with random selection, what the others are measured against."""
        return self._typical(algorithm=averaging(), selector=PLAIN)

    def balanced(self) -> Method | None:
        """Entropy selection, without noise where there is such a run."""
        return (
            self._typical(algorithm=averaging(), selector=BALANCED, epsilon=None)
            or self._typical(algorithm=averaging(), selector=BALANCED)
            or self._typical(selector=BALANCED)
        )

    def _typical(self, *, selector: str, **wanted: Any) -> Method | None:
        """Of several that fit, the one whose settings most methods with this selector share.

        A folder with a sweep of buffers is then judged by the buffer of all its other methods, not by the sweep's
        first value.
        """
        peers = [method for method in self.methods if method.config.get("selector") == selector]
        fitting = [peer for peer in peers if all(peer.config.get(key) == value for key, value in wanted.items())]

        def shared(method: Method) -> int:
            return sum(peer.config.get(key) == value for peer in peers for key, value in method.config.items())

        return max(fitting, key=shared, default=None)


def group_runs(runs: Iterable[RunResult]) -> tuple[Group, ...]:
    """Sort runs into settings and methods; any order of the input gives the same groups."""
    # Data that changed under the same name, other classes or other images; its runs share no chart with the older ones.
    settings: dict[tuple[Any, ...], list[RunResult]] = {}
    for run in runs:
        settings.setdefault((_key(run.config, SETTING), run.labels.classes, run.labels.clients), []).append(run)
    parts = [part for same in settings.values() for part in _by_data(same)]
    parts.sort(key=lambda part: (*_setting_order(part[1]), part[0]))
    titles = [setting_title(group[0].config, short=True) for _, group in parts]
    titles = [
        (title if titles.count(title) == 1 else setting_title(group[0].config, short=False))
        + (f" · data {data[:8]}" if data else "")
        for title, (data, group) in zip(titles, parts, strict=True)
    ]
    return tuple(Group(title, _methods(group)) for title, (_, group) in zip(titles, parts, strict=True))


def averaging() -> str:
    """The name of plain averaging. Imported when asked for: reading results takes no algorithms."""
    from fedentopt.algorithms import FedAvg

    return FedAvg.name


def _key(config: Mapping[str, Any], names: Iterable[str]) -> str:
    return json.dumps([config.get(name) for name in names], sort_keys=True, default=str)


def _setting_order(runs: list[RunResult]) -> tuple[str, ...]:
    config = runs[0].config
    order = ("dataset", "model", "partition", "dropout", "stragglers", "cohort", "clients")
    rounds = config.get("rounds")
    # Long runs before trials and short looks: the page opens on its first setting.
    longest_first = str(10**9 - rounds) if isinstance(rounds, int) else ""
    return (*(_in_order(str(config.get(name, ""))) for name in order), longest_first, _key(config, SETTING))


def _in_order(text: str) -> str:
    """Text that sorts by its numbers, all written at one length: 9 % before 10 %, mu=0.001 before mu=0.01."""
    return re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", lambda number: f"{float(number[0]):036.18f}", text)


def _methods(runs: list[RunResult]) -> tuple[Method, ...]:
    own = sorted({name for run in runs for name in run.config} - {*SETTING, "seed"})
    seeds: dict[tuple[str, str], list[RunResult]] = {}
    for run in runs:
        seeds.setdefault((run.method, _key(run.config, own)), []).append(run)
    methods = []
    parts = (
        (name, code, weights, members)
        for (name, _), same in seeds.items()
        for code, of_code in _by(same, "code")
        for weights, members in _by(of_code, "weights")
    )
    for name, code, weights, members in parts:
        namesakes = [others[0].config for (other, _), others in seeds.items() if other == name]
        differing = [key for key in own if len({str(config.get(key)) for config in namesakes}) > 1]
        config = members[0].config
        # A setting that came later is not named in a config where it has its default.
        details = [f"{key}={config[key]}" for key in differing if key in config]
        details += [f"{of} {digest[:8]}" for of, digest in (("code", code), ("weights", weights)) if digest]
        methods.append(
            Method(
                label=f"{name} ({', '.join(details)})" if details else name,
                name=name,
                config=config,
                runs=tuple(sorted(members, key=lambda run: (run.seed, run.run_id))),
            )
        )
    return tuple(sorted(methods, key=_method_order))


def _by_data(runs: list[RunResult]) -> list[tuple[str, list[RunResult]]]:
    """Runs of one setting by the digest of the data behind them; all together, without one, where it is one data set as
    far as it is known."""
    found: dict[str, list[RunResult]] = {}
    for digest, run in sorted(
        ((_digest(run, "dataset"), run) for run in runs), key=lambda pair: (-len(pair[0]), pair[0])
    ):
        found.setdefault(next((one for one in found if is_same_data(one, digest)), digest), []).append(run)
    return list(found.items()) if len(found.keys() - {""}) > 1 else [("", runs)]


def _digest(run: RunResult, of: str) -> str:
    return str((run.about.get(of) or {}).get("digest", ""))


def _by(runs: list[RunResult], of: str) -> list[tuple[str, list[RunResult]]]:
    """Runs of one method by the digest of the user's code or weights behind them; all together, without one, where it
    is one as far as it is known."""
    found: dict[str, list[RunResult]] = {}
    for run in runs:
        found.setdefault(_digest(run, of), []).append(run)
    return list(found.items()) if len(found.keys() - {""}) > 1 else [("", runs)]


def _method_order(method: Method) -> tuple[int, int, bool, str, str]:
    """Plain averaging first, entropy selection last, other selectors between them in the order of the registry."""
    config = method.config
    known = [PLAIN, *(name for name in SELECTORS.names if name not in (PLAIN, BALANCED))]
    selector = str(config.get("selector"))
    return (
        len(known) + 1 if selector == BALANCED else known.index(selector) if selector in known else len(known),
        int(config.get("algorithm") != averaging()),
        config.get("epsilon") is not None,
        _in_order(method.label),
        method.label,
    )


def setting_title(config: Mapping[str, Any], *, short: bool = True) -> str:
    """A setting in words; the short form leaves out the folders of a data set that is a path."""
    dataset = str(config.get("dataset", "unknown data"))
    if short:
        dataset = dataset.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
    parts = [dataset, str(config.get("partition", "")), str(config.get("model", ""))]
    if config.get("fine_labels"):
        parts[0] += " (fine labels)"
    if not short and config.get("image_size") is not None:
        parts.append(f"{config['image_size']} px")
    parts.append(f"{config.get('clients', '?')} clients, {config.get('cohort', '?')} per round")
    for name, word in (("dropout", "dropout"), ("stragglers", "stragglers")):
        if config.get(name):
            parts.append(f"{100 * float(config[name]):g} % {word}")
    rounds = config.get("rounds", "?")
    parts.append("1 round" if rounds == 1 else f"{rounds} rounds")
    return " · ".join(part for part in parts if part)
