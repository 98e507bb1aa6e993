"""Tools for testing programs built on Domicile: whole clusters in virtual time."""
