"""Where shards should be; never when they go there."""
