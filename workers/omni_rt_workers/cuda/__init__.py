"""Tensors that cross processes on the device: a pool shared by IPC, ordered by events."""
