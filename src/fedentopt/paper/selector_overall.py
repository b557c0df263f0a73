"""The benchmark of selectors over all of its settings: who gains how much over random selection, how far each is from
FedEntOpt, where each is ahead, and what it costs.

A setting's figure is the mean difference over the seeds that both selectors have. Whether a selector differs from
FedEntOpt over settings as a whole is asked by Wilcoxon's signed-rank test of these figures (J. Demšar: Statistical
Comparisons of Classifiers over Multiple Data Sets, JMLR 7, 2006), p values by Holm's correction over the selectors. It
takes settings for independent, which those of one data set are not quite; in return it does not hang on the number of
seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fedentopt.paper import names
from fedentopt.paper.measures import Measured
from fedentopt.paper.selector_asks import IN_SHORT, OURS, RANDOM, ask
from fedentopt.paper.selector_table import SURE, Against, BenchSetting, gains, p_text, travels
from fedentopt.results.statistics import holm, mean

Columns = tuple[str, ...]
Rows = list[tuple[str, ...]]


def methods_of(settings: Sequence[BenchSetting]) -> list[str]:
    """Every selector with results; the highest mean over random selection first."""
    found = gains(settings)
    methods = dict.fromkeys(method for setting in settings for method in setting.by_method)
    return sorted(methods, key=lambda method: -(mean(list(found.get(method, {}).values())) or 0.0))


def summary(settings: Sequence[BenchSetting]) -> tuple[Columns, Rows]:
    """One line per selector: gains, how sure they are, and the distance to FedEntOpt."""
    found, shares = gains(settings), participations(settings)
    p_values = over_settings(settings)
    rows = []
    for method in methods_of(settings):
        own = [setting for setting in settings if method in setting.by_method]
        by_share = []
        for share in shares:
            values = [found.get(method, {}).get(s.title) for s in own if s.participation == share]
            by_share.append(_signed(mean([value for value in values if value is not None])))
        gaps = from_ours(settings, method)
        ahead = f"{sum(gap > 0 for gap in gaps)} of {len(gaps)}" if gaps else names.NOTHING
        rows.append((
            names.method(method), *by_share, _bold(_signed(mean(gaps)), p_values.get(method)),
            p_text(p_values.get(method)), ahead, str(sum(s.best == method for s in own)), IN_SHORT[ask(method).burden],
            _clearly(own, method, RANDOM), _clearly(own, method, OURS),
        ))  # fmt: skip
    columns = (
        "selector", *(f"above random, {share:g} %" for share in shares), "minus FedEntOpt", "p over settings",
        "above it in", "best in", "asks for", "clearly above / below random",
        "clearly above / below FedEntOpt",
    )  # fmt: skip
    return columns, rows


def participations(settings: Sequence[BenchSetting]) -> list[float]:
    return sorted({setting.participation for setting in settings})


def from_ours(settings: Sequence[BenchSetting], method: str) -> list[float]:
    """Mean differences to FedEntOpt, setting by setting, where both have a seed in common."""
    found = [setting.against_ours.get(method, Against()).difference for setting in settings]
    return [difference for difference in found if difference is not None]


def over_settings(settings: Sequence[BenchSetting]) -> Mapping[str, float | None]:
    """For every other selector: Wilcoxon's p value that it is FedEntOpt's equal over settings, adjusted."""
    methods = [method for method in methods_of(settings) if method != OURS]
    adjusted = holm([_signed_rank(from_ours(settings, method)) for method in methods])
    return dict(zip(methods, adjusted, strict=True))


def _signed_rank(differences: Sequence[float]) -> float | None:
    """Two-sided p value of Wilcoxon's signed-rank test; None where there are fewer than two settings."""
    if len(differences) < 2:
        return None
    unequal = [difference for difference in differences if difference != 0]
    if not unequal:
        return 1.0
    from scipy.stats import wilcoxon

    return float(wilcoxon(unequal).pvalue)


def _clearly(settings: Sequence[BenchSetting], method: str, other: str) -> str:
    found = [setting.against(other).get(method, Against()) for setting in settings]
    if method == other or all(one.p is None for one in found):
        return names.NOTHING
    return f"{sum(one.better for one in found)} / {sum(one.worse for one in found)}"


def where(settings: Sequence[BenchSetting], share: float) -> tuple[Columns, Rows]:
    """Points above random selection at one participation: a column per setting, the highest of each in bold; then the
    accuracy that is counted from, and full participation."""
    own = [s for s in settings if s.participation == share and s.against_random]
    rows: Rows = []
    for method in methods_of(own):
        cells = [s.against_random.get(method, Against()).difference for s in own]
        if method != RANDOM:
            bold = [s.best == method for s in own]
            shown = [_signed(cell, 1) for cell in cells]
            rows.append((names.method(method), *(f"**{c}**" if b else c for c, b in zip(shown, bold, strict=True))))
    if any(s.ceiling_gain is not None for s in own):
        rows.append(("all clients (ceiling)", *(_signed(s.ceiling_gain, 1) for s in own)))
    rows.append(("accuracy of random (%)", *(f"{s.by_method[RANDOM].ours or 0.0:.1f}" for s in own)))
    return ("selector", *(s.short for s in own)), rows


