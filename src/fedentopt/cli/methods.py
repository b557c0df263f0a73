"""`fedentopt methods`: every algorithm and selector with its settings, from the registries."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape

from fedentopt.algorithms import ALGORITHMS
from fedentopt.cli.console import out, print_json
from fedentopt.selection import SELECTORS

HOW = (
    "A method is written ALGORITHM[+SELECTOR][-dp][:key=value,...], such as fedprox+fedentopt:mu=0.1 or fedentopt-dp. "
    "A selector alone goes with fedavg, an algorithm alone with random selection; -dp puts Laplace noise on label "
    "counts. One's own code goes by package.module:factory."
)


def methods(json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a list.")] = False) -> None:
    """List the methods: algorithms, selectors, and the settings of each."""
    if json:
        print_json({"algorithms": ALGORITHMS.describe(), "selectors": SELECTORS.describe()})
        return
    console = out()
    console.print(HOW)
    for registry in (ALGORITHMS, SELECTORS):
        console.print(f"\n[bold]{registry.kind}s[/]")
        for entry in registry.describe():
            console.print(f"  [bold]{escape(entry['name'])}[/]  {escape(entry['about'])}", soft_wrap=False)
            if entry["needs"]:
                console.print(f"    needs: {', '.join(entry['needs'])}", style="dim")
            if registry is SELECTORS:
                leaves = ", ".join(entry["leaves_client"]) or "nothing but its model"
                console.print(f"    a client tells: {leaves}", style="dim")
            if entry["largest"] is not None:
                console.print(f"    serves at most {entry['largest']:,} clients", style="dim")
            for one in entry["settings"]:
                console.print(f"    {escape(_line(one))}", style="dim", soft_wrap=False)


def _line(one: dict[str, Any]) -> str:
    option = f"--{one['option'].replace('_', '-')}" if one["option"] else f"--set {one['name']}=..."
    accepted = f"; {one['accepted']}" if one["accepted"] else ""
    return f"{one['name']} = {one['default']}  {one['help']}{accepted} ({option})"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("methods")(methods)
