"""Write docs/methods.md from the registries: `python docs/make_methods.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from fedentopt.algorithms import ALGORITHMS
from fedentopt.selection import SELECTORS

PAGE = Path(__file__).parent / "methods.md"
HEAD = """# Methods

Every algorithm and selector that goes by a name, with its settings. This page is made from the code by
`python docs/make_methods.py`; `fedentopt methods` prints the same.

A method is written `ALGORITHM[+SELECTOR][-dp][:key=value,...]`: `fedprox`, `fedentopt`, `fedprox+fedentopt:mu=0.1`,
`fedentopt-dp:buffer=30%`. A selector alone goes with FedAvg, an algorithm alone with random selection; `-dp` puts
Laplace noise on the label counts. Keys are settings of the method or of the run (`fedavg:lr=0.1`). A setting is given
behind the name, with `--set NAME=VALUE`, in the `[settings]` of a TOML file, or by the option named here. [A method of
your own](extending.md) is written the same way, by its import path.
"""
TOLD = """What a client tells is what the server has to see of it beside the model that it sends when it trains. Changes
of the last layer or of the model are part of that model, but have to be seen client by client. Time is measured."""


def page() -> str:
    """The page's text."""
    return "\n".join([HEAD, *_part("Algorithms", ALGORITHMS), *_part("Selectors", SELECTORS)])


def _part(title: str, registry: Any) -> list[str]:
    if registry is not SELECTORS:
        lines = [f"## {title}", "", "| name | | settings |", "| --- | --- | --- |"]
    else:
        lines = [f"## {title}", "", TOLD, "", "| name | | a client tells | settings |", "| --- | --- | --- | --- |"]
    for entry in registry.describe():
        settings = "<br>".join(_setting(one) for one in entry["settings"])
        about = f"**{entry['label']}.** {entry['about']}"
        if entry["largest"] is not None:
            about += f" At most {entry['largest']:,} clients."
        told = f" {', '.join(entry['leaves_client']) or 'nothing'} |" if registry is SELECTORS else ""
        lines.append(f"| `{entry['name']}` | {about} |{told} {settings} |")
    return [*lines, ""]


def _setting(one: dict[str, Any]) -> str:
    accepted = f", {one['accepted']}" if one["accepted"] else ""
    option = f" (`--{one['option'].replace('_', '-')}`)" if one["option"] else ""
    return f"`{one['name']}` = {one['default']}: {one['help']}{accepted}{option}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
