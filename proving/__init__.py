"""How Domicile itself is proved: campaigns of seeds, exhaustive search, chaos, mutants, benchmarks.

Beside `src`, not in the wheel. What users need to test their own programs is `domicile.testing`.
"""
