"""Digests of a few runs, held still."""
