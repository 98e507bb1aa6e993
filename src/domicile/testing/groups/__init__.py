"""Whole replica groups in virtual time: simulated servers and guards, real agents, and checkers.

`servers` has a simulated database with asynchronous replication, `guards` the process that closes
it, `group` a whole group with verbs for its faults, `checkers` judges what was recorded. Agents and
the store are those of the product.
"""
