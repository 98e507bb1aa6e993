"""What an implementation of a port must do, as pytest classes to derive from.

Subclass one in a test module, say how to open what is tested, and pytest runs the rest.
"""
