"""What the store holds: its keys, its records, the map, and one view of them all."""
