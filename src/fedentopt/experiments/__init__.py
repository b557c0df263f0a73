"""Experiments: methods by name, sweeps of runs, and what they leave on disk."""
