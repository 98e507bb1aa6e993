"""What does `domicile demo` run? A bank on real processes, faults, and a judged report.

One command of `ops`: nothing of it is used elsewhere. Read `run` first.
"""
