"""A measured process: `python -m proving.benchmarks.part MODULE NAME OPTIONS`.

Started by `proving.benchmarks.processes`. `MODULE` has a dictionary `PARTS` of async context
managers, each of which yields where it is and what it can measure. The process says on stdout that
it is ready, then answers each line of JSON on stdin by one line of JSON, and ends with its stdin.
What the measured code prints goes to stderr. Runs in the peers' environments: nothing but the
standard library may be imported here.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import IO, Any, Protocol

Options = dict[str, Any]


class Measures(Protocol):
    """Answers wishes."""

    async def run(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """One of them."""
        ...


Part = Callable[[Options], AbstractAsyncContextManager[tuple[str, dict[str, Any]]]]


@asynccontextmanager
async def lines_of_stdin() -> AsyncGenerator[asyncio.StreamReader]:
    """What the parent writes."""
    lines = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    try:
        yield lines
    finally:
        pipe.close()


async def serve(part: Part, options: Options, out: IO[str]) -> None:
    """Be that part until stdin ends."""

    def say(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    async with lines_of_stdin() as lines, part(options) as (where, measures):
        say({"ready": where})
        async for line in lines:
            wanted = json.loads(line)
            try:
                say(await measures[wanted["system"]].run(wanted))
            except NotImplementedError as error:
                say({"cannot": str(error)})


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the loop of that name."""
    return None if name == "asyncio" else importlib.import_module("uvloop").new_event_loop


def main() -> None:
    """The command that `proving.benchmarks.processes` gives."""
    module, name, text = sys.argv[1:]
    options: Options = json.loads(text)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    logging.basicConfig(level=logging.WARNING)
    part: Part = importlib.import_module(module).PARTS[name]
    with asyncio.Runner(loop_factory=loop_factory(options["loop"])) as runner:
        runner.run(serve(part, options, out))


if __name__ == "__main__":
    main()
