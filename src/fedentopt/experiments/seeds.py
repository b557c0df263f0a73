"""Several seeds written in one word."""

from __future__ import annotations

import re
from collections import Counter

from fedentopt.errors import InputError

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
