"""The reference store: one process, in memory."""
