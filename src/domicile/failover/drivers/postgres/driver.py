"""The driver of PostgreSQL, for the agent's process. Implements `ReplicaDriver`."""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from domicile.failover.database_kinds import Mode, ServerPlace
from domicile.failover.driver import ReplicaDriver, SavedLoss, ServerFacts
from domicile.failover.drivers.postgres.config_files import (
    FollowState,
    GateState,
    conninfo,
    slot_name,
    standby_names,
)
from domicile.failover.drivers.postgres.gate import RUN
from domicile.failover.drivers.postgres.local_server import (
    CATCHING_UP,
    POLL_S,
    LengtheningPauses,
    LocalServer,
    Login,
    ServerRefused,
    read_state,
    server_answered,
    sync_folder,
)
from domicile.failover.drivers.postgres.lost_log import save_log
from domicile.failover.drivers.postgres.timelines import (
    Approach,
    Lineage,
    approach,
    is_segment,
    lineage,
    lsn_of,
    segment_number,
)
from domicile.failover.records import Resyncs
from domicile.failover.sync_set import InUse

if TYPE_CHECKING:
    from domicile.failover.drivers.postgres.local_server import Session

log = logging.getLogger("domicile")

BACK_S = 30.0
"""How long a server that was stopped may take to be started again by its guard."""

STREAMS_S = 10.0
"""How long a follower may take to begin streaming before its log is looked at again."""

MOST_PATIENCE = 32
"""I6: so many times as long it may take in the end. Each time that was too short is doubled: a
machine that is too slow for one time would else begin anew for ever."""

MOST_LATE = 2
"""Data that was made for a primary is made anew once it was too late so often: then it may lack
what the primary has no more."""

WORK_S = 60.0
"""How long one statement of the driver may take."""

GRACE_S = 0.25
"""How long a switchover lets transactions end by themselves before their sessions end (FO-15)."""

KEPT_MARKS = 100
"""I6: older marks of promotions are deleted."""

MAKE_MARKS = """
CREATE SCHEMA IF NOT EXISTS domicile_failover;
CREATE TABLE IF NOT EXISTS domicile_failover.history (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    epoch bigint NOT NULL, timeline bigint NOT NULL, token text NOT NULL
);
"""

PRIMARY = """
SELECT pg_is_in_recovery() AS recovering,
    (SELECT system_identifier::text FROM pg_control_system()) AS system,
    (SELECT setting::bigint FROM pg_settings WHERE name = 'wal_segment_size') AS segment,
    CASE WHEN NOT pg_is_in_recovery() THEN pg_current_wal_flush_lsn()::text END AS place,
    CASE WHEN NOT pg_is_in_recovery() THEN pg_walfile_name(pg_current_wal_insert_lsn()) END AS file
"""

LOG = """
SELECT ARRAY(SELECT name FROM pg_ls_waldir()) AS names,
    CASE WHEN $1 <> '' THEN pg_read_file('pg_wal/' || $1) ELSE '' END AS history
"""


MARK = """
SELECT pg_logical_emit_message(true, 'domicile', '{epoch}');
INSERT INTO domicile_failover.history (epoch, timeline, token)
    SELECT {epoch}, {timeline}, '{token}' WHERE NOT EXISTS (SELECT FROM
        (SELECT * FROM domicile_failover.history ORDER BY number DESC LIMIT 1) AS last
        WHERE last.epoch = {epoch} AND last.timeline = {timeline});
DELETE FROM domicile_failover.history
    WHERE number <= (SELECT max(number) FROM domicile_failover.history) - {kept};
"""
"""The message tells the mark from clients' writes, for those who count what is lost."""


LOOK = f"""
SELECT pg_is_in_recovery() AS recovering, {RUN} AS run,
    (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
        ELSE pg_current_wal_flush_lsn() END)::text AS place,
    (SELECT system_identifier::text FROM pg_control_system()) AS system,
    CASE WHEN pg_is_in_recovery() THEN 0
        ELSE ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint
        END AS timeline,
    current_setting('domicile.gate', true) AS gate,
    current_setting('domicile.follows', true) AS follows,
    current_setting('synchronous_standby_names') AS names,
    current_setting('recovery_min_apply_delay') AS delay,
    to_regclass('domicile_failover.history') IS NOT NULL AS marked
"""

LAST_MARK = "SELECT token, timeline FROM domicile_failover.history ORDER BY number DESC LIMIT 1"

