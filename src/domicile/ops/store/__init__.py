"""How does a cluster get to another store, and back? `domicile store`: commands above the work."""
