"""The paper's printed figures, where the results folder brings them in `paper_figures.json`.

Two forms are read: `{"fedavg": 46.61, "fedentopt": 52.80}` for a folder of one setting, and, for many settings,
a list such as `[{"method": "fedavg", "dataset": "cifar10", "partition": "dir:0.1", "model": "lenet5",
"figure": 46.61}]`, where every key but `figure` is a setting of the run (or `method`) that must be equal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedentopt.errors import InputError
from fedentopt.report.grouping import Method

FILE = "paper_figures.json"


class PaperFigures:
    """Looks up the printed figure of a method; refuses a file of any other form."""

    def __init__(self, content: Any) -> None:
        rules: list[Mapping[str, Any]]
        if content is None:
            rules = []
        elif isinstance(content, dict):
            rules = [{"method": name, "figure": figure} for name, figure in content.items()]
        elif isinstance(content, list) and all(isinstance(rule, dict) for rule in content):
            rules = content
        else:
            raise InputError("paper_figures.json: expected {method: figure} or a list of objects with a figure")
        for rule in rules:
            figure = rule.get("figure")
            if isinstance(figure, bool) or not isinstance(figure, (int, float)) or not math.isfinite(figure):
                raise InputError(f"paper_figures.json: figure {figure!r} of {rule.get('method')!r} is not a number")
        self._rules = rules

    @classmethod
    def read(cls, directory: Path) -> PaperFigures:
        """Those of a results folder; none where it has no such file."""
        file = directory / FILE
        if not file.is_file():
            return cls(None)
        try:
            return cls(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, OSError) as error:
            raise InputError(f"{file}: cannot be read as JSON ({error})") from error

    def of(self, method: Method) -> float | None:
        """The figure of the first rule that fits all of the method's settings."""
        facts = {**method.config, "method": method.name}
        for rule in self._rules:
            if all(facts.get(key) == value for key, value in rule.items() if key != "figure"):
                return float(rule["figure"])
        return None
