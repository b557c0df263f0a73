"""The names of methods, as tables and people write them, turned into settings of a run.

A name is `ALGORITHM`, `SELECTOR` or `ALGORITHM+SELECTOR`, with `-dp` at its end where the server sees the label
counts through Laplace noise: `fedavg`, `fedentopt`, `fedprox+fedentopt`, `fedentopt-dp`, `kl`, `fedconcat`.
It is the inverse of `RunConfig.method`. One's own code goes by its import path: `package.module:algorithm`,
`fedavg+package.module:selector`.

Several seeds written in one word.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from fedentopt.errors import InputError
from fedentopt.own_code import is_import_path
from fedentopt.simulation.config import ALGORITHMS, SELECTORS

DP_EPSILON = 0.5
"""Privacy budget that `-dp` stands for unless another one is given (the paper's)."""

ACCEPTED = (
    f"an algorithm ({', '.join(ALGORITHMS)}), a selector ({', '.join(SELECTORS)}), or both as in fedprox+fedentopt"
)


def parse_method(name: str) -> dict[str, Any]:
    """Settings `algorithm`, `selector` and `epsilon` (None without `-dp`) of the method called `name`.

    Refused: unknown names, and `-dp` where no server-side step looks at label counts.
    """
    text = name.strip()
    private = text.lower().endswith("-dp")
    parts = [_known(part) for part in (text[:-3] if private else text).split("+")]
    if len(parts) == 1:
        alone = parts[0] in ALGORITHMS or is_import_path(parts[0])
        algorithm, selector = (parts[0], "random") if alone else ("fedavg", parts[0])
    elif len(parts) == 2:
        algorithm, selector = parts
    else:
        algorithm = selector = ""
    if not (_is_one_of(algorithm, ALGORITHMS) and _is_one_of(selector, SELECTORS)):
        raise InputError(f"method: {name!r} is unknown; accepted: {ACCEPTED}, and -dp behind a selector")
    if private and selector == "random" and algorithm != "fedconcat":
        raise InputError(
            f"method: {name!r} adds noise to label counts that it does not use; "
            f"accepted: -dp with fedentopt, kl or fedconcat"
        )
    return {"algorithm": algorithm, "selector": selector, "epsilon": DP_EPSILON if private else None}


def _known(part: str) -> str:
    return part if is_import_path(part) else part.lower()


def _is_one_of(name: str, accepted: tuple[str, ...]) -> bool:
    return name in accepted or is_import_path(name)


MOST = 1000


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
        if last - first >= MOST:
            raise InputError(f"seeds: {part.strip()!r} are too many; accepted: at most {MOST}")
        seeds += range(first, last + 1)
    twice = [str(seed) for seed, times in Counter(seeds).items() if times > 1]
    if twice:
        raise InputError(f"seeds: {text!r} gives {', '.join(twice)} more than once; accepted: each seed once")
    return tuple(seeds)
