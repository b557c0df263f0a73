"""The command that makes a run again, for `run.json`."""

from __future__ import annotations

import csv
import io
import shlex
from typing import Any

from fedentopt.simulation.config import PARTS, RunConfig
from fedentopt.simulation.jobs import DATASET_DEFAULTS
from fedentopt.simulation.methods import complete


def command_of(config: RunConfig) -> str:
    """The command that makes this run again, alone: every setting that is not the default, and all that the command
    would fill in for the data set."""
    words = ["fedentopt", "run"]
    filled_in = {name: getattr(config, name) for name in DATASET_DEFAULTS.get(config.dataset, {})}
    for name, value in (config.changed() | filled_in | _left_open(config)).items():
        part, dot, own = name.partition(".")
        if dot and part in PARTS:
            other = next(p for p in PARTS if p != part)
            words += ["--set", f"{name if own in config.of(other) else own}={_word(value)}"]
            continue
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", _word(value)]
    return shlex.join(words)


def _left_open(config: RunConfig) -> dict[str, None]:
    """Settings of own methods that are none where their class says something else."""
    defaults = complete({part: getattr(config, part) for part in PARTS})
    own = {f"{part}.{name}": value for part in PARTS for name, value in config.of(part).items()}
    return {name: None for name, value in own.items() if value is None and defaults.get(name) is not None}


def _word(value: Any) -> str:
    if value is None:
        return "none"
    if not isinstance(value, tuple | list):
        return str(value)
    parts = [_word(part) for part in value]
    # Blanks around a value are not part of it when a word is read, and a line ends it, unless there are quotes.
    kept = all(part == part.strip() and len(part.splitlines()) < 2 for part in parts)
    line = io.StringIO()
    csv.writer(line, lineterminator="", quoting=csv.QUOTE_MINIMAL if kept else csv.QUOTE_ALL).writerow(parts)
    return line.getvalue()
