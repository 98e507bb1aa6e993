"""Chaos on real processes: random faults from a seed, mixed load, and the simulator's judges.

`python -m proving.chaos --minutes 20 --seed 1`, or `make chaos`. A run is made of rounds,
each with a cluster of its own, which is judged as a whole and then forgotten.
"""

from __future__ import annotations
