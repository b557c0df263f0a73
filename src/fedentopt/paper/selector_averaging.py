"""Selection or weights: selectors that define weights of their own for the average, with these and by samples.

Random selection averages by numbers of samples. So a selector's gain over it, seed by seed, has two parts:

    own weights - random = (by samples - random) + (own weights - by samples)

the first what selection brings under the same rule of averaging, the second what the weights add. Whether a mean over
selectors and settings is more than luck is asked over seeds (Student's 95 % interval), which are independent;
selectors and settings of one seed share partitions and start models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedentopt.paper import names
from fedentopt.paper.comparison import Comparison
from fedentopt.paper.formats import Section, Table, markdown
from fedentopt.paper.selector_asks import RANDOM
from fedentopt.paper.selector_table import SURE, Against, BenchSetting, bench_settings, compared
from fedentopt.results.statistics import mean, mean_interval

AVERAGING = "selectors-averaging"
COLUMNS = (
    "selector", "own weights", "by samples", "own weights minus by samples", "random", "by samples minus random",
)  # fmt: skip
NOTE = (
    "Test accuracy in per cent, and differences seed by seed with Student's 95 % interval, bold below p = "
    f"{SURE:g} by Holm's correction over all differences of a setting. All of these draw clients, or candidates, by "
    "numbers of samples already; averaged by samples, large ones count twice. Those that look at losses or updates "
    "also choose other clients once the average is another."
)


@dataclass(frozen=True)
class _Trio:
    """A selector in one setting: averaged by samples, with its own weights, and random selection beside it."""

    samples: Comparison
    own: Comparison | None
    random: Comparison | None

    @property
    def seeds(self) -> set[int]:
        """The seeds that all three have."""
        if self.own is None or self.random is None:
            return set()
        return self.samples.values.keys() & self.own.values.keys() & self.random.values.keys()

    def parts(self, seed: int) -> tuple[float, float]:
        """What selection brings and what the weights add, in a seed that all three have."""
        assert self.own is not None
        assert self.random is not None
        samples = self.samples.values[seed]
        return samples - self.random.values[seed], self.own.values[seed] - samples


def averaging(entries: Sequence[Comparison]) -> str:
    """The section of the page; empty without results of averaging by samples."""
    settings = {(setting.heading, setting.participation): setting for setting in bench_settings(entries)}
    groups: dict[tuple[str, float], list[_Trio]] = {}
    for entry in entries:
        if entry.cell.table == AVERAGING and entry.ours is not None:
            place = (names.heading(entry.cell), entry.cell.participation or 0.0)
            beside = settings[place].by_method if place in settings else {}
            trio = _Trio(entry, beside.get(entry.cell.method or ""), beside.get(RANDOM))
            groups.setdefault(place, []).append(trio)
    if not groups:
        return ""
    sections = tuple(Section(_title(place, settings.get(place)), _rows(trios)) for place, trios in groups.items())
    answer = _answer([trio for trios in groups.values() for trio in trios])
    note = f"{answer}\n\n{NOTE}" if answer else NOTE
    return markdown(Table(AVERAGING, "Selection or weights?", note, COLUMNS, sections), level=2)


def _title(place: tuple[str, float], setting: BenchSetting | None) -> str:
    return f"{place[0]}, {place[1]:g} %" if setting is None else setting.place


def _rows(trios: Sequence[_Trio]) -> tuple[tuple[str, ...], ...]:
    """A row per selector; p values are adjusted over both differences of all rows."""
    pairs = [(trio.own, trio.samples) for trio in trios if trio.own is not None]
    pairs += [(trio.samples, trio.random) for trio in trios if trio.random is not None]
    found = {(id(ours), id(theirs)): one for (ours, theirs), one in zip(pairs, compared(pairs), strict=True)}

    def gap(ours: Comparison | None, theirs: Comparison | None) -> str:
        return found.get((id(ours), id(theirs)), Against()).text()

    return tuple(
        (
            names.method(trio.samples.cell.method), names.ours(trio.own), names.ours(trio.samples),
            gap(trio.own, trio.samples), names.ours(trio.random), gap(trio.samples, trio.random),
        )
        for trio in trios
    )  # fmt: skip


def _answer(trios: Sequence[_Trio]) -> str:
    """In a sentence: how the mean gain over random selection divides; empty where no seed has every run of those that
    can be compared."""
    whole = [trio for trio in trios if trio.seeds]
    seeds = sorted(set.intersection(*(trio.seeds for trio in whole))) if whole else []
    if not seeds:
        return ""
    by_seed = [[trio.parts(seed) for trio in whole] for seed in seeds]
    selection = [mean([part for part, _ in parts]) or 0.0 for parts in by_seed]
    weights = [mean([part for _, part in parts]) or 0.0 for parts in by_seed]
    gain = (mean(selection) or 0.0) + (mean(weights) or 0.0)
    places, number = f"{names.counted(len(whole), 'pair')} of selector and setting", names.counted(len(seeds), "seed")
    return (
        f"Over {places} ({number}), these selectors with their own weights are on average {gain:+.2f} points from "
        f"random selection: {_told(selection)} by selection, {_told(weights)} by the weights; "
        f"{_verdict(gain, selection, weights)}."
    )


def _told(values: Sequence[float]) -> str:
    return Against(mean(values), mean_interval(values)).text()


def _verdict(gain: float, selection: Sequence[float], weights: Sequence[float]) -> str:
    """Which of the two parts carries the gain, as far as that is more than luck."""
    if gain <= 0:
        return "there is no gain to carry"
    found = {"selection carries": mean_interval(selection), "the weights carry": mean_interval(weights)}
    clear = {who: part.mean for who, part in found.items() if part is not None and part.clear}
    carry = [who for who, size in clear.items() if size > 0]
    if len(carry) == 2:
        return f"both are above zero by more than luck, and {max(carry, key=clear.__getitem__)} more of the gain"
    if carry:
        return f"{carry[0]} the gain{', and the other part costs some of it' if len(clear) == 2 else ''}"
    return "one seed says nothing about luck" if len(selection) == 1 else "neither is above zero by more than luck"
