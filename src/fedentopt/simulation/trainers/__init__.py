"""Trainers: start models and work in, trained models out."""
