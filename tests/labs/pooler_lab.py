"""A pooler between a journal and its PostgreSQL server, as PgBouncer is one.

It looks at the first message of a connection only: a pooler decides there what becomes of the
settings that a session asks for.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

KEPT = ("user", "database", "application_name")
"""What a pooler in transaction mode takes over for a session."""

Settings = dict[str, str]


def drops_settings(settings: Settings) -> Settings | None:
    """As with `ignore_startup_parameters`: a setting that is not known gets lost."""
    return {name: value for name, value in settings.items() if name in KEPT}


def keeps_the_path_only(settings: Settings) -> Settings | None:
    """A pooler that tracks what the server reports, as new servers do with `search_path`."""
    return {name: value for name, value in settings.items() if name in (*KEPT, "search_path")}


def refuses_settings(settings: Settings) -> Settings | None:
    """As without it: the session is refused."""
    return None


@asynccontextmanager
async def pooler(port: int, takes: Callable[[Settings], Settings | None]) -> AsyncIterator[int]:
    """The port of a pooler in front of a server."""
    tasks: dict[asyncio.Task[None], None] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks[task] = None
        try:
            await _session(reader, writer, port, takes)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            tasks.pop(task, None)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _session(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    port: int,
    takes: Callable[[Settings], Settings | None],
) -> None:
    while True:
        [size] = struct.unpack("!i", await reader.readexactly(4))
        body = await reader.readexactly(size - 4)
        if struct.unpack("!i", body[:4]) == (196608,):
            break
        writer.write(b"N")  # no encryption
    words = body[4:].rstrip(b"\0").decode().split("\0")
    settings = takes(dict(zip(words[::2], words[1::2], strict=True)))
    if settings is None:
        text = b"SFATAL\0VFATAL\0C08P01\0Munsupported startup parameter: jit\0\0"
        writer.write(b"E" + struct.pack("!i", len(text) + 4) + text)
        await writer.drain()
        return
    far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        pairs = b"".join(f"{name}\0{value}\0".encode() for name, value in settings.items())
        message = struct.pack("!i", 196608) + pairs + b"\0"
        far_writer.write(struct.pack("!i", len(message) + 4) + message)
        async with asyncio.TaskGroup() as both:
            both.create_task(_pass_on(reader, far_writer))
            both.create_task(_pass_on(far_reader, writer))
    finally:
        far_writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    writer.close()
