"""How a guard opens and closes a PostgreSQL server. Implements `ServerGate`.

It runs in the guard's process. An open server is closed by an immediate stop; nothing is asked of
it. Only a server that is in recovery, or that was not opened since it was shut, is left running.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from domicile.failover.database_kinds import ServerPlace
from domicile.failover.driver import ServerGate
from domicile.failover.drivers.postgres.config_files import WEAK_COMMITS, GateState, standby_names
from domicile.failover.drivers.postgres.local_server import (
    FIRST_POLL_S,
    LOADED_S,
    POLL_S,
    LengtheningPauses,
    LocalServer,
    read_state,
    server_answered,
)
from domicile.failover.drivers.postgres.timelines import lsn_of
from domicile.failover.records import WriteQuorum

if TYPE_CHECKING:
    from domicile.failover.drivers.postgres.local_server import Session

SHUT_S = 0.4
"""How long a server that was never opened may take to be shut before it is stopped instead."""

WAITS = "SELECT wait_event = 'SyncRep' FROM pg_stat_activity WHERE pid = $1"

NUDGE = "SELECT pg_logical_emit_message(true, 'domicile', 'quorum')"
"""An entry of the log; its commit waits for nobody but the own disk."""

RUN = "(extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint::text"
"""SQL for the id of a run of the server."""


class PostgresGate(ServerGate):
    """One server on this machine."""

    def __init__(self, place: ServerPlace) -> None:
        self._server = LocalServer(place)

    async def process_id(self, run: str) -> int:
        """As `ServerGate.process_id`."""
        async with self._server.session("guard") as session:
            row = await session.fetchrow(
                f"SELECT {RUN} AS run, pg_read_file('postmaster.pid') AS file"
            )
            assert row is not None
            _check_run(row["run"], run)
            return int(row["file"].split("\n", 1)[0])

    async def unlock(self, epoch: int, run: str, quorum: WriteQuorum | None) -> None:
        """As `ServerGate.unlock`."""
        async with self._server.session("guard") as session:
            now = await self._tell(session)
            if now.recovering:
                raise ConnectionError("the server is in recovery; it is not opened")
            _check_run(now.run, run)
            # This session is new, so the server has loaded what it shows.
            since = await self._since_nobody(session) if quorum and now.waits_for_nobody else 0
        if quorum is not None and now.commit in WEAK_COMMITS:
            raise ConnectionError(
                f"synchronous_commit is {now.commit}: clients would get an answer before a replica "
                "has their write. Set it to on, and load the settings"
            )
        overruled = now.names != standby_names(now.gate)
        if overruled:
            await self._rule_again(now.gate)
        state = now.gate if now.gate.run == run else GateState(run=run, nobody=True)
        if quorum is None:
            state = msgspec.structs.replace(state, quorum=None, nobody=False)
        elif state.quorum != quorum or state.nobody or overruled:
            state = await self._use(state, quorum, since)
        opened = msgspec.structs.replace(state, epoch=epoch)
        if opened != now.gate:
            # Loaded at once: who comes in waits for the quorum.
            self._server.write_rules(shut=False)
            opened = self._server.write_gate(opened)
            self._server.reload()
            await self._loaded(opened, nudge=quorum is not None)

    async def lock(self) -> None:
        """As `ServerGate.lock`."""
        server = self._server
        if server.postmaster() is None:
            # Its sessions may have outlived it.
            await server.end_all()
            return
        if not server.in_production():
            # In recovery it refuses writes by itself. Before it ever takes any it is shut.
            return
        if server.starts_fenced():
            # Stopped now, it would begin anew, and perhaps never get any further.
            return
        with suppress(OSError, TimeoutError):
            written = server.written_gate()
            if not written.epoch:
                # Promoted, or drained; perhaps only half way. Even reading may write to the log:
                # no replica shall get what the next primary does not have.
                server.stop_feeding()
                async with asyncio.timeout(SHUT_S):
                    await server.shut("guard", written)
                    return
        await server.stop_now()

    async def close(self) -> None:
        """Nothing is held between calls."""

    async def _loaded(self, state: GateState, *, nudge: bool) -> None:
        """Wait until the server has loaded this. `nudge`: have its replicas confirm something.

        A walsender releases commits only when its replica confirms something. One that confirmed
        all before the quorum changed would do so again after `wal_receiver_status_interval`, 10 s.
        """
        session = await self._server.loaded("guard", "domicile.gate_stamp", state.stamp)
        try:
            if nudge:
                async with server_answered("the server"):
                    await session.execute(NUDGE)
        finally:
            session.terminate()

    async def _rule_again(self, state: GateState) -> None:
        """Have the quorum be what was written (F12): what was acknowledged since counts as before.

        A server that does not let itself be ruled is stopped.
        """
        async with self._server.session("guard") as session:
            await self._server.take_back(session)
        try:
            async with asyncio.timeout(LOADED_S):
                while True:
                    async with self._server.session("guard") as session:
                        if (await self._tell(session)).names == standby_names(state):
                            return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            await self._server.stop_now()
            raise ConnectionError(
                "synchronous_standby_names is not what Domicile has written: the server is stopped"
            ) from None

    async def _use(self, state: GateState, quorum: WriteQuorum, since: int) -> GateState:
        """What is to be loaded, so that commits wait for another quorum (F12).

        First they wait for nobody. A walsender that still had the set of before might acknowledge
        by it; each of them shows, by not being synchronous any more, that it has taken nobody over.
        `since`: from where on that holds already; 0: it does not.
        """
        if not since:
            server = self._server
            if not state.nobody:
                state = server.write_gate(msgspec.structs.replace(state, nobody=True))
                server.reload()
            session = await server.loaded("guard", "domicile.gate_stamp", state.stamp)
            try:
                async with server_answered("the server"):
                    since = await self._since_nobody(session)
            finally:
                session.terminate()
        return msgspec.structs.replace(state, quorum=quorum, since=since, nobody=False)

    async def _since_nobody(self, session: Session) -> int:
        """Up to where the log goes once commits wait, and no walsender acknowledges any."""
        pauses = LengtheningPauses()
        try:
            async with asyncio.timeout(LOADED_S):
                await self._commits_wait(session)
        except TimeoutError:
            raise ConnectionError(
                "the server does not have commits wait for replicas yet; its checkpointer is busy, "
                "perhaps with a slow disk"
            ) from None
        async with asyncio.timeout(LOADED_S):
            while await session.fetchval(
                "SELECT count(*) FROM pg_stat_replication WHERE sync_state <> 'async'"
            ):
                await pauses.one()
        return lsn_of(await session.fetchval("SELECT pg_current_wal_insert_lsn()::text"))

    async def _commits_wait(self, session: Session) -> None:
        """Wait until the server has commits wait, of which one of our own is the proof.

        That the settings are loaded does not say so: the checkpointer tells all others, once it
        has done what it is doing. Until then a commit waits for nobody.
        """
        pauses = LengtheningPauses()
        async with self._server.session("guard") as other:
            await other.execute("SET synchronous_commit = on")
            pid = await other.fetchval("SELECT pg_backend_pid()")
            while True:
                # By this prefix it does not count as a client's write.
                ending = asyncio.create_task(
                    other.execute("SELECT pg_logical_emit_message(true, 'domicile', 'wait')")
                )
                try:
                    while not ending.done():
                        if await session.fetchval(WAITS, pid):
                            # It is our own, so nobody takes its end for an acknowledgement.
                            await session.execute("SELECT pg_cancel_backend($1)", pid)
                            await asyncio.wait([ending])
                            return
                        await asyncio.wait([ending], timeout=FIRST_POLL_S)
                finally:
                    if not ending.done():
                        # Given up, or the server stands still: nothing is asked of it any more.
                        other.terminate()
                        ending.cancel()
                ending.result()
                await pauses.one()

    async def _tell(self, session: Session) -> _Now:
        row = await session.fetchrow(
            f"SELECT pg_is_in_recovery() AS recovering, {RUN} AS run,"
            " current_setting('domicile.gate', true) AS gate,"
            " current_setting('synchronous_standby_names') AS names,"
            # A session of ours has another value.
            " (SELECT setting FROM pg_file_settings WHERE name = 'synchronous_commit'"
            "  ORDER BY seqno DESC LIMIT 1) AS commit"
        )
        assert row is not None
        return _Now(
            recovering=row["recovering"], run=row["run"],
            gate=read_state(row["gate"], GateState), names=row["names"],
            commit=row["commit"] or "",
        )  # fmt: skip


def _check_run(now: str, run: str) -> None:
    if now != run:
        raise ConnectionError(f"the server restarted: its run is {now}, not {run}")


class _Now(msgspec.Struct, frozen=True):
    recovering: bool
    run: str
    gate: GateState
    names: str
    """The `synchronous_standby_names` in force, also if `ALTER SYSTEM` has set it."""
    commit: str

    @property
    def waits_for_nobody(self) -> bool:
        """Whether no commit can end in this run, by what is written and by what is in force."""
        here = self.gate.run == self.run and self.gate.nobody
        return here and self.names == standby_names(self.gate)
