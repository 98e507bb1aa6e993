"""What must an implementation of a port do? Pytest classes to derive from.

Derive from one in a test module, say how to open what is tested, and pytest runs the rest.
"""
