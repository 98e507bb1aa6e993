"""Drivers: how an agent looks at a database of one kind, and makes of it what is wanted."""
