"""The command that makes a run again, for `run.json`."""

from __future__ import annotations

import shlex

from fedentopt.simulation.config import PARTS, RunConfig
from fedentopt.simulation.jobs import DATASET_DEFAULTS


def command_of(config: RunConfig) -> str:
    """The command that makes this run again, alone: every setting that is not the default, and all that the command
    would fill in for the data set."""
    words = ["fedentopt", "run"]
    filled_in = {name: getattr(config, name) for name in DATASET_DEFAULTS.get(config.dataset, {})}
    for name, value in (config.changed() | filled_in).items():
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
