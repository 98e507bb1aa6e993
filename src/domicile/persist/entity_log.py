"""What one resident durable entity has stored, sent and staged: its output gate (J5).

Theory of operation. A turn stages what it stores, and the entity's next turn sees that at once.
When the turn ends, everything that it staged goes to the writer as one write, with the key of its
ask and the reply. Only the outputs of the entity wait for that write:

- a reply, a rejection or a failure waits for the newest write that is not over, whichever turn sent
  it: the handler may have seen what that write stores (`hold`);
- an ask or a tell first sends what its turn staged so far, then waits for the newest write
  (`flush`). They leave in the order of their calls (I5). A hook runs beside the turns. It reads no
  state that one of them has staged, which may yet be dropped. What it sends first waits until what
  is staged is sent or dropped: it must not commit half of another turn;
- the stored reply of a repeated key waits the same way, if the key itself is not committed.

If a write commits, what waits for it leaves. If it does not, or nobody knows, every output that
waits becomes `MaybeExecuted`. Then the entity object is forgotten and starts again from the
journal; what it has staged, and what it still does, is dropped. A turn that fails drops what it
staged and has not sent.

`DurableEntity` and its kinds use this for what users write, `entity.hosting` through the port
`OutputGate`. Nothing here may call a journal: everything goes through `JournalWriter`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from datetime import datetime
from typing import Any

from domicile.concurrency.single_flight import SingleFlight
from domicile.concurrency.waiting_line import WaitingLine
from domicile.entity.hosting.activation import name_of
from domicile.entity.hosting.cell import Cell, Turn, current_turn
from domicile.entity.hosting.execution import OutcomeUnknown
from domicile.errors import ConfigError, DomicileError, Fenced, HandlerFailed
from domicile.persist.forgettable import Erasure, Vault, vault_key
from domicile.persist.writer import JournalWriter, SentWrite, ShardClaim, over
from domicile.ports.journal import (
    BLIND,
    FencedTransaction,
    FencesConnections,
    JournalUnknown,
    JournalWrite,
    Recovered,
    StoredReply,
    Wanted,
    WriteRefused,
    Written,
    counted,
)
from domicile.ports.work import HeldOutput

UNREAD: Any = object()
"""The state of an entity that was not recovered yet."""

OPEN_TURNS = 256
"""I6: turns of one entity that may wait for the journal. Beyond that, its messages wait."""

KNOWN_KEYS = 4_096
"""I6: keys of asks that one resident entity remembers. With more of them the journal is asked."""

EARLY_KEYS = 1_024
"""I6: keys that one resident entity looks up before their messages begin."""

Hook = Callable[[], Coroutine[Any, Any, Any]]


class EntityLog(ABC):
    """The part that all kinds of durable entities share. Implements `OutputGate`."""

    keeps_whole = False
    """Whether what it stores replaces what it stored before."""

    __slots__ = (
        "_beside", "_block", "_cell", "_claim", "_deletes", "_early", "_erases", "_erasures",
        "_failed", "_forgets", "_fresh", "_hooks", "_hooks_line", "_is_remembered", "_key",
        "_key_sent", "_keys", "_line", "_newest", "_open", "_reading", "_room", "_sends", "_sure",
        "_writer", "number", "seq", "state", "vault",
    )  # fmt: skip

    def __init__(self, cell: Cell) -> None:
        writer = cell.host.runtime.durability
        assert isinstance(writer, JournalWriter), "a node with durable entities has a journal"
        self._cell = cell
        self._writer = writer
        self.number = writer.next_gate()
        """As `OutputGate.number`."""
        self._claim: ShardClaim | None = None
        self.state: Any = UNREAD
        """What handlers see: everything that is committed, sent or staged."""
        self._sure: Any = UNREAD
        """The state without what is staged: a turn that fails goes back to it."""
        self.seq = BLIND
        """How many events the entity has, with those that are sent; `BLIND` if not known."""
        self.vault: Vault | None = None
        """Its forgettable values, if its type has such fields."""
        self._deletes = False
        """Whether the turn that runs deletes what the entity has stored."""
        self._erases = False
        """Whether the next write erases what may repeat the entity's forgettable values."""
        self._erasures = 0
        """How many such writes are on their way."""
        self._forgets = False
        """Whether it has the entity forgotten: it is not started again by itself."""
        self._is_remembered = False
        """Whether this object has sent the flag that has it started again by itself."""
        self._key = ""
        """The key of the turn that runs."""
        self._key_sent = False
        self._keys: set[str] | None = None
        """All keys that were used; None if they are not all known."""
        self._early: dict[str, asyncio.Future[StoredReply | None]] = {}
        """Keys of messages that wait, and what the journal says of them. None of them has been sent
        since it was asked: sending a key drops it here."""
        self._fresh: dict[str, bytes | None] = {}
        """Keys whose writes are not over, with the replies that are known."""
        self._hooks: list[Hook] | None = None
        self._newest: SentWrite | None = None
        """The newest write that is not over."""
        self._open = 0
        """How many writes are not over."""
        self._failed: DomicileError | None = None
        """Why this entity object must not be used any more."""
        self._reading = SingleFlight()
        self._room: list[asyncio.Future[None]] = []
        """Turns that may not begin before fewer writes are open."""
        self._beside: list[asyncio.Future[None]] = []
        """What hooks read and send: it waits until what the turn beside them has staged is sent or
        dropped."""
        self._line = WaitingLine()
        """I5: outputs that wait for the newest write as of their call."""
        self._hooks_line = WaitingLine()
        """I5: outputs of hooks that wait for the turn beside them."""
        self._block: Turn | None = None
        """The turn that runs a fenced block now (J10)."""
        self._sends = 0
        """How many writes this object has sent: a recovery meanwhile may not have seen them."""

    # what a kind of durable entity adds

    @property
    @abstractmethod
    def _has_content(self) -> bool:
        """Whether the turn that runs has events or a state that are not sent."""

    @abstractmethod
    def _take_content(self) -> tuple[tuple[bytes, ...], bytes | None, tuple[int, bytes] | None]:
        """The events, state and snapshot of the next write. Then nothing of it is staged."""

    @abstractmethod
    def _forget_content(self) -> None:
        """What is staged never was."""

    @abstractmethod
    def _initial(self) -> Any:
        """The state of an entity that has stored nothing."""

    @abstractmethod
    def _fold(self, state: Any, found: Recovered) -> Any:
        """The state after one more page of a recovery; `UNREAD` if its snapshot can't be used."""

    @abstractmethod
    def _with_staged(self, state: Any) -> Any:
        """A recovered state, with what is staged on top."""

    @property
    def is_staged(self) -> bool:
        """Whether the turn that runs has something that is not sent."""
        return self._has_content or self._deletes or self._forgets

    @property
    def is_open(self) -> bool:
        """As `OutputGate.is_open`."""
        return self._newest is not None or self.is_staged

    @property
    def newest(self) -> int:
        """As `OutputGate.newest`."""
        return 0 if self.seq == BLIND else self.seq

    # a turn, from its begin to its end: the port

    def may_begin(self, key: str) -> bool:
        """As `OutputGate.may_begin`."""
        if self._open >= OPEN_TURNS or self._failed is not None or self._writer.is_full:
            return False
        if not key:
            return True
        if self._keys is not None:
            return key not in self._keys
        early = self._early.get(key)
        return early is not None and _is_new(early)

    def foresee(self, key: str) -> None:
        """As `OutputGate.foresee`."""
        if (
            self._keys is not None
            or self._claim is None
            or self._failed is not None
            or key in self._fresh
            or key in self._early
            or self._erasures
        ):
            # Behind an erasure the journal may lack keys that are on their way.
            return
        if len(self._early) >= EARLY_KEYS:
            # The oldest: its message may have gone elsewhere. If not, it asks for itself.
            del self._early[next(iter(self._early))]
        early = self._writer.look_up_early(self._cell.key, key)
        if early is not None:
            self._early[key] = early

    async def prepare(self, key: str) -> bytes | None:
        """As `OutputGate.prepare`."""
        while self._open >= OPEN_TURNS and self._failed is None:
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._room.append(place)
            await place
        if self._writer.is_full:
            await self._writer.room()
        self._check()
        return await self._recall(key) if key else None

    def begin(self, key: str) -> None:
        """As `OutputGate.begin`."""
        self._key, self._key_sent = key, False
        if self._early and key:
            self._early.pop(key, None)

    def end(self, reply: bytes) -> bool:
        """As `OutputGate.end`."""
        if self._failed is not None:
            return self.abort()
        if self._key or self.is_staged:
            self._send(reply)
            self._key = ""
        if self._hooks is not None:
            self._attach_hooks()
        return self._newest is not None or self._failed is not None

    def abort(self) -> bool:
        """As `OutputGate.abort`."""
        self._key, self._hooks = "", None
        if self.is_staged:
            self._go_back()
        return self._newest is not None or self._failed is not None

    def read(self) -> bool:
        """As `OutputGate.read`."""
        if self.is_staged and self._failed is None:
            # An exclusive handler of this entity waits for this shared one, and has staged more
            # since: the reader may have seen it.
            self._send(None)
        return self._newest is not None or self._failed is not None

    def hold(self, output: HeldOutput) -> None:
        """As `OutputGate.hold`."""
        if self._failed is not None or self._newest is None:
            output(self._failed)
        else:
            self._newest.held.append(output)

    async def flush(self, *, sends: bool, beside: bool = False) -> None:
        """As `OutputGate.flush`."""
        if self._is_in_block():
            raise RuntimeError(
                "ask, tell and committed() can't be used inside `async with self.fenced(...)`: "
                "they wait for writes of this shard, and those wait for the end of the block. Call "
                "them before it or after it"
            )
        if sends and self.is_staged and self._failed is None:
            self._send(None)
        if beside and (self.is_staged or self._hooks_line):
            await self._hooks_line.wait(self._beside_over())
        self._check()
        if self._newest is not None or self._line:
            error = await self._line.wait(self._newest_over())
            if error is not None:
                raise _again(error)

    # for the kinds of durable entities

    async def claim(self) -> ShardClaim:
        """Until the shard may be written: before the first thing is staged (J1, H13)."""
        if self._claim is None:
            cell = self._cell
            # An earlier object of this entity may have writes on their way.
            await self._writer.settled(cell.key)
            self._claim = await self._writer.claimed(cell.host, cell.epoch)
        return self._claim

    async def shown(self) -> Any:
        """The state for the turn that runs, read from the journal on first use.

        A hook never sees what the turn beside it has staged: if that is dropped, it never was.
        """
        turn = current_turn.get()
        beside, waited = turn is not None and turn.is_beside, False
        while True:
            await self.recover()
            if not (beside and self.is_staged):
                return self.state
            if waited and self._sure is not self.state:
                # A later turn has staged more since: a busy entity does not keep its hooks waiting.
                return self._sure
            await self._turn_beside()
            self._check()
            waited = True

    async def _newest_over(self) -> DomicileError | None:
        return None if self._newest is None else await over(self._newest)

    async def _beside_over(self) -> None:
        if self.is_staged and self._failed is None:
            await self._turn_beside()

    async def _turn_beside(self) -> None:
        """Wait until what the turn beside a hook has staged is sent or dropped."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._beside.append(place)
        await place

    async def recover(self) -> None:
        """Read the state. The first caller does it, the others wait for it."""
        while self.state is UNREAD:
            landing = self._reading.join()
            if landing is not None:
                await landing
                continue
            try:
                if self._newest is not None and self._is_in_block():
                    raise RuntimeError(
                        "the state can't be read here: this entity's own writes wait for the end "
                        "of the fenced block. Read it before the block"
                    )
                await self._read()
            finally:
                self._reading.land()

    @asynccontextmanager
    async def fenced(self, turn: Turn, connection: object) -> AsyncGenerator[None, None]:
        """A block whose statements on a connection commit under the fence of this shard (J10)."""
        if self._is_in_block():
            raise RuntimeError("a fenced block is open already: one at a time, not one in another")
        journal = self._writer.journal
        if not isinstance(journal, FencesConnections):
            raise ConfigError(
                "fenced() needs a journal in a PostgreSQL database, and this node has another one: "
                "give it journal='postgresql://...', or fence by the token (shard, self.epoch)"
            )
        claim = await self.claim()
        transaction = journal.fenced(connection, claim.line.claim)
        # Its tables are an output: what they depend on is committed before (J5c).
        await turn.before_output()
        async with claim.held():
            self._block = turn
            try:
                newest = await transaction.begin()
                if newest is not None:
                    await transaction.rollback()
                    # J2: the shard is dropped, as after a fenced write.
                    self._writer.refused(claim.line, newest)
                    raise claim.outrun(newest)
                yield
                await transaction.check()
                self._may_commit(turn)
                await self._committing(transaction)
            except BaseException:
                await transaction.rollback()
                raise
            finally:
                self._block = None

    def _is_in_block(self) -> bool:
        """Whether the caller belongs to the turn that runs a fenced block."""
        return self._block is not None and self._block is current_turn.get()

    def _may_commit(self, turn: Turn) -> None:
        """L3: directly before the commit, and for a turn that may still do something."""
        self._check()
        if not turn.active:
            raise RuntimeError(
                "the handler has ended before its fenced block: nothing was committed. Await the "
                "task that runs the block"
            )
        if not self._cell.host.runtime.guard():
            raise Fenced(
                f"the lease of this node ran out before the fenced block of "
                f"{name_of(self._cell.key)} was committed: nothing of it was"
            )

    async def _committing(self, transaction: FencedTransaction) -> None:
        try:
            await transaction.commit()
        except JournalUnknown as error:
            raise OutcomeUnknown(str(error)) from error

    def forget(self) -> None:
        """Stage that the entity is not started again by itself."""
        self._forgets = True

    def delete(self) -> None:
        """Stage that everything which the entity has stored goes."""
        self._forget_content()
        if self.vault is not None:
            self.vault.drop()
        self._deletes = True
        if self.state is not UNREAD:
            self.state = self._initial()

    async def erase(self, at: datetime) -> Erasure:
        """Erase its forgettable values, and what may repeat them."""
        # First what came before: no later write may bring it back.
        await self.claim()
        await self.flush(sends=True)
        await self.recover()
        vault, key = self.vault, self._cell.key
        receipt = Erasure(*key, 0 if vault is None else len(vault), at)
        if vault is not None:
            # What handlers still hold of it is erased, too.
            vault.is_erased = True
            self.vault = self._new_vault()
        self._erases = True
        self.state = UNREAD
        self._send(None)
        # From now on it is what the journal says. A reading waits for the commit.
        self.seq = BLIND
        return receipt

    def before_content(self) -> None:
        """Something is about to be staged: what comes after a deletion is a write of its own."""
        if self._deletes and self._failed is None:
            self._send(None)

    def after_commit(self, hook: Hook) -> None:
        """Have a hook run once everything that this turn has stored is committed."""
        if self._hooks is None:
            self._hooks = []
        self._hooks.append(hook)

    # what becomes of a write

    def done(self, sent: SentWrite) -> None:
        """A write is over: let go what waits for it, or tell it why not."""
        self._open -= 1
        if sent is self._newest:
            self._newest = None
        for key, reply in (*sent.write.inbox, *sent.write.replies):
            # Unless the reply of the key is on its way in a later write.
            if self._fresh.get(key) is reply:
                self._fresh.pop(key, None)
        if sent.write.erase:
            # What was looked up before may be a reply that is erased.
            self._erasures -= 1
            self._early.clear()
        if not isinstance(sent.outcome, Written):
            self._fail(sent)
        held, sent.held = sent.held, []
        error = None if isinstance(sent.outcome, Written) else self._failed
        for output in held:
            output(error)
        if self._room and self._open < OPEN_TURNS:
            # All of them: readers among them take no room, so nobody would wake the others.
            _let_go(self._room)

    def _fail(self, sent: SentWrite) -> None:
        """J5(d): what this object knows is not, or not surely, what the journal holds."""
        if self._failed is not None:
            return
        cell, outcome = self._cell, sent.outcome
        where = name_of(cell.key)
        if isinstance(outcome, WriteRefused) and outcome.why == "fenced":
            self._failed = Fenced(
                f"{where} has a newer home (epoch {outcome.epoch} > {cell.epoch}); nothing was "
                "committed here"
            )
        else:
            why = "" if isinstance(outcome, WriteRefused) else "; the log of its node says why"
            self._failed = OutcomeUnknown(
                f"the journal does not say whether events of {where} were stored{why}"
            )
        self._hooks = None
        self._forget_staged()
        self._note("unstaged", -self.seq)
        if cell.resident:
            cell.host.restart(cell)
        _let_go(self._room)

    # small steps

    def _send(self, reply: bytes | None) -> None:
        """Send what is staged, with the key of the turn that runs."""
        if self._deletes and self.vault is not None and not self._erases:
            # A deletion erases. Its own reply is of now: it comes in a write behind the erasure.
            self._erases = True
            if self._key and reply is not None:
                self._send(None)
        assert self._claim is not None, "a shard is claimed before anything is staged"
        key = self._key
        if self._erases:
            # Replies on their way are erased with the others: only the journal is asked from now.
            self._fresh.clear()
            self._erasures += 1
        inbox: tuple[tuple[str, bytes | None], ...] = ()
        replies: tuple[tuple[str, bytes], ...] = ()
        if key:
            if not self._key_sent:
                inbox = ((key, reply),)
                self._key_sent = True
                self._remember(key)
            elif reply is not None:
                replies = ((key, reply),)
            self._fresh[key] = reply
            if self._early:
                self._early.pop(key, None)
        deletes = self._deletes or self._erases
        sent = SentWrite(self._taken(inbox, replies), self, self._cell.host)
        self._sure = self.state
        if self.vault is not None:
            self._send_vault(self._claim, self.vault, deletes=deletes)
        self._newest = sent
        self._open += 1
        self._sends += 1
        self._writer.send(self._claim, sent)
        _let_go(self._beside)

    def _send_vault(self, claim: ShardClaim, vault: Vault, *, deletes: bool) -> None:
        """Send values ahead of the write that refers to them: nothing refers to what is not there.

        They are of the same shard, so usually of the same transaction. A crash between the two
        leaves values that nothing refers to; the next erasure takes them, too.
        """
        shard, entity = self._cell.host.shard, vault_key(self._cell.key)
        if deletes:
            # What is fresh belongs to what the turn stores after it.
            vault.refill(())
            write = JournalWrite(shard, entity, BLIND, delete=True)
        elif (taken := vault.take()) is None:
            return
        elif self.keeps_whole:
            write = JournalWrite(shard, entity, BLIND, state=taken)
        else:
            write = JournalWrite(shard, entity, BLIND, (taken,))
        self._open += 1
        self._writer.send(claim, SentWrite(write, self, self._cell.host))

    def _new_vault(self) -> Vault:
        return Vault(self._cell.random, is_whole=self.keeps_whole)

    def _at_hand(self) -> AbstractContextManager[None]:
        return nullcontext() if self.vault is None else self.vault.open()

    def _taken(
        self, inbox: tuple[tuple[str, bytes | None], ...], replies: tuple[tuple[str, bytes], ...]
    ) -> JournalWrite:
        """What is staged, as a write. Then nothing is staged, and `seq` counts it."""
        cell, expected = self._cell, self.seq
        events, state, snapshot = self._take_content()
        remember: bool | None = None
        if self._deletes or self._forgets:
            remember, self._is_remembered = False, False
        elif cell.kind.remember and not self._is_remembered and (events or state is not None):
            remember = self._is_remembered = True
        write = JournalWrite(
            cell.host.shard, cell.key, expected, events, inbox, replies, state, snapshot, remember,
            self._deletes, erase=self._erases,
        )  # fmt: skip
        self._deletes = self._forgets = self._erases = False
        if expected != BLIND:
            self.seq = expected + counted(write)
        return write

    def _forget_staged(self) -> None:
        self._deletes = self._forgets = False
        self._forget_content()
        if self.vault is not None:
            self.vault.drop()
        _let_go(self._beside)

    def _go_back(self) -> None:
        """Drop what is staged, and the state that shows it."""
        self._forget_staged()
        self._note("unstaged", 0)
        if self.state is self._sure and self.state is not UNREAD:
            # It may have been changed in place: only the journal knows what it was.
            self.state, self._sure, self.seq = UNREAD, UNREAD, BLIND
        else:
            self.state = self._sure

    def _note(self, kind: str, more: int) -> None:
        """For histories: how many events the entity shows, beside those that are sent."""
        cell = self._cell
        runtime = cell.host.runtime
        if runtime.tracing:
            runtime.meter.event(
                kind, inc=runtime.me, role=cell.host.shard.role, shard=cell.host.shard.shard,
                epoch=cell.epoch, type=cell.key.type, id=cell.key.id,
                upto=None if self.seq == BLIND else self.seq + more,
            )  # fmt: skip

    def _attach_hooks(self) -> None:
        hooks, self._hooks = self._hooks, None
        for hook in hooks or ():
            self.hold(self._runner(hook))

    def _runner(self, hook: Hook) -> HeldOutput:
        cell = self._cell

        def run(error: DomicileError | None) -> None:
            if error is None:
                cell.host.run_hook(cell, hook)

        return run

    def _remember(self, key: str) -> None:
        if self._keys is not None:
            if len(self._keys) >= KNOWN_KEYS:
                self._keys = None
            else:
                self._keys.add(key)

    def _check(self) -> None:
        if self._failed is not None:
            raise _again(self._failed)

    async def _recall(self, key: str) -> bytes | None:
        """The reply of a key that was used before: in what is sent, then in the journal (J5b)."""
        cell = self._cell
        if key in self._fresh:
            reply = self._fresh[key]
            if reply is not None:
                return reply
            # Its handler failed after it had sent something.
            await self._writer.settled(cell.key)
        elif self._keys is not None and key not in self._keys:
            return None
        await self.claim()
        if self._erasures:
            # What the journal still holds must not be repeated.
            await self._writer.settled(cell.key)
        stored = await self._looked_up(key)
        self._check()
        if stored is None:
            return None
        if stored.reply is None:
            raise HandlerFailed(
                f"the effects of key {key!r} on {name_of(cell.key)} are stored, but its handler "
                "was interrupted before it replied, or its reply was erased; read the state instead"
            )
        return stored.reply

    async def _looked_up(self, key: str) -> StoredReply | None:
        early = self._early.pop(key, None)
        if early is not None:
            # Not its error: a look-up that failed is repeated for the message that needs it.
            await asyncio.wait((early,))
            if not early.cancelled() and early.exception() is None:
                return early.result()
        return await self._writer.inbox(self._cell.key, key)

    async def _read(self) -> None:
        cell = self._cell
        # An earlier object of this entity may have writes on their way, and so may this one (J9).
        await self._writer.settled(cell.key)
        self._claim = await self._writer.claimed(cell.host, cell.epoch)
        self._check()
        if self.vault is not None:
            self.vault.refill(await self._stored_values())
        state, seq, more, snapshot, sends = self._initial(), 0, True, True, self._sends
        keys: tuple[str, ...] | None = None
        while more:
            found = await self._writer.recover(Wanted(cell.key, seq, snapshot))
            self._check()
            state = self._fold(state, found)
            if state is UNREAD:
                # The snapshot is of another version of the state: fold all events instead.
                state, seq, snapshot = self._initial(), 0, False
                continue
            keys = found.keys if seq == 0 else keys
            seq, more = found.seq, found.more
        if sends != self._sends:
            # A turn beside this recovery has ended, and what it appended may be missing here: the
            # caller finds the state unread, and reads again.
            return
        self._keys = None if keys is None else set(keys)
        shown = self._initial() if self._deletes else self._with_staged(state)
        self._sure, self.seq, self.state = state, seq, shown

    async def _stored_values(self) -> list[bytes]:
        """The entity's forgettable values: read before the events that refer to them."""
        key, stored, seq, more = vault_key(self._cell.key), list[bytes](), 0, True
        await self._writer.settled(key)
        while more:
            found = await self._writer.recover(Wanted(key, seq))
            self._check()
            stored += found.events if found.state is None else (found.state,)
            seq, more = found.seq, found.more
        return stored


def _is_new(early: asyncio.Future[StoredReply | None]) -> bool:
    """Whether an early look-up has found that a key was never used."""
    if not early.done() or early.cancelled() or early.exception() is not None:
        return False
    return early.result() is None


def _let_go(places: list[asyncio.Future[None]]) -> None:
    """Wake everybody who waits, to look again."""
    for place in places:
        if not place.done():
            place.set_result(None)
    places.clear()


def _again(error: DomicileError) -> DomicileError:
    """The same error, to be raised by one more caller."""
    return type(error)(*error.args)