def costs(settings: Sequence[BenchSetting], methods: Sequence[str]) -> tuple[Columns, Rows]:
    """What every selector asks of a client, in words and bytes, and what was measured of it at the largest
    participation: means over settings and seeds."""
    share = max(participations(settings), default=None)
    own = [setting for setting in settings if setting.participation == share]
    rows = []
    for method in sorted(methods, key=lambda method: ask(method).burden):
        asked = ask(method)
        measured: tuple[str, ...] = ()
        if own:
            entries = [s.by_method[method] for s in own if method in s.by_method]
            per_round = [(run, run.rounds) for entry in entries for run in entry.runs]
            measured = (
                _average(per_round, lambda run: run.asked, 1), _average(per_round, travels, 2, 1e-6),
                _average(per_round, lambda run: run.selection_seconds, 2, 1e3),
            )  # fmt: skip
        rows.append((names.method(method), asked.words, asked.size, *measured))
    columns: Columns = ("selector", "what leaves the client beside its model", "bytes per client (C classes)")
    if own:
        columns += (f"asked per round at {share:g} %", "MB per round", "selection (ms per round)")
    return columns, rows


def _average(
    runs: Sequence[tuple[Measured, int]], value: Callable[[Measured], float | None], digits: int, factor: float = 1.0
) -> str:
    known = [(value(run), rounds) for run, rounds in runs]
    average = mean([found / rounds for found, rounds in known if found is not None])
    return names.NOTHING if average is None else f"{average * factor:.{digits}f}"


def gap_closed(settings: Sequence[BenchSetting]) -> str:
    """In a sentence: how much of the way from random selection to everybody FedEntOpt goes, in the seeds that all three
    have; empty without a ceiling."""
    parts = []
    for share in participations(settings):
        known = [gained for s in settings if s.participation == share and (gained := _in_common(s)) is not None]
        everybody, ours = mean([a for a, _ in known]), mean([b for _, b in known])
        if everybody is not None and ours is not None and everybody > 0:
            parts.append(f"{everybody:+.1f} points over random selection at {share:g} %, of which FedEntOpt brings "
                         f"{ours:+.1f} ({100 * ours / everybody:.0f} %)")  # fmt: skip
    few, many = ceiling_seeds(settings)
    seeds = f" Both figures are over the {few} of {many} seeds in which all clients were trained."
    return f"Training all clients in every round is worth {'; '.join(parts)}.{seeds * (few < many)}" if parts else ""


def _in_common(setting: BenchSetting) -> tuple[float, float] | None:
    """What everybody and what FedEntOpt gain over random selection, over the same seeds; None where there are none."""
    random, ours = setting.by_method.get(RANDOM), setting.by_method.get(OURS)
    if setting.ceiling is None or random is None or ours is None:
        return None
    seeds = sorted(setting.ceiling.values.keys() & random.values.keys() & ours.values.keys())
    both = [mean([one.values[seed] - random.values[seed] for seed in seeds]) for one in (setting.ceiling, ours)]
    return None if both[0] is None or both[1] is None else (both[0], both[1])


def ceiling_seeds(settings: Sequence[BenchSetting]) -> tuple[int, int]:
    """The most seeds in which all clients were trained, and the most that FedEntOpt has."""
    everybody = [len(s.ceiling.values) for s in settings if s.ceiling is not None]
    ours = [len(s.by_method[OURS].values) for s in settings if OURS in s.by_method]
    return max(everybody, default=0), max(ours, default=0)


def largest_gains(settings: Sequence[BenchSetting]) -> str:
    """In a sentence: the setting that raises FedEntOpt's mean gain most, and what is left without it."""
    parts = []
    for share in participations(settings):
        own = [setting for setting in settings if setting.participation == share]
        gained = {setting.short: setting.against_random.get(OURS, Against()).difference for setting in own}
        known = {short: gain for short, gain in gained.items() if gain is not None}
        if len(known) > 2:
            first = max(known, key=lambda short: known[short])
            rest = mean([gain for short, gain in known.items() if short != first])
            parts.append(
                f"at {share:g} % {_signed(known[first], 1)} ({first}), on average {_signed(rest)} in the others"
            )
    return f"One setting can carry a mean. FedEntOpt's largest gain: {'; '.join(parts)}." if parts else ""


def _signed(value: float | None, digits: int = 2) -> str:
    return names.NOTHING if value is None else f"{round(value, digits) + 0.0:+.{digits}f}"  # never -0.0


def _bold(text: str, p: float | None) -> str:
    return f"**{text}**" if p is not None and p < SURE else text
