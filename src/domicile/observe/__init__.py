"""What operators and their tools see of a process: metrics, probes, traces."""

from domicile.observe.metrics import Metrics

__all__ = ["Metrics"]
