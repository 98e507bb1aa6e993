"""Interfaces between Domicile and the world. Protocols only; each has a memory implementation."""
