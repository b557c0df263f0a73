"""Runs as tests write them: settings of the run and of its method side by side."""

from __future__ import annotations

from typing import Any

from fedentopt.simulation.config import RunConfig


def run_config(**settings: Any) -> RunConfig:
    """`RunConfig` from flat settings, as a TOML file gives them."""
    return RunConfig.from_dict(settings)
