"""The worker process of omni-rt: one loop, the engines, and the memory they write to."""
