"""Settings that all tests share."""

from __future__ import annotations

import gc

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["proving.plugin", "pytester"]

settings.register_profile(
    "domicile",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("domicile")


_module = ""


def pytest_collection_finish(session: pytest.Session) -> None:
    """The tests themselves are no garbage; simulations that collect it need not look at them."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logstart(nodeid: str, location: tuple[str, int | None, str]) -> None:
    """Nor is what modules before this one have left for good."""
    global _module
    if location[0] != _module:
        _module = location[0]
        gc.collect()
        gc.freeze()
