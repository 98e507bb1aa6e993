"""How do entities' fields follow a shard on a planned move (`carry=True`)?"""
