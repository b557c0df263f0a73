"""Which epsilon a node's label counts are noised with: a rule the server cannot bend.

The app (run config) and the node's owner (node config) each may set `label-epsilon`. The smaller one is used, so
the server can ask for more privacy than the owner does, never for less. Counts without noise leave only when the
owner writes `label-epsilon="none"` and the app asks for no noise either. With neither set the node refuses.
"""

from __future__ import annotations

import math

from fedentopt.errors import InputError

KEY = "label-epsilon"
NONE = "none"

Setting = bool | float | int | str | None


def settle_epsilon(app: Setting, owner: Setting) -> float | None:
    """Return the epsilon to use, or None for counts without noise.

    `app` and `owner` are the values of `label-epsilon` in run config and node config; None or "" means not set.
    An app's "none" asks for nothing and counts as not set. Refused: neither set, or a value that is no positive
    finite number.
    """
    wanted = _read("run config", app)
    allowed = _read("node config", owner)
    numbers = [value for value in (wanted, allowed) if isinstance(value, float)]
    if numbers:
        return min(numbers)
    if allowed == NONE:
        return None
    raise InputError(
        f'{KEY}: set neither by the app nor by the node\'s owner; the owner sets {KEY}=1.0 (noise) or {KEY}="none" '
        "(true counts) in the node config, or FEDENTOPT_LABEL_EPSILON where nodes are simulated"
    )


def _read(where: str, value: Setting) -> float | str | None:
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, str) and value.strip().lower() == NONE:
        return NONE
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise InputError(f'{KEY} ({where}): {value!r} is not accepted; accepted: a number above 0, or "{NONE}"')
    return number
