"""Pure decisions. No asyncio, clock, socket, logger or global random source in here:
`now` and a `Random` are arguments, collections iterate in insertion order, nothing is hashed
with `hash()`. Shells in the layers above carry out what these functions and machines decide.
"""
