"""Tiny pipelines of the real diffusers classes, with seeded random weights."""
