"""Domicile: every key has exactly one live home in a cluster."""
