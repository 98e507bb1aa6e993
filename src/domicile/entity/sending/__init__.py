"""Calls on their way out: routing, waiting, refusing, timing out."""
