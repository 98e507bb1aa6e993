"""Numbered, acknowledged sessions between two incarnations that survive reconnects."""
