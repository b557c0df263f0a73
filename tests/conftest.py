"""One thread for each process of the tests."""

from __future__ import annotations

import os

# Read when numpy and torch are imported, here and in every process that a test starts. The tests' models are so small
# that threads only wait for each other, and as many processes run at once as there are cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
