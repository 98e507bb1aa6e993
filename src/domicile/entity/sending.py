"""The sending half of one incarnation: carries out what `core.sender` decides.

Every ask and tell of this process goes through here, local ones included. It turns outcomes
into results and errors (I9), and counts what is lost (I6).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.letter import Arm, Effect, GiveUp, Letter, Limits, SendFlush, Write
from domicile.core.messages import (
    Caller,
    Flush,
    Flushed,
    Reply,
    Request,
    Return,
    Started,
    Status,
    ToOwner,
    weight_bytes,
)
from domicile.core.records import TypeRecord, mismatch
from domicile.core.sender import Sender
from domicile.core.shardmap import Entry
from domicile.entity.cell import Incoming, current_turn
from domicile.entity.codec import decode_error
from domicile.entity.ref import Call
from domicile.errors import (
    CallCycle,
    CallTooDeep,
    DomicileError,
    MaybeExecuted,
    NotExecuted,
    Overloaded,
    Unavailable,
)
from domicile.ports.clock import Timer

if TYPE_CHECKING:
    from domicile.entity.runtime import Runtime

SWEEP_S = 0.5
"""How often tells that wait past their time are given up."""


class Outgoing:
    """What the shell knows of a letter: the call, who waits for it, and until when."""

    __slots__ = ("call", "chain", "expires_at", "future", "timer")

    def __init__(
        self,
        call: Call,
        chain: tuple[Caller, ...],
        expires_at: float,
        future: asyncio.Future[bytes] | None,
    ) -> None:
        self.call = call
        self.chain = chain
        self.expires_at = expires_at
        self.future = future
        self.timer: Timer | None = None


class Sending:
    """All shards this incarnation sends to."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        settings = runtime.settings
        self._limits = Limits(
            settings.buffer, settings.hold_bytes, settings.window, settings.hold_timeout_s
        )
        self.senders: dict[ShardKey, Sender] = {}
        self._timers: dict[ShardKey, tuple[float, Timer]] = {}
        self._asks = 0
        self._sweep: Timer | None = None
        self._types_seen: dict[tuple[str, str, str], int] = {}
        """Shards of a role's type, once it was seen that the cluster means the same type."""

    # calls

    async def ask(self, call: Call) -> bytes:
        """Send and wait for the outcome."""
        await _store_first()
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        sender, letter = self._submit(call, future)
        self._asks += 1
        try:
            return await future
        finally:
            self._asks -= 1
            if letter.load.timer is not None:
                letter.load.timer.cancel()
            if not letter.resolved:
                self._abandon(sender, letter)

    async def tell(self, call: Call) -> None:
        """Queue and return."""
        await _store_first()
        self._submit(call, None)

    def _submit(self, call: Call, future: asyncio.Future[bytes] | None) -> tuple[Sender, Letter]:
        runtime = self._runtime
        chain = self._chain(call, future is not None)
        shard = self._shard(call)
        ids = [caller.id for caller in chain]
        size = weight_bytes(call.body, call.entity.id, call.method, call.key, *ids) + 128
        if size > runtime.settings.message_bytes:
            raise NotExecuted(
                f"the message to {call.entity.type} {call.entity.id[:64]!r} has {size:,} bytes "
                f"with its id; the limit is {runtime.settings.message_bytes:,} "
                "(Settings.message_bytes)"
            )
        sender = self._sender(shard)
        now = runtime.clock.now()
        timeout_s = runtime.settings.ask_timeout_s if call.timeout_s is None else call.timeout_s
        load = Outgoing(call, chain, now + timeout_s, future)
        letter = Letter(
            sender.number(),
            call.entity,
            future is not None,
            tuple(ShardKey(caller.role, caller.shard) for caller in chain),
            size,
            load,
            partial(self._behind, chain) if chain else None,
        )
        refusal = self._refusal(sender, call.entity, size)
        effects = sender.submit(letter, now) if refusal is None else ()
        if runtime.tracing:
            runtime.meter.event(
                "submit", inc=runtime.me, role=shard.role, shard=shard.shard, n=letter.n,
                type=call.entity.type, id=call.entity.id, method=call.method, ask=letter.ask,
                chain=[(caller.type, caller.id) for caller in chain], held=len(sender.queue),
                timeout=timeout_s,
            )  # fmt: skip
        if refusal is not None:
            letter.resolved = True
            self._outcome(shard, letter, "not_executed")
            raise refusal
        self._carry_out(sender, effects)
        if future is not None:
            load.timer = runtime.clock.call_at(
                load.expires_at, lambda: self._expired(sender, letter)
            )
        elif letter.to is None and self._sweep is None:
            self._sweep = runtime.clock.call_at(now + SWEEP_S, self._sweep_tells)
        return sender, letter

    def _refusal(self, sender: Sender, entity: EntityKey, size: int) -> NotExecuted | None:
        """Why a message can't even wait for its shard (I6), if so."""
        if sender.entry.state == "quarantined":
            return self._quarantined(sender)
        if sender.room(size):
            return None
        self._runtime.meter.count("message.overloaded")
        return Overloaded(
            f"{len(sender.queue)} messages already wait for shard "
            f"{sender.shard.role}/{sender.shard.shard}, the home of {entity.type} {entity.id!r}; "
            "slow down and retry"
        )

    def _quarantined(self, sender: Sender) -> Unavailable:
        shard = f"{sender.shard.role}/{sender.shard.shard}"
        strikes, within_s = sender.entry.strikes, self._runtime.settings.poison_window_s
        died = f"{strikes} owners died within {within_s:g} s of each other"
        return Unavailable(
            f"shard {shard} is quarantined: its last {died if strikes > 1 else 'owner died'}; see "
            f"what its entities do, then run `domicile unquarantine {shard}`"
        )

    def _behind(self, chain: tuple[Caller, ...]) -> Iterator[ShardKey]:
        """Who waits in line behind the handlers of a chain, as far as they run on this node.

        A handler in a draining shard may wait for a message that is queued behind another one,
        which asks back into that shard: what the first waits for, the second must finish, too.
        """
        for caller in chain:
            host = self._runtime.hosts.get(ShardKey(caller.role, caller.shard))
            box = None if host is None else host.owner.boxes.get(EntityKey(caller.type, caller.id))
            if box is not None:
                for mail in box.mail:
                    if isinstance(mail.load, Incoming):
                        for waiting in mail.load.request.chain:
                            yield ShardKey(waiting.role, waiting.shard)

    def _chain(self, call: Call, ask: bool) -> tuple[Caller, ...]:
        """N1, N2: who waits for this call."""
        turn = current_turn.get()
        runtime = self._runtime
        if not runtime.guard():
            raise Unavailable("this process lost its lease and is joining anew; retry soon")
        if turn is None or not turn.active or turn.host.runtime is not runtime:
            if runtime.leaving:
                raise Unavailable("this node is leaving the cluster; send from another one")
            return ()
        if not ask:
            return ()
        chain = turn.chain
        if len(chain) > runtime.settings.chain:
            raise CallTooDeep(
                f"{len(chain)} handlers already wait on each other before "
                f"{call.entity.type} {call.entity.id!r}; the limit is {runtime.settings.chain}"
            )
        for caller in chain:
            if (caller.type, caller.id) == call.entity and not (call.shared and caller.shared):
                path = " → ".join(f"{link.type} {link.id!r}" for link in chain)
                raise CallCycle(
                    f"{call.entity.type} {call.entity.id!r} already waits for this call "
                    f"({path} → itself); use tell, or mark both handlers shared"
                )
        return chain

    def _shard(self, call: Call) -> ShardKey:
        asked = (call.role, call.entity.type, call.shard_id)
        shards = self._types_seen.get(asked)
        if shards is None:
            shards = self._types_seen[asked] = self._shards_of(*asked)
        return ShardKey(call.role, call.place(call.entity, shards))

    def _shards_of(self, role: str, kind: str, shard_id: str) -> int:
        """How many shards a type has, if it is the same type here and in the cluster (RG-24)."""
        members = self._runtime.members
        config = members.config
        wanted = TypeRecord(role, shard_id)
        own = self._runtime.catalogue.get(kind)
        known = None if config is None else config.types.get(kind)
        if own is not None:
            known = own.record
        why = mismatch(kind, known or wanted, wanted)
        if why:
            raise NotExecuted(why)
        if own is not None:
            # Registered with this very process, whose watch may not have shown it yet; joining
            # agreed with the config on the number of shards.
            return self._runtime.shards.get(role, self._runtime.settings.shards)
        if not members.knows_type(role, kind):
            registered = ", ".join(members.types(role)) or "none"
            raise Unavailable(
                f"no node has registered entity type {kind!r} in role {role!r} (registered: "
                f"{registered}); start a node with entities=[...] listing it"
            )
        assert config is not None, "a node registers its roles in the config before itself"
        return config.shards[role]

    def _sender(self, shard: ShardKey) -> Sender:
        sender = self.senders.get(shard)
        if sender is None:
            members = self._runtime.members
            sender = self.senders[shard] = Sender(
                shard,
                self._limits,
                lambda other: members.map.get(other).state == "moving",
                members.nodes.__contains__,
            )
            sender.see(members.map.get(shard), self._runtime.clock.now())
        return sender

    # what the runtime reports

    def see(self, shard: ShardKey, entry: Entry) -> None:
        """A newer map entry."""
        sender = self.senders.get(shard)
        if sender is not None:
            self._carry_out(sender, sender.see(entry, self._now()))

    def look(self) -> None:
        """The map or the nodes changed: what is finishing or reachable may have changed (N3)."""
        now = self._now()
        for sender in list(self.senders.values()):
            if sender.queue:
                self._carry_out(sender, sender.look(now))

    def link_lost(self, peer: Incarnation, unsent: Iterable[ToOwner]) -> None:
        """H6, for every shard."""
        now = self._now()
        numbers: dict[ShardKey, list[int]] = {}
        for message in unsent:
            if isinstance(message, Request):
                numbers.setdefault(ShardKey(message.role, message.shard), []).append(message.n)
        for shard, sender in list(self.senders.items()):
            self._carry_out(sender, sender.link_lost(peer, numbers.get(shard, ()), now))

    def departing(self, peer: Incarnation) -> None:
        """H14: a peer said goodbye."""
        now = self._now()
        for sender in list(self.senders.values()):
            self._carry_out(sender, sender.departing(peer, now))

    def on_answer(self, peer: Incarnation, message: Reply | Started | Return | Flushed) -> None:
        """Something came back from an owner."""
        sender = self.senders.get(ShardKey(message.role, message.shard))
        if sender is None:
            return
        now = self._now()
        match message:
            case Reply(n=n, status=status, body=body):
                letter, effects = sender.answered(peer, n, now)
                if letter is not None:
                    self._resolve(sender.shard, letter, status, body)
            case Started(ns=ns):
                effects = sender.begun(peer, ns, now)
            case Return(ns=ns, entry=entry, released=released):
                effects = sender.returned(peer, ns, entry, released, now)
            case Flushed(id=id, entry=entry, released=released):
                effects = sender.flushed(peer, id, entry, released, now)
        self._carry_out(sender, effects)

    def waiting(self) -> bool:
        """H14: whether the own sender side is not empty yet."""
        return self._asks > 0 or any(sender.waiting() for sender in self.senders.values())

    def fail_all(self, why: str) -> None:
        """The incarnation ends: everything unresolved is told so (I6)."""
        for sender in self.senders.values():
            for letter in [*sender.queue, *sender.written.values()]:
                if letter.resolved:
                    continue
                if letter.to is None and letter.ask:
                    letter.resolved = True
                    self._fail(sender.shard, letter, Unavailable(why))
                elif letter.ask or not letter.started:
                    self._give_up(sender.shard, letter, why)
        self.senders.clear()
        for _, timer in self._timers.values():
            timer.cancel()
        if self._sweep is not None:
            self._sweep.cancel()

    # effects

    def _carry_out(self, sender: Sender, effects: Iterable[Effect]) -> None:
        runtime = self._runtime
        for effect in effects:
            match effect:
                case Write():
                    self._write(sender, effect)
                case SendFlush(to, id):
                    runtime.send(to, Flush(*sender.shard, id))
                case GiveUp(letter):
                    self._give_up(sender.shard, letter, "the link to its home was lost")
                case Arm(at):
                    self._arm(sender, at)
        for letter in sender.refused():
            self._fail(sender.shard, letter, self._quarantined(sender))

    def _write(self, sender: Sender, write: Write) -> None:
        runtime = self._runtime
        letter, load = write.letter, write.letter.load
        call: Call = load.call
        if runtime.tracing:
            runtime.meter.event(
                "write", inc=runtime.me, role=sender.shard.role, shard=sender.shard.shard,
                n=letter.n, to=write.to, epoch=write.epoch, finishing=write.finishing,
                open=write.open, beyond=letter.beyond,
            )  # fmt: skip
        runtime.send(
            write.to,
            Request(
                *sender.shard, letter.n, write.epoch, write.change, *call.entity, call.method,
                call.body, letter.ask, write.finishing, max(0.0, load.expires_at - self._now()),
                load.chain, call.key,
            ),
        )  # fmt: skip

    def _arm(self, sender: Sender, at: float) -> None:
        armed = self._timers.get(sender.shard)
        if armed is not None:
            if armed[0] <= at:
                return
            armed[1].cancel()

        def due() -> None:
            self._timers.pop(sender.shard, None)
            if self._runtime.guard():
                self._carry_out(sender, sender.tick(self._now()))

        self._timers[sender.shard] = (at, self._runtime.clock.call_at(at, due))

    # outcomes

    def _resolve(self, shard: ShardKey, letter: Letter, status: Status, body: bytes) -> None:
        if status is not Status.OK:
            self._fail(shard, letter, decode_error(status, body), status)
            return
        self._outcome(shard, letter, "ok")
        future = letter.load.future
        if future is not None and not future.done():
            future.set_result(body)

    def _fail(
        self, shard: ShardKey, letter: Letter, error: DomicileError, status: Status | None = None
    ) -> None:
        if status is Status.REJECTED:
            outcome = "rejected"
        elif isinstance(error, NotExecuted):
            outcome = "not_executed"
        elif isinstance(error, MaybeExecuted):
            outcome = "maybe_executed"
        else:
            outcome = "failed"
        future = letter.load.future
        if future is None and outcome in ("rejected", "failed"):
            return
        self._outcome(shard, letter, outcome)
        if future is None:
            self._runtime.meter.count("tell.refused")
        elif not future.done():
            future.set_exception(error)

    def _give_up(self, shard: ShardKey, letter: Letter, why: str) -> None:
        letter.resolved = True
        if letter.ask:
            entity = letter.load.call.entity
            self._fail(
                shard,
                letter,
                MaybeExecuted(
                    f"{entity.type} {entity.id!r} may have run {letter.load.call.method!r}: {why}"
                ),
            )
        else:
            self._lost(shard, letter)

    def _lost(self, shard: ShardKey, letter: Letter) -> None:
        self._runtime.meter.count("tell.lost")
        self._runtime.meter.event(
            "lost", inc=self._runtime.me, role=shard.role, shard=shard.shard, n=letter.n
        )

    def _outcome(
        self, shard: ShardKey, letter: Letter, outcome: str, cancelled: bool = False
    ) -> None:
        if self._runtime.tracing:
            self._runtime.meter.event(
                "outcome", inc=self._runtime.me, role=shard.role, shard=shard.shard, n=letter.n,
                outcome=outcome, cancelled=cancelled,
            )  # fmt: skip

    def _expired(self, sender: Sender, letter: Letter) -> None:
        """The caller's time is up."""
        if letter.resolved:
            return
        unwritten, effects = sender.withdraw(letter, self._now())
        call: Call = letter.load.call
        shard = f"{sender.shard.role}/{sender.shard.shard}"
        where = f"{call.entity.type} {call.entity.id!r} (shard {shard})"
        error: DomicileError
        if unwritten:
            error = Unavailable(f"no home of {where} could be reached in time; retry is safe")
        else:
            error = MaybeExecuted(f"{where} did not answer in time; {call.method!r} may have run")
        self._fail(sender.shard, letter, error)
        self._carry_out(sender, effects)

    def _abandon(self, sender: Sender, letter: Letter) -> None:
        """The caller was cancelled: nobody waits for the outcome any more."""
        unwritten, effects = sender.withdraw(letter, self._now())
        outcome = "not_executed" if unwritten else "maybe_executed"
        self._outcome(sender.shard, letter, outcome, cancelled=True)
        self._carry_out(sender, effects)

    def _sweep_tells(self) -> None:
        """Tells that wait longer than their time are lost, and counted as such (I6)."""
        self._sweep = None
        now = self._now()
        held = False
        for sender in list(self.senders.values()):
            for letter in [mail for mail in sender.queue if not mail.ask]:
                held = True
                if now >= letter.load.expires_at:
                    _, effects = sender.withdraw(letter, now)
                    self._lost(sender.shard, letter)
                    self._carry_out(sender, effects)
        if held:
            self._sweep = self._runtime.clock.call_at(now + SWEEP_S, self._sweep_tells)

    def _now(self) -> float:
        return self._runtime.clock.now()


async def _store_first() -> None:
    """What a keyed handler has persisted so far commits before anyone else hears of it (I4)."""
    turn = current_turn.get()
    if turn is not None and turn.active and turn.store_first is not None:
        await turn.store_first()
