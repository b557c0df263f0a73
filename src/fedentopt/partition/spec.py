"""How a split is written down: `dir:0.1`, `mixed:0.001,0.01,0.5`, `dir:0.1+quantity:0.5`, `natural`, ..."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedentopt.errors import InputError

FORMS = (
    "dir:BETA, classes:J, shards:S, quantity:BETA, mixed:BETA,BETA,..., dir:BETA+quantity:BETA, "
    "mixed:BETA,...+quantity:BETA, natural, iid"
)
"""Everything that `parse` reads."""
NATURAL = "natural"
_PLAIN = ("iid", NATURAL)
_WHOLE = {"classes": ("classes per client", "classes:2"), "shards": ("shards per client", "shards:2")}


@dataclass(frozen=True)
class PartitionSpec:
    """A kind of split.

    `kind` is "dir", "classes", "shards", "quantity", "mixed", "natural" or "iid"; `value` is BETA, J or S, 0 where
    there is none; `betas` are those of "mixed"; `quantity` is the BETA of the sizes where "dir" or "mixed" has one
    beside it.
    """

    kind: str
    value: float = 0.0
    betas: tuple[float, ...] = ()
    quantity: float | None = None

    def __str__(self) -> str:
        if self.kind in _PLAIN:
            return self.kind
        numbers = self.betas if self.kind == "mixed" else (self.value,)
        text = f"{self.kind}:{','.join(_short(self.kind, number) for number in numbers)}"
        return text if self.quantity is None else f"{text}+quantity:{_short('quantity', self.quantity)}"


def parse(spec: str) -> PartitionSpec:
    """Read one of `FORMS`; anything else is refused."""
    first, plus, second = str(spec).strip().partition("+quantity:")
    kind, colon, text = first.partition(":")
    quantity = _beta(spec, second, "dir:0.1+quantity:0.5") if plus else None
    if kind in _PLAIN and not colon and not plus:
        return PartitionSpec(kind)
    if kind == "dir" and colon:
        return PartitionSpec("dir", _beta(spec, text, "dir:0.1"), quantity=quantity)
    if kind == "mixed" and colon:
        betas = tuple(_beta(spec, word, "mixed:0.001,0.01,0.5") for word in text.split(","))
        return PartitionSpec("mixed", betas=betas, quantity=quantity)
    if kind == "quantity" and colon and not plus:
        return PartitionSpec("quantity", _beta(spec, text, "quantity:0.5"))
    if kind in _WHOLE and colon and not plus:
        # No data set has classes beyond fifteen digits; longer numbers would not even fit a float.
        if not (text.isascii() and text.isdigit() and len(text) <= 15 and int(text) >= 1):
            what, example = _WHOLE[kind]
            raise InputError(
                f"partition: {spec!r} has {text!r} {what}; accepted: a whole number from 1, such as {example}"
            )
        return PartitionSpec(kind, float(int(text)))
    if plus:
        raise InputError(
            f"partition: {spec!r}: sizes cannot be drawn for {first!r}; accepted: dir or mixed before the +"
        )
    raise InputError(f"partition: {spec!r} is unknown; accepted: {FORMS}")


def _beta(spec: str, text: str, example: str) -> float:
    try:
        beta = float(text)
    except ValueError:
        beta = math.nan
    if not (math.isfinite(beta) and beta > 0):
        raise InputError(
            f"partition: {spec!r} has the concentration {text!r}; accepted: a number above 0, such as {example}"
        )
    return beta


def _short(kind: str, value: float) -> str:
    if kind in _WHOLE and float(value).is_integer():
        return str(int(value))
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
