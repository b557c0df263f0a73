"""The command that makes a run again, for `run.json`."""

from __future__ import annotations

import shlex

from fedentopt.simulation.config import RunConfig


def command_of(config: RunConfig) -> str:
    """The command that makes this run again, alone: every setting that is not the default."""
    default, words = RunConfig(), ["fedentopt", "run"]
    for name, value in config.to_dict().items():
        if value == getattr(default, name):
            continue
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", "none" if value is None else str(value)]
    return shlex.join(words)
