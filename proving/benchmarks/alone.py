"""The functions that a message passes, each timed by itself: a lower bound for its stage.

Used by `proving.benchmarks.profile`. These are Domicile's own functions, not its public interface:
one that has moved is reported as such.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from proving.benchmarks import home
from proving.benchmarks.caller import PAYLOAD
from proving.benchmarks.report import grid

BATCH = 100
"""Messages per frame."""


def timed(function: Callable[[], Any], per: int = 1) -> float:
    """Seconds per message: the best of some turns, so that others disturb it least."""
    count, best = 1, float("inf")
    while True:
        began = time.perf_counter()
        for _ in range(count):
            function()
        took_s = time.perf_counter() - began
        if took_s > 0.02:
            break
        count *= 4
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(count):
            function()
        best = min(best, (time.perf_counter() - began) / count)
    return best / per


def alone() -> list[tuple[str, str, float | None]]:
    """Stage, function and seconds per message of Domicile's own functions; None if it is gone."""
    rows: list[tuple[str, str, float | None]] = []
    with ExitStack() as stack:
        for stage, name, make, per in _functions(stack):
            try:
                rows.append((stage, name, timed(make(), per)))
            except (ImportError, AttributeError, TypeError, ValueError):
                rows.append((stage, name, None))
    return rows


def _functions(stack: ExitStack) -> list[tuple[str, str, Callable[[], Callable[[], Any]], int]]:
    return [
        ("encode", "arguments to bytes", _encode_args, 1),
        ("route", "shard of an id", _shard_of, 1),
        ("frame", f"{BATCH} requests into a frame", _frame_requests, BATCH),
        ("syscall", f"a frame of {BATCH} through loopback", lambda: _through(stack, BATCH), BATCH),
        ("syscall", "a frame of 1 through loopback", lambda: _through(stack, 1), 1),
        ("wake", "a frame of 1 to a sleeping process and back", lambda: _and_back(stack), 1),
        ("decode", f"a frame of {BATCH} requests", _unframe_requests, BATCH),
        ("decode", "bytes to arguments", _decode_args, 1),
        ("handler", "a handler that does not suspend", _handler, 1),
        ("reply", "reply to bytes", _encode_reply, 1),
        ("reply", f"{BATCH} replies into a frame and back", _frame_replies, BATCH),
        ("reply", "bytes to reply", _decode_reply, 1),
    ]


def _echo() -> Any:
    from domicile.entity.model.entity import entity_type

    return entity_type(home.Echo).find(home.Echo.echo)


def _encode_args() -> Callable[[], Any]:
    encode = _echo().encode_args
    return lambda: encode((PAYLOAD,), {})


def _decode_args() -> Callable[[], Any]:
    echo = _echo()
    body, decode = echo.encode_args((PAYLOAD,), {}), echo.decode_args
    return lambda: decode(body)


def _encode_reply() -> Callable[[], Any]:
    encode = _echo().encode_reply
    return lambda: encode(PAYLOAD)


def _decode_reply() -> Callable[[], Any]:
    echo = _echo()
    body, decode = echo.encode_reply(PAYLOAD), echo.decode_reply
    return lambda: decode(body)


def _shard_of() -> Callable[[], Any]:
    from domicile.core.hashing import shard_of
    from domicile.core.ids import EntityKey

    key = EntityKey("echo", "123")
    return lambda: shard_of(key, 256)


def _requests() -> Any:
    from domicile.core.wire import Frame, Request

    body = _echo().encode_args((PAYLOAD,), {})
    fields = ("echo", "123", "echo", body, True, False, 10.0)
    return Frame(7, 6, tuple(Request("default", 17, n, 3, 0, *fields) for n in range(BATCH)))


def _frame_requests() -> Callable[[], Any]:
    from domicile.core.wire import encode_packet

    frame = _requests()
    return lambda: encode_packet(frame)


def _unframe_requests() -> Callable[[], Any]:
    from domicile.core.wire import decode_packet, encode_packet

    data = encode_packet(_requests())
    return lambda: decode_packet(data)


def _frame_replies() -> Callable[[], Any]:
    from domicile.core.wire import Frame, Reply, ReplyStatus, decode_packet, encode_packet

    body = _echo().encode_reply(PAYLOAD)
    replies = tuple(Reply("default", 17, n, ReplyStatus.OK, body) for n in range(BATCH))
    frame = Frame(7, 6, replies)
    return lambda: decode_packet(encode_packet(frame))


def _pair(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    for end in (near, far):
        stack.callback(end.close)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def _size_bytes(messages: int) -> int:
    return len(_encoded()) * messages // BATCH


def _through(stack: ExitStack, messages: int) -> Callable[[], Any]:
    size_bytes = _size_bytes(messages)
    near, far = _pair(stack)
    data, buffer = bytes(size_bytes), bytearray(256 * 1024)

    def send_and_receive() -> None:
        near.sendall(data)
        left = size_bytes
        while left:
            left -= far.recv_into(buffer)

    return send_and_receive


def _and_back(stack: ExitStack) -> Callable[[], Any]:
    """What the machine itself needs to wake another process and be woken by it: no event loop."""
    data = bytes(_size_bytes(1))
    near, far = _pair(stack)
    child = multiprocessing.get_context("fork").Process(target=_return_all, args=(far, near))
    child.start()
    stack.callback(child.join)
    # Before that: what ends the child.
    stack.callback(near.shutdown, socket.SHUT_RDWR)
    buffer = bytearray(len(data))

    def there_and_back() -> None:
        near.sendall(data)
        left = len(data)
        while left:
            left -= near.recv_into(buffer)

    return there_and_back


def _return_all(end: socket.socket, other: socket.socket) -> None:
    other.close()
    while data := end.recv(65_536):
        end.sendall(data)


def _encoded() -> bytes:
    from domicile.core.wire import encode_packet

    return encode_packet(_requests())


def _handler() -> Callable[[], Any]:
    entity = object.__new__(home.Echo)

    def run() -> None:
        try:
            home.Echo.echo(entity, PAYLOAD).send(None)
        except StopIteration:
            return

    return run


def table() -> str:
    """What each function takes by itself."""
    rows = [
        [stage, name, "not measured: it is elsewhere now" if took is None else f"{took * 1e6:.2f}"]
        for stage, name, took in alone()
    ]
    return grid(["stage", "alone", "µs per message"], rows)
