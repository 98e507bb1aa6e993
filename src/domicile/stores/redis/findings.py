"""What `domicile doctor` reports about a Redis or Valkey server.

Only `domicile.stores.redis.store` uses it. It judges what the server and the script reported; it
asks nothing itself.
"""

from __future__ import annotations

import time

from domicile.ports.findings import Finding, Severity
from domicile.stores.redis.calls import US, ScriptAnswer
from domicile.stores.redis.server import RedisFacts

FULL = 0.8
"""The part of `maxmemory` in use from which a warning is given."""

STALE_S = 2.0
CLOCKS_S = 1.0
"""Seconds between the clocks of the server and of this machine that are worth a note."""


def server_findings(facts: RedisFacts, state: ScriptAnswer) -> list[Finding]:
    """Judge a server. `state` is the answer of the script's operation `state`."""
    found = [*_server(facts), *_persistence(facts), *_memory(facts)]
    if state.status == "absent":
        return [*found, Finding(Severity.NOTE, "store", "nothing is stored here yet")]
    return [*found, *_time(state), *_contents(facts, state)]


def _server(facts: RedisFacts) -> list[Finding]:
    role = {"master": "primary", "slave": "replica"}.get(facts.info.get("role", ""), "role unknown")
    found = [Finding(Severity.OK, "server", f"{facts.version}, {role}")]
    if role == "replica":
        found.append(
            Finding(Severity.ERROR, "server", "a replica takes no writes", "name its primary")
        )
    found.append(
        Finding(
            Severity.NOTE, "consistency",
            "consistent on this one server; after a failover or a restored backup, acknowledged "
            "commits may be missing, and processes notice that only afterwards",
        )
    )  # fmt: skip
    replicas = facts.number("connected_slaves")
    if replicas:
        found.append(
            Finding(
                Severity.WARNING, "replicas",
                f"{replicas} connected; a failover to one loses what it has not received",
                "do not let Sentinel or an operator fail over by itself while nodes run",
            )
        )  # fmt: skip
    if facts.info.get("cluster_enabled") == "1":
        found.append(
            Finding(
                Severity.WARNING, "cluster",
                "a node of a Redis cluster: the store lies in one slot of it, and moving that slot "
                "or failing over loses the store", "use a server of its own",
            )
        )  # fmt: skip
    return found


def _persistence(facts: RedisFacts) -> list[Finding]:
    found: list[Finding] = []
    for said, step in facts.losses():
        known = facts.appends is not None and facts.appendfsync is not None
        severity = Severity.ERROR if known else Severity.WARNING
        found.append(Finding(severity, "persistence", said, step))
    if not found:
        found.append(Finding(Severity.OK, "persistence", "appendonly yes, appendfsync always"))
    if facts.info.get("aof_last_write_status", "ok") != "ok":
        found.append(
            Finding(
                Severity.ERROR, "disk", "the last write of the append-only file failed",
                "look at the server's log and free space there",
            )
        )  # fmt: skip
    return found


def _memory(facts: RedisFacts) -> list[Finding]:
    used, most = facts.number("used_memory"), facts.number("maxmemory")
    policy = facts.info.get("maxmemory_policy", "?")
    said = f"{used / 2**20:,.0f} MiB used" + (f" of {most / 2**20:,.0f}" if most else ", no limit")
    said += f", {policy}"
    if policy.startswith("allkeys"):
        return [
            Finding(
                Severity.ERROR if most else Severity.WARNING, "memory",
                f"{said}: it removes keys of the store when its memory is full",
                "set `maxmemory-policy noeviction`",
            )
        ]  # fmt: skip
    if most and used > most * FULL:
        return [
            Finding(
                Severity.WARNING, "memory", f"{said}: writes fail when it is full",
                "raise `maxmemory`, or move other data away",
            )
        ]  # fmt: skip
    return [Finding(Severity.OK, "memory", said)]


def _time(state: ScriptAnswer) -> list[Finding]:
    wall_s = int(state.results[4]) / US
    skipped_s, leases = wall_s - state.now_s, state.results[1]
    found: list[Finding] = []
    said = f"store time is {skipped_s:,.1f} s behind the server's clock"
    said += " (outages and steps of the clock do not count)" if skipped_s > 1 else ""
    found.append(Finding(Severity.OK, "time", said))
    if leases and state.age_s > STALE_S:
        found.append(
            Finding(
                Severity.WARNING, "time",
                f"store time last advanced {state.age_s:,.0f} s ago, so {leases} leases do not end",
                "it advances as soon as a process of any cluster runs",
            )
        )  # fmt: skip
    apart_s = wall_s - time.time()
    if abs(apart_s) > CLOCKS_S:
        found.append(
            Finding(
                Severity.NOTE, "clock",
                f"the server's clock is {apart_s:+,.1f} s from this machine's; leases do not "
                "depend on it",
            )
        )  # fmt: skip
    return found


def _contents(facts: RedisFacts, state: ScriptAnswer) -> list[Finding]:
    keys, leases, kept, trimmed = state.results[:4]
    said = (
        f"history {state.history[:8]}, revision {state.revision:,}; {keys:,} keys, {leases:,} "
        f"leases; the log has {kept:,} commits, from revision {trimmed + 1:,}"
    )
    clients, waiting = facts.number("connected_clients"), facts.number("blocked_clients")
    return [
        Finding(Severity.OK, "store", said),
        Finding(
            Severity.OK, "connections", f"{clients:,}, of which {waiting:,} wait for new commits"
        ),
    ]
