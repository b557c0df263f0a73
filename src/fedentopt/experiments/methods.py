"""The names of methods, as tables and people write them, turned into settings of a run.

A name is `ALGORITHM`, `SELECTOR` or `ALGORITHM+SELECTOR`, with `-dp` at its end where the server sees the label
counts through Laplace noise: `fedavg`, `fedentopt`, `fedprox+fedentopt`, `fedentopt-dp`, `kl`, `fedconcat`.
It is the inverse of `RunConfig.method`. One's own code goes by its import path: `package.module:algorithm`,
`fedavg+package.module:selector`.
"""

from __future__ import annotations

from typing import Any

from fedentopt.errors import InputError
from fedentopt.own_code import is_import_path
from fedentopt.simulation.config import ALGORITHMS, SELECTORS

DP_EPSILON = 0.5
"""Privacy budget that `-dp` stands for unless another one is given (the paper's)."""

ACCEPTED = (
    f"an algorithm ({', '.join(ALGORITHMS)}), a selector ({', '.join(SELECTORS)}), "
    "or both as in fedprox+fedentopt"
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
