"""How do entities' fields (`carry=True`) and pending timers follow a shard on a planned move?"""
