"""Simulations of federated learning: one run, or several methods compared.

`compare` and `simulate` are the doors; `RunConfig` is a run as data, `RunOptions` says where and how it executes,
`Result` is what comes out. Importing this needs no torch; training does.
"""

from __future__ import annotations

from fedentopt.simulation.api import compare, simulate
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.options import RunOptions
from fedentopt.simulation.result import Result

__all__ = ["Result", "RunConfig", "RunOptions", "compare", "simulate"]
