"""Limits and timings, with the defaults of the rules, checked when they are made (L2).

Every limit that a rule names has its default here. `config` reads the values from the environment
and from files. This module is pure, so that the core may import it; it imports only `errors`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from domicile.errors import ConfigError

CLOCK_DRIFT = 0.001
"""A1: clock rates differ by at most this fraction (rho)."""

FENCINGS = ("lease", "health")
"""What frees the shards of a silent node: its expired lease, or a proof of its death (C9)."""

MAY_BE_ZERO = ("compress_bytes", "residents")
"""Limits that 0 switches off."""

PLAIN: dict[Any, type] = {"str": str, "bool": bool}
"""Types of fields that are not numbers, by their annotation."""

_SAID: dict[Any, str] = {"str": "a text", "bool": "True or False"}


MAX_TICK_S = 0.25
"""S4: the most by which one transaction may advance a store's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Limits and timings of one node or client. Zero for a derived timing means "derive it"."""

    # leases (L2)
    ttl_s: float = 6.0
    margin_s: float = 0.0
    renew_s: float = 0.0
    op_timeout_s: float = 0.0
    evict_after_s: float = 0.0
    fencing: str = "lease"
    health: str = ""
    coordinator_role: str = ""
    # shards and their balance
    shards: int = 256
    balance_interval_s: float = 1.0
    balance_limit: float = 0.1
    balance_shards: int = 1_000
    balance_receiver: float = 0.5
    strategy_timeout_s: float = 1.0
    poison_deaths: int = 3
    poison_window_s: float = 60.0
    min_nodes: int = 1
    settle_s: float = 0.5
    settle_max_s: float = 3.0
    heard_s: float = 2.0
    # a blocked event loop, slow handlers
    stall_limit_s: float = 30.0
    slow_s: float = 0.1
    stuck_s: float = 2.0
    # messages
    ask_timeout_s: float = 10.0
    handler_timeout_s: float = 30.0
    stop_timeout_s: float = 5.0
    idle_s: float = 120.0
    residents: int = 0
    residents_policy: str = "lru"
    blocking_threads: int = 8
    blocking_queue: int = 1_000
    carry_bytes: int = 4 * 1024 * 1024
    serialize_local: bool = False
    mailbox: int = 1_000
    buffer: int = 1_000
    hold_bytes: int = 16 * 1024 * 1024
    node_mail: int = 16_384
    node_wait_s: float = 2.0
    node_turns: int = 50_000
    window: int = 1_024
    message_bytes: int = 4 * 1024 * 1024
    chain: int = 16
    # links and hand-off
    link_timeout_s: float = 5.0
    hold_timeout_s: float = 10.0
    drain_deadline_s: float = 10.0
    linger_s: float = 5.0
    link_frames: int = 256
    compress_bytes: int = 0
    # which processes may connect
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    insecure: bool = False
    # for operators
    http: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in PLAIN:
                if not isinstance(value, PLAIN[field.type]):
                    raise ConfigError(f"{field.name} must be {_SAID[field.type]}, it is {value!r}")
                continue
            kinds = (int,) if field.type == "int" else (int, float)
            if not isinstance(value, kinds) or isinstance(value, bool) or value == float("inf"):
                kind = "a whole number" if field.type == "int" else "a number"
                raise ConfigError(f"{field.name} must be {kind}, it is {value!r}")
        derived = _derive(self.ttl_s)
        for name, value in derived.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in PLAIN or (field.name in MAY_BE_ZERO and value == 0):
                continue
            if not value > 0:
                raise ConfigError(f"{field.name} must be positive, it is {value!r}")
        if self.fencing not in FENCINGS:
            raise ConfigError(
                f"fencing={self.fencing!r} must be one of {', '.join(map(repr, FENCINGS))}: leases "
                "that run out, or proof that a process can never run again"
            )
        if 2 * self.renew_s + self.op_timeout_s > self.ttl_s - self.margin_s + 1e-9:
            raise ConfigError(
                f"ttl_s={self.ttl_s} leaves no room for two renewals: 2·renew_s + op_timeout_s = "
                f"{2 * self.renew_s + self.op_timeout_s:g} must be at most ttl_s − margin_s = "
                f"{self.ttl_s - self.margin_s:g} (L2). Raise ttl_s or lower renew_s."
            )
        floor = CLOCK_DRIFT * self.ttl_s + MAX_TICK_S + self.stop_budget_s
        if self.margin_s + 1e-9 < floor:
            raise ConfigError(
                f"margin_s={self.margin_s:g} is too short: it must be at least {floor:g} "
                f"(drift + one store tick + stop budget, L2)."
            )

    @property
    def stop_budget_s(self) -> float:
        """Seconds after the deadline in which cancelled handlers may still clean up (L4)."""
        return self.margin_s / 2


def _derive(ttl_s: float) -> dict[str, float]:
    """The default timings of L2 for a ttl."""
    margin_s = max(0.6, ttl_s / 6)
    renew_s = min(ttl_s / 4, (ttl_s - margin_s) / 3)
    return {
        "margin_s": margin_s,
        "renew_s": renew_s,
        "op_timeout_s": renew_s,
        "evict_after_s": ttl_s,
    }
