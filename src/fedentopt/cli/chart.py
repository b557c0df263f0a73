"""A small chart for the terminal: a line of values as columns of blocks."""

from __future__ import annotations

from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def chart(values: Sequence[float], top: float, *, width: int = 60, height: int = 6, plain: bool = False) -> list[str]:
    """Lines of text that show `values` in order, from a round number below the least up to `top`.

    With more values than columns, a column shows the mean of its share of them. `plain` uses ASCII only.
    """
    columns = min(width, len(values))
    shares = [values[i * len(values) // columns : (i + 1) * len(values) // columns] for i in range(columns)]
    means = [sum(share) / len(share) for share in shares]
    bottom = max(min(int(min(means) * 4) / 4, top - 0.25), 0.0)
    span = max(top - bottom, 1e-12)
    filled = [min(max((mean - bottom) / span, 0.0), 1.0) * height for mean in means]
    lines = []
    for level in reversed(range(height)):
        label = f"{bottom + span * (level + 1) / height:6.2f}"
        if plain:
            cells = "".join("#" if part > level + 0.5 else " " for part in filled)
        else:
            cells = "".join(_EIGHTHS[round(min(max(part - level, 0.0), 1.0) * 8)] for part in filled)
        lines.append(f"{label} {'|' if plain else '┤'}{cells}")
    lines.append(f"{bottom:6.2f} {('+' if plain else '└') + ('-' if plain else '─') * columns}")
    return lines
