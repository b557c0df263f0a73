"""What every command prints with: people get rich text, machines get JSON on standard output."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape


def out() -> Console:
    """Console on standard output, made anew so that redirections made later are honoured."""
    return Console(highlight=False)


def err() -> Console:
    """Console on standard error: warnings, progress, refusals."""
    return Console(stderr=True, highlight=False)


def fail(message: str) -> None:
    """Print a refusal. The text may hold anything a user typed, so markup in it is not interpreted."""
    err().print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)


def note(message: str) -> None:
    """Print a line for people on standard error."""
    err().print(escape(message), soft_wrap=True)


def print_json(value: Any) -> None:
    """Write one JSON document; NaN and infinity have no place in it."""
    json.dump(value, sys.stdout, allow_nan=False)
    sys.stdout.write("\n")
