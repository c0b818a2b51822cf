"""The main process: who works on what, who holds what, who lives."""
