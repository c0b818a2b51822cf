"""Tiny seeded random checkpoints of the real classes: `python -m tests.tiny_models NAME FOLDER`."""
