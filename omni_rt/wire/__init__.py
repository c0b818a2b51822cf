"""All that crosses a process boundary: tensor refs, messages, arenas, the channel."""
