"""Results are read, compared and shown without torch, and without the simulator that made them."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import importlib, json, pkgutil, sys
import fedentopt.report, fedentopt.results
for package in (fedentopt.results, fedentopt.report):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print(json.dumps(sorted(sys.modules)))
"""


def test_results_and_report_import_no_simulator_and_nothing_heavy() -> None:
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    held = json.loads(said.stdout)
    assert "fedentopt.results.memory" in held
    assert "fedentopt.report.page" in held
    unwanted = ("fedentopt.simulation", "fedentopt.algorithms", "torch", "pandas", "scipy", "matplotlib", "plotly")
    assert [name for name in held if any(name == root or name.startswith(f"{root}.") for root in unwanted)] == []
