"""Whether a server holds writes back, where it does not say so: Redis, and Valkey before 8.1.

`INFO` of such a server has no `paused_actions`. So one connection asks a question that has no
effect, and that a pause of writes holds back like a write. Either the answer comes, and the server
is open; or the server lists that connection as blocked, and it is closed. Nothing is guessed: while
neither is seen, the probe asks on.
"""

from __future__ import annotations

import asyncio

from domicile.failover.drivers.valkey.server import ValkeyServer, encode_command

QUESTION = ("PFCOUNT", "domicile:held")
"""Reads a key that nobody writes. A pause of writes holds it back, because it may write."""

PROMPT_S = 0.005
"""How long the answer may take until it is looked whether the question is held back."""


class PauseProbe:
    """One server's. Several callers may ask at a time."""

    def __init__(self, server: ValkeyServer) -> None:
        self._server = server
        self._stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._id = b""
        self._asked = False
        """Whether a question has no answer yet."""
        self._turn = asyncio.Lock()

    async def holds(self) -> bool:
        """Whether a write that is sent now would be held back.

        `ConnectionError` if the server refuses to tell, `TimeoutError` if it does not answer.
        """
        async with asyncio.timeout(self._server.answer_s), self._turn:
            asked_now = False
            while True:
                if not self._asked:
                    await self._ask()
                    asked_now = True
                answer = await self._answer()
                if answer is None:
                    if await self._held_back():
                        return True
                elif not answer:
                    # The guard ends all sessions when it closes the server, also this one.
                    self.close()
                elif asked_now:
                    if answer.startswith(b"-"):
                        raise ConnectionError(f"it does not tell whether writes wait: {answer!r}")
                    return False

    async def _ask(self) -> None:
        if self._stream is None:
            reader, writer = await self._server.open_stream()
            try:
                writer.write(encode_command("CLIENT", "ID"))
                self._id = (await reader.readline()).strip(b":\r\n")
            except BaseException:
                writer.close()
                raise
            self._stream = reader, writer
        _, writer = self._stream
        writer.write(encode_command(*QUESTION))
        self._asked = True

    async def _answer(self) -> bytes | None:
        """The answer; None if there is none yet, and nothing if there will be none."""
        assert self._stream is not None
        reader, _ = self._stream
        try:
            # What has arrived of a line stays in the reader.
            async with asyncio.timeout(PROMPT_S):
                line = await reader.readline()
        except TimeoutError:
            return None
        except ConnectionError:
            return b""
        self._asked = False
        return line

    async def _held_back(self) -> bool:
        said = await self._server.ask("CLIENT", "LIST", "ID", self._id)
        text: str = said.decode() if isinstance(said, bytes) else str(said)
        flags = [word for word in text.split() if word.startswith("flags=")]
        return any("b" in word.removeprefix("flags=") for word in flags)

    def close(self) -> None:
        """Let go of the connection."""
        if self._stream is not None:
            self._stream[1].close()
        self._stream, self._asked = None, False
