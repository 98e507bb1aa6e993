"""How parts of a process share work and threads: small helpers that any shell may own."""
