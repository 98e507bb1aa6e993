"""How a shard moves without losing, duplicating or reordering a message."""
