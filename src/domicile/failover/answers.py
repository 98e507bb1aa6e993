"""What a group says over HTTP: to load balancers, which want 200 or 503, and to scrapers.

`FollowerPages` answer for a whole group, from a follower's knowledge; `agent_pages` answer for
one server, from what its own agent knows. Both are pages for `observe.http.HttpServer`. An answer
of 200 is given only while it is known to be true: a load balancer that is told 200 for two servers
would send writes to both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus

from domicile.core.ids import Incarnation
from domicile.failover.agent import Agent
from domicile.failover.choice import foreign, loss_ahead
from domicile.failover.following import GroupFollower
from domicile.failover.records import GroupPhase, ServerRecord
from domicile.failover.view import GroupRecords, GroupView, LagClock, caught_up, group_view
from domicile.observe.exposition import CONTENT_TYPE, MetricFamily, Sample, gauge, gauges
from domicile.observe.http import Page, Pages
from domicile.observe.metrics import Metrics

PRIMARY, REPLICA = "/primary", "/replica"


class FollowerPages(Mapping[str, Callable[[], Page]]):
    """Pages about a whole group, and about each server of it under its id or its address.

    `/primary` and `/replica` say where the primary and its fit replicas are; `/primary/<server>`
    and `/replica/<server>` whether that server is one.
    """

    def __init__(self, follower: GroupFollower, more: Pages | None = None) -> None:
        self._follower, self._more = follower, {} if more is None else dict(more)

    def __getitem__(self, path: str) -> Callable[[], Page]:
        for kind, known in ((PRIMARY, self._primary), (REPLICA, self._replicas)):
            if path == kind:
                return lambda: self._where(known())
            if path.startswith(f"{kind}/"):
                server = path.removeprefix(f"{kind}/")
                return lambda: self._whether(known(), server)
        return self._more[path]

    def __iter__(self) -> Iterator[str]:
        return iter((PRIMARY, REPLICA, *self._more))

    def __len__(self) -> int:
        return 2 + len(self._more)

    def _primary(self) -> list[ServerRecord]:
        found = self._follower.announced()
        return [] if found is None else [found]

    def _replicas(self) -> list[ServerRecord]:
        return self._follower.replicas()

    def _where(self, found: list[ServerRecord]) -> Page:
        if found:
            return Page(HTTPStatus.OK, "".join(f"{one.address}\n" for one in found))
        return _not_now(self._why())

    def _whether(self, found: list[ServerRecord], server: str) -> Page:
        for one in found:
            if server in (one.server, one.address):
                return Page(HTTPStatus.OK, f"{one.address}\n")
        return _not_now(f"not {server}" if found else self._why())

    def _why(self) -> str:
        follower = self._follower
        if not follower.fresh:
            return f"not known: {follower.problem or 'the store has not confirmed it yet'}"
        view = group_view(follower.records)
        waits = f": {view.waits}" if view.waits else ""
        return f"{view.phase} {view.epoch}{waits}"


def follower_metrics(
    follower: GroupFollower, meter: Metrics, now: Callable[[], float]
) -> Callable[[], Page]:
    """`/metrics` of a process that follows a group."""
    clock = LagClock()

    def page() -> Page:
        clock.note(follower.records, now())
        known = group_gauges(follower.records, clock, now(), fresh=follower.fresh)
        return Page(HTTPStatus.OK, meter.text(known), CONTENT_TYPE)

    return page


def group_gauges(
    records: GroupRecords, clock: LagClock, now: float, *, fresh: bool = True
) -> list[MetricFamily]:
    """The gauges of one group. Labels are the ids of its servers, of which a group has few."""
    view = group_view(records)
    rows = {one.server: one for one in view.servers}
    lags = {name: float(one.lag) for name, one in rows.items() if one.lag is not None}
    behind = {
        name: seconds
        for name, one in rows.items()
        if one.lag is not None and (seconds := clock.behind_s(one.offset, now)) is not None
    }
    found = [
        gauge("domicile_group_known", "1 while what follows is known to be true.", fresh),
        gauge("domicile_group_epoch", "The group's epoch; it rises with each change.", view.epoch),
        gauge("domicile_group_served", "1 while a primary accepts writes.", view.served),
        gauge("domicile_group_paused", "1 while no change of primary may begin.", view.paused),
        gauge("domicile_group_waits", "1 while the group waits for something.", bool(view.waits)),
        gauges("domicile_group_healthy", "1 for a server that does what it should.", "server",
               {name: float(one.healthy) for name, one in rows.items()}),
        gauges("domicile_group_lag_bytes", "What the primary has and a server has not.", "server",
               lags),
        gauges("domicile_group_lag_seconds", "The same as a time, once it was observed.", "server",
               behind),
        _resyncs(view),
    ]  # fmt: skip
    return found + _loss_gauges(records, clock, now)


def _resyncs(view: GroupView) -> MetricFamily:
    samples = [
        Sample(count, (("server", one.server), ("way", way)))
        for one in view.servers
        for way, count in (one.resyncs or {}).items()
    ]
    text = "How often servers came to follow again, by what that took."
    return MetricFamily("domicile_group_resyncs_total", "counter", text, samples)


def _loss_gauges(records: GroupRecords, clock: LagClock, now: float) -> list[MetricFamily]:
    """F10: what failing over now would lose, in bytes and seconds."""
    state, config = records.state, records.config
    if state is None or config is None or state.phase is not GroupPhase.SERVING:
        return []
    ahead = loss_ahead(state, config, records.members)
    best = [one for one in records.members.values() if one.server == ahead.server]
    if not best:
        return []
    text = "What failing over now would lose: bytes that no server that could be chosen has."
    lost = 0 if ahead.excluded else ahead.offset
    found = [gauge("domicile_group_would_lose_bytes", text, lost)]
    seconds = 0.0 if ahead.excluded else clock.behind_s(best[-1].offset, now)
    if seconds is not None:
        text = "The same as a time, once it was observed."
        found.append(gauge("domicile_group_would_lose_seconds", text, seconds))
    return found


def agent_pages(
    current: Callable[[], Agent | None], meter: Metrics, now: Callable[[], float]
) -> Pages:
    """Pages beside an agent: `/primary` and `/replica` for its own server, metrics and health.

    `current` is the incarnation that runs now, `now` the clock of its lease. Without a valid lease
    `/primary` and `/replica` say 503 (L1). `/healthz` says 200 for as long as the process answers:
    what an agent waits for is not mended by starting it anew.
    """
    clock = LagClock()

    def primary() -> Page:
        agent = current()
        why = "the agent has not joined" if agent is None else _not_primary(agent, now())
        return _not_now(why) if why or agent is None else _here(agent)

    def replica() -> Page:
        agent = current()
        why = "the agent has not joined" if agent is None else _not_replica(agent, now())
        return _not_now(why) if why or agent is None else _here(agent)

    def metrics() -> Page:
        agent = current()
        known: list[MetricFamily] = []
        if agent is not None:
            records = _known_to(agent)
            clock.note(records, now())
            valid = agent.member.lease.valid(now())
            known = group_gauges(records, clock, now(), fresh=valid)
        return Page(HTTPStatus.OK, meter.text(known), CONTENT_TYPE)

    def health() -> Page:
        agent = current()
        doing = "the agent has not joined" if agent is None else agent.machine.doing
        return Page(HTTPStatus.OK, f"{doing}\n")

    return {PRIMARY: primary, REPLICA: replica, "/metrics": metrics, "/healthz": health}


def _known_to(agent: Agent) -> GroupRecords:
    machine = agent.machine
    records = GroupRecords(agent.group)
    records.config, records.state = machine.config, machine.state
    records.state_revision = machine.state_revision
    records.members = dict[Incarnation, ServerRecord](machine.members)
    return records


def _not_primary(agent: Agent, now: float) -> str:
    """Why the agent's own server is not the primary that accepts writes; empty if it is."""
    machine = agent.machine
    state, seen = machine.state, machine.seen
    if not agent.member.lease.valid(now):
        return "the agent's lease is over"
    if state is None or state.phase is not GroupPhase.SERVING:
        return machine.doing
    if state.primary != machine.me:
        return f"the primary is {state.primary_server}"
    if seen is None or seen.open_epoch != state.epoch:
        return "it refuses writes"
    return ""


def _not_replica(agent: Agent, now: float) -> str:
    """Why the agent's own server is not a fit replica of the announced primary."""
    machine = agent.machine
    state, seen = machine.state, machine.seen
    if not agent.member.lease.valid(now):
        return "the agent's lease is over"
    if state is None or state.phase is not GroupPhase.SERVING:
        return machine.doing
    if seen is None or not seen.up:
        return "it does not run"
    if state.primary == machine.me:
        return "it is the primary"
    own = machine.members.get(machine.me)
    if not seen.fit or (own is not None and foreign(own, state)):
        return f"it is not fit: {seen.why}"
    if seen.follows != state.primary_server:
        return f"it does not follow {state.primary_server}"
    if own is not None and not caught_up(own, state):
        return f"it still catches up with {state.primary_server}"
    return ""


def _here(agent: Agent) -> Page:
    own = agent.machine.members.get(agent.machine.me)
    return Page(HTTPStatus.OK, f"{own.address if own else ''}\n")


def _not_now(why: str) -> Page:
    return Page(HTTPStatus.SERVICE_UNAVAILABLE, f"{why}\n")
