"""Bugs, each kept as a patch, that the checkers have to find."""
