"""Benchmarks. Run them from the root of the project, as modules.

`run` measures messages, entities, moves and crashes, beside peers; `idle` what a cluster costs that
does nothing; `profile` where the time of a message goes; `pause`, `recovery`, `planner` and `store`
one thing each. `caller` and `part` are what every measured process runs, `processes` its parent's
side, `home` Domicile's processes and `peers` those of others.
"""