TELL = f"""{LOOK.rstrip()},
    EXISTS (SELECT FROM pg_stat_wal_receiver WHERE status = 'streaming') AS streams,
    (SELECT setting::bigint FROM pg_settings WHERE name = 'wal_segment_size') AS segment
"""


PROGRESS = """
SELECT pg_last_wal_replay_lsn()::text AS place,
    EXISTS (SELECT FROM pg_stat_wal_receiver WHERE status = 'streaming') AS streams
"""


class PostgresDriver(ReplicaDriver):
    """One server on this machine. Its process belongs to the guard."""

    def __init__(self, place: ServerPlace, mode: Mode) -> None:
        self._server = LocalServer(place)
        self._mode = mode
        self._eye: Session | None = None
        self._looking = asyncio.Lock()
        self._stood = ""
        """The run in which the server stands, shut and without a primary; empty: it may not."""
        self._ready = ""
        """The run in which a promotion has nothing more to shut; empty: it may have."""
        self._resyncs: Resyncs | None = None
        self._streams_on = False
        """Whether the server is to follow with nothing but what it is missing."""
        self._patience = 1
        """Of `MOST_PATIENCE`: how many times `STREAMS_S` the server has now."""
        self._late = 0
        """How often the server began to stream too late, since its data was made."""

    # the port

    async def look(self) -> ServerFacts:
        """As `ReplicaDriver.look`."""
        try:
            # One at a time: a second one would need a session of its own, which takes longer.
            async with self._looking:
                try:
                    return await self._look()
                except ServerRefused as refused:
                    if refused.starting:
                        raise
                    # The session may have ended with the server, and the server be back.
                    return await self._look()
        except (OSError, TimeoutError) as error:
            return self._without_answer(error)

    async def stand(self) -> None:
        """As `ReplicaDriver.stand`. A server that was open comes back in recovery."""
        self._server.prepare()
        if await self._hollow():
            self._server.write_follow(FollowState())
            self._server.reload()
            return
        if self._ready and self._stood != self._ready and await self._stands(self._ready):
            return
        async with self._server.session("agent") as session:
            now = await self._now(session)
            if now.recovering and self._stood == now.run:
                await self._applied(session)
                return
        if not now.recovering:
            if now.gate.run == now.run and not now.gate.epoch:
                await self._server.shut("agent", now.gate)
                return
            await self._server.stop_now()
            now = await self._back(now.run)
        await self._stop_streaming(self._shut)
        self._stood = now.run

    async def get_ready(self) -> None:
        """As `ReplicaDriver.get_ready`. It is shut as for the promotion; sessions end now."""
        now = await self._tell()
        if now.recovering and self._ready != now.run:
            await self._server.shut("agent", _to_promote(now.run))
            self._ready = now.run

    async def drain(self) -> None:
        """As `ReplicaDriver.drain`. Clients are refused until it is over; then sessions end."""
        now = await self._tell()
        if now.recovering:
            return
        if now.gate.run != now.run:
            raise ConnectionError("the server was opened by nobody; it is not drained")
        drained = msgspec.structs.replace(now.gate, epoch=0)
        await self._server.shut("agent", drained, grace_s=GRACE_S)

    async def dismiss(self) -> None:
        """As `ReplicaDriver.dismiss`. Nothing waits: draining ends all sessions."""

    async def save(self, kept: int) -> SavedLoss:
        """As `ReplicaDriver.save`: the files of the log that reach beyond, and what they hold."""
        now = await self._tell()
        own = await self._server.lineage(now.place, now.segment_bytes)
        return await save_log(self._server, own, kept, now.place, now.segment_bytes)

    async def follow(self, address: str, kept: int) -> None:
        """As `ReplicaDriver.follow`."""
        self._stood = self._ready = ""
        self._server.prepare()
        primary = await self._primary(address)
        now: _Now | None = None
        with suppress(OSError):
            now = await self._tell()
        streams = now is not None and now.recovering and now.streams and now.follows == address
        if not streams:
            await self._approach(address, primary, kept, now)
        await self._caught_up(primary.goal)
        self._patience, self._late = 1, 0
        if self._streams_on:
            self._streams_on = False
            self._count(partial=1)
        self._server.answers_again()
        written = self._server.written_gate()
        if written.run or written.nobody != self._shut.nobody:
            # If it was to be promoted, nobody but the group's agent may do that from here on.
            self._server.write_gate(self._shut)
        self._server.write_rules(shut=False)
        self._server.reload()
        if not streams:
            await self._drop_slots()

    async def promote(self, epoch: int) -> None:
        """As `ReplicaDriver.promote`."""
        async with self._server.session("agent") as session:
            now = await self._now(session)
            if not now.recovering and (now.gate.run != now.run or now.gate.epoch):
                raise ConnectionError("the server is out of recovery and open: it must stand first")
            await self._shut_to_promote(now)
            self._stood = self._ready = ""
            if now.recovering:
                await self._leave_recovery(session)
            self._server.fence_start()
            await self._mark(session, epoch)

    async def close(self) -> None:
        """As `ReplicaDriver.close`."""
        eye, self._eye = self._eye, None
        if eye is not None:
            eye.terminate()

    # what it is

    async def _look(self) -> ServerFacts:
        eye, self._eye = self._eye, None
        if eye is None or eye.is_closed():
            eye = await self._server.connect("agent")
        try:
            async with server_answered("the server"), asyncio.timeout(self._server.answer_s):
                facts = await self._facts(eye)
        except BaseException:
            eye.terminate()
            raise
        self._eye = eye
        return facts

    async def _facts(self, session: Session) -> ServerFacts:
        row = await session.fetchrow(LOOK)
        assert row is not None
        self._server.answers_again()
        mark = None
        if row["marked"]:
            mark = await session.fetchrow(LAST_MARK)
        recovering, run = row["recovering"], row["run"]
        native = f"{row['system']}:{'' if mark is None else mark['token']}"
        if not recovering and mark is not None and mark["timeline"] != row["timeline"]:
            # Somebody else has promoted it, or its mark is not written yet.
            native = f"{native}+{row['timeline']}"
        gate = read_state(row["gate"], GateState)
        here = gate.run == run
        open_epoch = 0
        in_use: InUse | None = None
        acknowledged: dict[str, int] = {}
        if not recovering:
            # Out of recovery, and not by this run's guard and driver: nobody's epoch.
            open_epoch = gate.epoch if here else -1
            if open_epoch and row["names"] != standby_names(gate):
                # Somebody has set it since: commits do not wait for the quorum.
                open_epoch, here = -1, False
            if here and gate.quorum is not None and not gate.nobody:
                in_use = InUse(gate.quorum, gate.since)
            acknowledged = await _followers(session)
        why = ""
        if recovering and row["delay"] != "0":
            why = "it applies what it receives later: recovery_min_apply_delay must be 0"
        return ServerFacts(
            up=True, run=run, open_epoch=open_epoch,
            follows=(row["follows"] or "") if recovering else "",
            offset=lsn_of(row["place"] or "0/0"), native=native, fit=not why, why=why,
            in_use=in_use, acknowledged=acknowledged, resyncs=self._counted(),
        )  # fmt: skip

    def _without_answer(self, error: Exception) -> ServerFacts:
        if self._broken:
            empty = not self._server.has_data
            why = "it has no data yet" if empty else "its data is being replaced"
            return ServerFacts(
                up=True, empty=empty, fit=False, why=f"{why}; it copies the primary's first"
            )
        if isinstance(error, ServerRefused) and error.forbidden:
            return ServerFacts(up=False, why=str(error))
        return ServerFacts(up=False, why="it does not answer")

    @property
    def _broken(self) -> bool:
        return not self._server.has_data or self._server.replacing.exists()

    async def _hollow(self) -> bool:
        """Whether there is nothing to ask: no data, or data that is not whole yet."""
        if self._broken and self._server.may_start:
            with suppress(OSError):
                await self._tell()
        return self._broken

    async def _tell(self) -> _Now:
        async with self._server.session("agent") as session:
            return await self._now(session)

    async def _now(self, session: Session) -> _Now:
        row = await session.fetchrow(TELL)
        assert row is not None
        self._server.answers_again()
        return _Now(
            row["recovering"], row["run"], lsn_of(row["place"] or "0/0"), row["system"],
            read_state(row["gate"], GateState), row["follows"] or "", row["streams"],
            int(row["segment"]),
        )  # fmt: skip

    @property
    def _shut(self) -> GateState:
        """The gate of a server that follows or stands.

        In synchronous mode commits wait already, although there are none: it takes the server a
        while to have them wait, and it is not opened before.
        """
        return GateState(nobody=self._mode == "sync")

    # to stand

    async def _back(self, before: str) -> _Now:
        """Wait for the next run of a server that was stopped. Its guard starts it."""
        try:
            async with asyncio.timeout(BACK_S):
                while True:
                    try:
                        now = await self._tell()
                        if now.run != before:
                            return now
                    except OSError:
                        pass
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ConnectionError(
                f"the server was stopped to be fenced, and did not answer again in {BACK_S:.0f} s: "
                "look at its log, and whether its guard runs"
            ) from None

    async def _stands(self, ready: str) -> bool:
        """Whether the run that is ready to be promoted stands now; False: it is another one.

        Nobody has come in since it was shut.
        """
        server = self._server
        server.write_follow(FollowState())
        async with server.shutting("agent", _to_promote(ready)) as session:
            now = await self._now(session)
            if not now.recovering or now.run != ready:
                return False
            await self._unfollowed(session)
            self._stood = ready
            return True

    async def _stop_streaming(self, gate: GateState) -> None:
        """Follow nobody, let nobody in, and apply what was received.

        It is durable before it takes effect: no restart undoes it (F6). All files are written
        before the server loads them, once.
        """
        server = self._server
        server.write_follow(FollowState())
        async with server.shutting("agent", gate) as session:
            await server.end_sessions(session)
            await self._unfollowed(session)

    async def _unfollowed(self, session: Session) -> None:
        """Wait until it has let go of its primary, and has applied what it got."""
        if await session.fetchval("SELECT current_setting('primary_conninfo')"):
            await self._server.take_back(session)
        pauses = LengtheningPauses()
        async with asyncio.timeout(WORK_S):
            while await session.fetchval("SELECT count(*) FROM pg_stat_wal_receiver"):
                await pauses.one()
        await self._applied(session)

    async def _applied(self, session: Session) -> None:
        """Wait until all that was received is applied. The log may end with part of an entry."""
        pauses = LengtheningPauses()
        async with asyncio.timeout(WORK_S):
            while True:
                row = await session.fetchrow(
                    "SELECT pg_last_wal_receive_lsn() = pg_last_wal_replay_lsn() AS level,"
                    " pg_is_wal_replay_paused() AS paused,"
                    " EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'startup'"
                    "  AND wait_event = 'RecoveryRetrieveRetryInterval') AS waits"
                )
                assert row is not None
                if row["paused"]:
                    await session.execute("SELECT pg_wal_replay_resume()")
                elif row["level"] or row["waits"]:
                    return
                await pauses.one()

    # to follow

    async def _primary(self, address: str) -> _Primary:
        host, _, port = address.rpartition(":")
        login = self._server.login._replace(host=host.strip("[]"), port=int(port))
        async with self._server.session("agent", login=login) as session:
            row = await session.fetchrow(PRIMARY)
            assert row is not None
            if row["recovering"]:
                raise ConnectionError(f"{address} is in recovery: nobody can follow it yet")
            timeline, goal = int(row["file"][:8], 16), lsn_of(row["place"])
            kept = await session.fetchrow(LOG, f"{timeline:08X}.history" if timeline > 1 else "")
            assert kept is not None
            mark = await _last_mark(session)
            size = int(row["segment"])
            oldest = min(
                (segment_number(name, size) * size for name in kept["names"] if is_segment(name)),
                default=goal,
            )
            slot = slot_name(self._server.name)
            # One that fell too far behind can't be used any more.
            await session.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                " WHERE slot_name = $1 AND wal_status = 'lost' AND NOT active", slot,
            )  # fmt: skip
            await session.execute(
                "SELECT pg_create_physical_replication_slot($1, true) WHERE NOT EXISTS"
                " (SELECT FROM pg_replication_slots WHERE slot_name = $1)", slot,
            )  # fmt: skip
            native = f"{row['system']}:{'' if mark is None else mark['token']}"
            own = lineage(kept["history"], timeline, goal)
            return _Primary(login, row["system"], native, goal, own, oldest)

    async def _approach(self, address: str, primary: _Primary, kept: int, now: _Now | None) -> None:
        """Make the server one that can follow, and have it follow. `now`: what it is, if known."""
        how = Approach.COPY
        if await self._hollow():
            if self._server.made_for(primary.native) and self._late < MOST_LATE:
                # Its data is as it must be, and it only starts late.
                self._server.write_follow(FollowState(address=address))
                self._server.reload()
                return
        else:
            now = now or await self._tell()
            if not now.recovering:
                # Shut, so nobody loses an answer. It ends its log in order and comes back fenced.
                self._server.fence_start()
                await self._server.stop_cleanly()
                now = await self._back(now.run)
            if now.system == primary.system:
                own = await self._server.lineage(now.place, now.segment_bytes)
                how = approach(own, primary.lineage, kept=kept, oldest=primary.oldest)
        if how is Approach.REWIND and not await self._rewind(address, primary):
            how = Approach.COPY
        if how is Approach.COPY:
            await self._copy(address, primary)
        self._streams_on = how is Approach.STREAM
        self._server.write_follow(FollowState(address=address))
        self._server.reload()

    async def _rewind(self, address: str, primary: _Primary) -> bool:
        """False: what it needs of the log is gone, or it broke off. `replacing` says so then."""
        server = self._server
        async with server.session("agent", login=primary.login) as session:
            # pg_rewind reads the timeline from the last checkpoint.
            await session.execute("CHECKPOINT", timeout=WORK_S)
        kept = _own_texts(server)
        with server.hold_data() as lock:
            server.write("replacing", "pg_rewind\n")
            await server.stop_cleanly()
            try:
                await server.run(
                    "pg_rewind", "--target-pgdata", str(server.data), "--source-server",
                    _source(server, primary.login), keep=(lock,),
                )  # fmt: skip
            except ConnectionError as error:
                log.warning("everything is copied, because %s", error)
                return False
            _put_back(server, kept)
            self._started(address, primary)
            self._count(rewound=1)
            return True

    async def _copy(self, address: str, primary: _Primary) -> None:
        server = self._server
        with server.hold_data() as lock:
            if server.replaced.exists() and not server.has_data:
                # The copy was about to take its place.
                server.replaced.rename(server.data)
            await self._clear_away()
            await server.run(
                "pg_basebackup", "--pgdata", str(server.copied), "--dbname",
                _source(server, primary.login._replace(
                    user=server.feed.user, database="", sslmode=server.feed.sslmode
                )),
                "--wal-method=stream", "--checkpoint=fast", "--no-password", keep=(lock,),
            )  # fmt: skip
            kept = _own_texts(server)
            server.write("replacing", "pg_basebackup\n")
            await server.stop_now()
            if server.data.exists():
                server.data.rename(server.replaced)
            server.copied.rename(server.data)
            sync_folder(server.data.parent)
            _put_back(server, kept)
            self._started(address, primary)
            self._count(full=1)
        await self._clear_away()

    async def _clear_away(self) -> None:
        """Delete what is left of copies. By way of other names: a thread outlives its caller."""
        server = self._server
        for stale in (server.copied, server.replaced):
            if stale.exists():
                stale.rename(stale.with_name(f"{server.data.name}.gone-{secrets.token_hex(4)}"))
        for gone in server.data.parent.glob(f"{server.data.name}.gone-*"):
            await asyncio.to_thread(shutil.rmtree, gone, ignore_errors=True)

    def _started(self, address: str, primary: _Primary) -> None:
        """Let the server be started again; it needs its primary's log before it answers."""
        self._late = 0
        self._server.fence_start()
        self._server.write_follow(FollowState(address=address))
        self._server.note_made_for(primary.native)
        self._server.write("replacing", CATCHING_UP)

    def _counted(self) -> Resyncs:
        if self._resyncs is None:
            self._resyncs = self._server.read_resyncs()
        return self._resyncs

    def _count(self, *, full: int = 0, rewound: int = 0, partial: int = 0) -> None:
        before = self._counted()
        self._resyncs = Resyncs(
            full=before.full + full, partial=before.partial + partial,
            rewound=before.rewound + rewound,
        )  # fmt: skip
        self._server.write_resyncs(self._resyncs)

    async def _drop_slots(self) -> None:
        """A replica holds no log for others; a slot that nobody uses would keep it for ever."""
        try:
            async with self._server.session("agent") as session:
                await session.execute(
                    "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                    " WHERE slot_name LIKE 'domicile\\_%' AND slot_type = 'physical'"
                    " AND NOT active AND pg_is_in_recovery()"
                )
        except OSError:
            # It does not answer before it has caught up; it has none of its own then.
            return

    async def _caught_up(self, goal: int) -> None:
        """FO-02: it has all that the primary had when this began."""
        loop = asyncio.get_running_loop()
        patience_s = STREAMS_S * self._patience
        patience, seen = loop.time() + patience_s, -1
        while True:
            with suppress(OSError):
                async with self._server.session("agent") as session:
                    while loop.time() < patience:
                        row = await session.fetchrow(PROGRESS)
                        assert row is not None
                        place = lsn_of(row["place"] or "0/0")
                        if row["streams"] and place >= goal:
                            return
                        if row["streams"] or place > seen:
                            seen, patience = place, loop.time() + patience_s
                        await asyncio.sleep(POLL_S)
            if loop.time() > patience:
                self._late += 1
                self._patience = min(2 * self._patience, MOST_PATIENCE)
                raise ConnectionError(
                    f"the server has not begun to stream within {patience_s:.0f} s; its log says "
                    f"why. It has {STREAMS_S * self._patience:.0f} s the next time"
                )
            await asyncio.sleep(POLL_S)

    # to promote

    async def _shut_to_promote(self, now: _Now) -> None:
        """Shut for this run, and nobody's word makes a commit count (F12)."""
        shut = _to_promote(now.run)
        if not now.recovering:
            await self._server.shut("agent", shut)
        elif self._stood != now.run:
            await self._stop_streaming(shut)
        elif self._ready != now.run:
            # All others' sessions have ended, and nobody could begin another one.
            async with self._server.shutting("agent", shut):
                pass

    async def _leave_recovery(self, session: Session) -> None:
        """By a promotion. The server's own way of waiting for it looks ten times a second only."""
        if not await session.fetchval("SELECT pg_promote(false)"):
            raise ConnectionError("the server did not take the order to promote")
        pauses = LengtheningPauses()
        try:
            async with asyncio.timeout(WORK_S):
                while await session.fetchval("SELECT pg_is_in_recovery()"):
                    await pauses.one()
        except TimeoutError:
            raise ConnectionError(f"the promotion was not done after {WORK_S:.0f} s") from None

    async def _mark(self, session: Session, epoch: int) -> None:
        """Write the mark of this epoch, unless it is there. One question, and one order."""
        row = await session.fetchrow(
            "SELECT ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint"
            " AS timeline, to_regclass('domicile_failover.history') IS NOT NULL AS marked"
        )
        assert row is not None
        # As one text, so it is one transaction.
        await session.execute(
            ("" if row["marked"] else MAKE_MARKS)
            + MARK.format(
                epoch=int(epoch), timeline=int(row["timeline"]), token=secrets.token_hex(8),
                kept=KEPT_MARKS,
            )
        )  # fmt: skip


