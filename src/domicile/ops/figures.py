"""How busy the nodes of a cluster are: each is asked over a connection of its own, all at once.

Used by `domicile status` and `domicile inspect`. A node that hangs or can't be reached from here
gives no answer, and the tool says so: it must never wait for one longer than `ANSWER_S`. Nothing
is written, and no link is opened, so no node keeps anything of the question.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import SystemRandom

import msgspec

from domicile.core.ids import Incarnation
from domicile.core.wire import Figures, Look, Refused, decode_packet, encode_packet
from domicile.errors import ConfigError
from domicile.links.token import check_figures, prove_look
from domicile.ops.status import NodeSeen
from domicile.ports.transport import Connection, Peer, Transport

ANSWER_S = 1.0
"""Seconds within which all nodes must answer: each answer costs a node less than a millisecond."""

RATE_S = 0.5
"""Seconds between the two looks from which a rate is computed."""

MOST_AT_ONCE = 64
"""I6: connections that are open at the same time."""

_NONCES = 1 << 53

Answer = Figures | str
"""What a node said, or why there is nothing: `no answer`, or the reason of its refusal."""


class FiguresReader:
    """Asks nodes for their figures, as often as needed. `transport` makes what dials them."""

    def __init__(self, transport: Callable[[], Transport], cluster: str, token: str) -> None:
        self._make, self._cluster, self._token = transport, cluster, token
        self._random = SystemRandom()
        self._before: dict[Incarnation, Figures] = {}

    async def add_to(self, nodes: Sequence[NodeSeen]) -> list[NodeSeen]:
        """The same nodes with what they say of themselves now.

        A rate needs two looks. The second follows `RATE_S` later, unless all nodes were seen in an
        earlier call.
        """
        peers = [Peer(Incarnation(one.incarnation), one.address) for one in _asked(nodes)]
        try:
            answers = await self._look_at(peers)
            if any(isinstance(answer, Figures) for answer in answers.values()) and (
                answers.keys() - self._before.keys()
            ):
                self._before |= _said(answers)
                await asyncio.sleep(RATE_S)
                answers |= await self._look_at(
                    [one for one in peers if isinstance(answers[one.incarnation], Figures)]
                )
        except ConfigError as error:
            answers = dict.fromkeys((one.incarnation for one in peers), str(error))
        before, self._before = self._before, _said(answers)
        return [
            _seen(one, answers.get(inc), before.get(inc))
            for one in nodes
            for inc in (Incarnation(one.incarnation),)
        ]

    async def _look_at(self, peers: Sequence[Peer]) -> dict[Incarnation, Answer]:
        transport, until = self._make(), asyncio.get_running_loop().time() + ANSWER_S
        room = asyncio.Semaphore(MOST_AT_ONCE)

        async def one(peer: Peer) -> Answer:
            asking = _Asking(
                Look(self._cluster, peer.incarnation, self._random.randrange(_NONCES)), self._token
            )
            try:
                async with asyncio.timeout_at(until), room:
                    transport.dial(peer.address, asking)
                    return await asking.answer
            except TimeoutError:
                return "no answer"
            finally:
                asking.leave()

        try:
            answers = await asyncio.gather(*map(one, peers))
        finally:
            await transport.close()
        return {peer.incarnation: answer for peer, answer in zip(peers, answers, strict=True)}


class _Asking:
    """One connection: a look goes out, one answer comes back. Implements `ConnectionHandler`."""

    def __init__(self, look: Look, token: str) -> None:
        self._look, self._token = look, token
        self._connection: Connection | None = None
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def opened(self, connection: Connection) -> None:
        self._connection = connection
        proof = prove_look(self._token, self._look)
        connection.send(encode_packet(msgspec.structs.replace(self._look, proof=proof)))

    def received(self, data: bytes) -> None:
        try:
            packet = decode_packet(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self._end("its answer can't be read")
            return
        if isinstance(packet, Refused):
            self._end(f"refused: {packet.reason}")
        elif not isinstance(packet, Figures):
            self._end("its answer can't be read")
        elif not check_figures(self._token, self._look, packet):
            self._end("it does not prove that it knows the token")
        else:
            self._end(packet)

    def receiving(self) -> None:
        pass

    def closed(self, reason: str) -> None:
        self._connection = None
        self._end("no answer")

    def guard(self) -> bool:
        return True

    def leave(self) -> None:
        """Close the connection; nothing is expected any more."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _end(self, answer: Answer) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


def _asked(nodes: Sequence[NodeSeen]) -> list[NodeSeen]:
    """Those that can answer: a dead one's port may belong to another process by now."""
    return [one for one in nodes if one.status != "dead" and one.address]


def _said(answers: Mapping[Incarnation, Answer]) -> dict[Incarnation, Figures]:
    return {inc: answer for inc, answer in answers.items() if isinstance(answer, Figures)}


def _seen(node: NodeSeen, answer: Answer | None, before: Figures | None) -> NodeSeen:
    if not isinstance(answer, Figures):
        return replace(node, unanswered=answer or "")
    rate = None
    if before is not None and answer.at_s > before.at_s:
        rate = round((answer.turns - before.turns) / (answer.at_s - before.at_s), 1)
    lag_s, left_s = answer.loop_lag_s, answer.lease_left_s
    return replace(
        node,
        residents=answer.residents,
        queued=answer.queued,
        open_asks=answer.open_asks,
        turns_per_s=rate,
        loop_lag_s=None if lag_s is None else round(lag_s, 6),
        lease_left_s=None if left_s is None else round(left_s, 3),
    )
