"""A bank on real processes and a real journal, under faults, judged by its callers' own ledger.

`python -m proving.bank --minutes 5 --seed 1 --journal sqlite`, or `make chaos-bank`. Read `account`
for the entity, `tellers` for the callers, `strikes` for the faults, `ledger` for the verdict, and
`probe` for how the harness knows that a batch is on its way.
"""
