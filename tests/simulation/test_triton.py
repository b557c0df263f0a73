"""Runs the Triton kernels' tests in a process of their own: the interpreter is chosen before Triton is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("kernels_interpreted.py", 36),
        ("wide_interpreted.py", 15),
        ("wide_norms_interpreted.py", 14),
        ("stacks_interpreted.py", 11),
        ("wide_forms_interpreted.py", 36),
        ("norms_interpreted.py", 52),
    ],
)
def test_the_kernels_in_tritons_interpreter(file: str, tests: int) -> None:
    pytest.importorskip("triton")
    here = Path(__file__).parent.parent / "support"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, str(here / file)], env=environment, cwd=here.parent.parent, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    counted = re.search(r"(\d+) passed", run.stdout)
    assert counted
    assert int(counted[1]) >= tests
    assert "skipped" not in run.stdout.splitlines()[-1]
