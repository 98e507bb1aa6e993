"""What can operators and their tools see of a process? Metrics, probes, traces."""

from domicile.observe.metrics import Metrics

__all__ = ["Metrics"]
