"""Benchmarks of selection and of the engine."""
