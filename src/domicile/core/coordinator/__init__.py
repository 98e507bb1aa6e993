"""What may be committed about where shards are, and when."""
