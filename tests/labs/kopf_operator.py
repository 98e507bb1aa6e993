"""An operator of the ring `websites` for tests: `kopf run -A kopf_operator.py`.

ACTS is the file that it notes its doings in, SLOW_S how long a handler works.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

import kopf

from domicile.kube.kopf import ring

websites = ring("websites", duration_s=int(os.environ.get("DURATION_S", "15")), unique_name=True)
NAME = os.environ["POD_NAME"]
SLOW_S = float(os.environ.get("SLOW_S", "0"))


def note(what: str, name: str) -> None:
    line = {"instance": NAME, "what": what, "object": name, "at": time.monotonic()}
    with open(os.environ["ACTS"], "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


@kopf.on.create("example.com", "v1", "websites")
async def create(name: str, **_: Any) -> dict[str, str]:
    note("create", name)
    await asyncio.sleep(SLOW_S)
    note("created", name)
    return {"by": NAME}


@kopf.on.update("example.com", "v1", "websites")
async def update(name: str, **_: Any) -> None:
    note("update", name)


@kopf.on.resume("example.com", "v1", "websites")
async def resume(name: str, **_: Any) -> None:
    note("resume", name)


@websites.daemon("example.com", "v1", "websites")
async def watch(name: str, **_: Any) -> None:
    note("daemon", name)
    try:
        while True:
            await asyncio.sleep(0.2)
            note("daemon lives", name)
    finally:
        note("daemon ends", name)


@websites.timer("example.com", "v1", "websites", interval=0.5)
async def tick(name: str, patch: kopf.Patch, **_: Any) -> None:
    note("timer", name)
    patch.status["ticked"] = NAME
