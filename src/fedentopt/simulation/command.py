"""The command that makes a run again, for `run.json`."""

from __future__ import annotations

import shlex

from fedentopt.simulation.config import PARTS, RunConfig


def command_of(config: RunConfig) -> str:
    """The command that makes this run again, alone: every setting that is not the default."""
    words = ["fedentopt", "run"]
    for name, value in config.changed().items():
        part, dot, own = name.partition(".")
        if dot and part in PARTS:
            other = next(p for p in PARTS if p != part)
            words += ["--set", f"{name if own in config.of(other) else own}={value}"]
            continue
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", "none" if value is None else str(value)]
    return shlex.join(words)
