"""Whole clusters in one process and in virtual time."""
