"""Engines by name. Each is imported only when a stage asks for it."""
