"""How do packets travel between two processes? Connections over TCP, Unix sockets, TLS and memory.

Links (`domicile.links`) use them and make sessions of them. Nothing here knows about messages.
"""