class _Now(NamedTuple):
    recovering: bool
    run: str
    place: int
    system: str
    gate: GateState
    follows: str
    streams: bool
    segment_bytes: int


class _Primary(NamedTuple):
    login: Login
    system: str
    native: str
    goal: int
    lineage: Lineage
    oldest: int


def _to_promote(run: str) -> GateState:
    """The gate of a server that nobody opened yet, and whose commits would wait for nobody."""
    return GateState(run=run, nobody=True)


OWN_FILES = ("postgresql.conf", "postgresql.auto.conf", "pg_hba.conf", "pg_ident.conf")
"""What pg_rewind and pg_basebackup would take from the primary, and is each server's own."""


def _own_texts(server: LocalServer) -> dict[str, bytes]:
    """The operator's own files in the data directory; kept beside it until they are back."""
    beside = server.files / "own"
    beside.mkdir(exist_ok=True)
    for name in OWN_FILES:
        if (server.data / name).exists() and not server.replacing.exists():
            shutil.copy2(server.data / name, beside / name)
    return {name: (beside / name).read_bytes() for name in OWN_FILES if (beside / name).exists()}


def _put_back(server: LocalServer, kept: Mapping[str, bytes]) -> None:
    for name, text in kept.items():
        # In place: the file keeps its owner.
        with (server.data / name).open("wb") as file:
            file.write(text)
    for slot in (server.data / "pg_replslot").glob("domicile_*"):
        shutil.rmtree(slot)


def _source(server: LocalServer, login: Login) -> str:
    return conninfo(
        host=login.host, port=str(login.port), user=login.user, dbname=login.database,
        sslmode=login.sslmode, application_name=server.name, connect_timeout="5",
    )  # fmt: skip


async def _last_mark(session: Session) -> Any:
    """Of the newest promotion; None if there was none."""
    if await session.fetchval("SELECT to_regclass('domicile_failover.history') IS NULL"):
        return None
    return await session.fetchrow(LAST_MARK)


async def _followers(session: Session) -> dict[str, int]:
    rows: list[Any] = await session.fetch(
        "SELECT application_name AS name, flush_lsn::text AS place FROM pg_stat_replication"
        " WHERE state = 'streaming' AND flush_lsn IS NOT NULL"
    )
    return {row["name"]: lsn_of(row["place"]) for row in rows}
