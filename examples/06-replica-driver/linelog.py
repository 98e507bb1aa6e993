"""A toy database: a log of lines behind a TCP port, which may follow another one of its kind.

    python linelog.py PORT FOLDER

A client sends one line and gets one line of JSON: `APPEND text`, or `READ`. All other commands are
for agents, guards and followers. It knows nothing of Domicile. What a replica group needs of any
database is here: it can refuse writes, tell what it has, follow, give up its end, and begin a new
history. It starts with writes refused, whatever it was before.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

MARK = "#epoch"
"""Entries that begin so are promotions, and no client's writes."""

AT_A_TIME = 100
PAUSE_S = 0.02


class Log:
    """The entries in memory and in a file: each with the id of the history that it is of."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "log"
        self.entries: list[tuple[str, str]] = []
        if self._file.exists():
            for line in self._file.read_text().splitlines():
                history, _, text = line.partition(" ")
                self.entries.append((history, text))

    @property
    def history(self) -> str:
        return self.entries[-1][0] if self.entries else ""

    def add(self, history: str, text: str) -> None:
        with self._file.open("a") as file:
            file.write(f"{history} {text}\n")
            file.flush()
            os.fsync(file.fileno())
        self.entries.append((history, text))

    def cut(self, kept: int) -> None:
        """Give up what is beyond an offset."""
        self.entries = self.entries[:kept]
        new = self._file.with_suffix(".new")
        new.write_text("".join(f"{history} {text}\n" for history, text in self.entries))
        new.replace(self._file)


class LineServer:
    """One server."""

    def __init__(self, port: int, folder: Path) -> None:
        self.port, self.log = port, Log(folder)
        self.run = secrets.token_hex(8)
        self.open_epoch = 0
        self.promoted = 0
        self.follows = ""
        self.history = self.log.history
        self.confirmed: dict[str, int] = {}
        self.syncs = {"full": 0, "partial": 0, "rewound": 0}
        self._following: asyncio.Task[None] | None = None
        self._clients: dict[asyncio.StreamWriter, None] = {}

    async def serve(self) -> None:
        server = await asyncio.start_server(self._attend, "127.0.0.1", self.port)
        async with server:
            await server.serve_forever()

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                command, *words = line.decode().split()
                if command == "APPEND":
                    self._clients[writer] = None
                try:
                    answer = getattr(self, f"do_{command.lower()}")(*words)
                except (AttributeError, TypeError, ValueError) as error:
                    answer = {"error": str(error)}
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._clients.pop(writer, None)
            writer.close()

    # for clients

    def do_append(self, *words: str) -> dict[str, Any]:
        if not self.open_epoch:
            return {"error": "writes are refused"}
        self.log.add(self.history, " ".join(words))
        return {"offset": len(self.log.entries)}

    def do_read(self) -> dict[str, Any]:
        return {"lines": [text for _, text in self.log.entries if not text.startswith(MARK)]}

    # for agents

    def do_info(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(), "run": self.run, "open_epoch": self.open_epoch,
            "promoted": self.promoted, "follows": self.follows, "history": self.history,
            "offset": len(self.log.entries), "confirmed": self.confirmed, "syncs": self.syncs,
        }  # fmt: skip

    def do_close(self) -> dict[str, Any]:
        """Refuse writes, and end the sessions of those who wrote."""
        self.open_epoch = 0
        for writer in self._clients:
            writer.close()
        return {}

    def do_drain(self) -> dict[str, Any]:
        self.open_epoch = 0
        return {}

    def do_dismiss(self) -> dict[str, Any]:
        self.open_epoch = self.promoted = 0
        return {}

    def do_stand(self) -> dict[str, Any]:
        if self._following is not None:
            self._following.cancel()
        self._following, self.follows = None, ""
        return self.do_close()

    def do_promote(self, epoch: str) -> dict[str, Any]:
        self.do_stand()
        self.history, self.promoted = secrets.token_hex(8), int(epoch)
        self.log.add(self.history, f"{MARK} {epoch}")
        return {}

    def do_follow(self, address: str, history: str, kept: str) -> dict[str, Any]:
        if (self.follows, self.history) == (address, history):
            return {}
        self.do_stand()
        had, self.promoted = len(self.log.entries), 0
        way = "full" if kept == "0" else "rewound" if had > int(kept) else "partial"
        self.syncs[way] += 1
        self.log.cut(int(kept))
        self.follows, self.history = address, history
        self._following = asyncio.create_task(self._pull(address, history))
        return {}

    def do_entries(self, begin: str, end: str) -> dict[str, Any]:
        return {"entries": self.log.entries[int(begin) : int(end)]}

    # for guards

    def do_open(self, epoch: str, run: str) -> dict[str, Any]:
        if (self.run, self.promoted) != (run, int(epoch)):
            return {"error": "this run of the server was not promoted for this epoch"}
        self.open_epoch = int(epoch)
        return {}

    # for followers

    def do_fetch(self, by: str, history: str, offset: str, last: str) -> dict[str, Any]:
        """Entries after an offset, for a follower whose last entry is of this history."""
        mine = self.log.entries
        known = int(offset) <= len(mine) and (offset == "0" or mine[int(offset) - 1][0] == last)
        if history != self.history or not known:
            # Another server is at this address now: its follower keeps what it has.
            return {"error": "another history"}
        self.confirmed[by] = int(offset)
        return {"entries": mine[int(offset) : int(offset) + AT_A_TIME]}

    async def _pull(self, address: str, history: str) -> None:
        own = f"127.0.0.1:{self.port}"
        while True:
            try:
                async with asyncio.timeout(1.0):
                    asked = (
                        f"FETCH {own} {history} {len(self.log.entries)} {self.log.history or '-'}"
                    )
                    answer = await ask(address, asked)
                for was, text in answer.get("entries", ()):
                    self.log.add(was, text)
                if len(answer.get("entries", ())) == AT_A_TIME:
                    continue
            except (OSError, TimeoutError):
                pass
            await asyncio.sleep(PAUSE_S)


async def ask(address: str, command: str) -> dict[str, Any]:
    """One command on a connection of its own."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(command.encode() + b"\n")
        line = await reader.readline()
    finally:
        writer.close()
    if not line:
        raise ConnectionError(f"{address} closed the connection")
    answer: dict[str, Any] = json.loads(line)
    return answer


if __name__ == "__main__":
    asyncio.run(LineServer(int(sys.argv[1]), Path(sys.argv[2])).serve())
