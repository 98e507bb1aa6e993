"""Follows all objects of a kind: a list, then its changes, for ever.

The caller gets a whole list first (`ObjectsListed`), and again whenever changes may have been
missed because the server no longer knows our version (410). Bookmarks move the version along. A
watch that breaks goes on from the last version that was seen. Failures are waited out with growing
pauses and logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.errors import KubeError, KubeGone
from domicile.kubeapi.kinds import ApiKind
from domicile.kubeapi.objects import PartialObject

log = logging.getLogger("domicile.kube")

K = TypeVar("K", bound=PartialObject)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 15.0


@dataclass(frozen=True, slots=True)
class ObjectsListed(Generic[K]):
    """All objects there are. Others that were known are gone."""

    items: tuple[K, ...]


@dataclass(frozen=True, slots=True)
class ObjectChanged(Generic[K]):
    """An object is new, or has changed."""

    object: K


@dataclass(frozen=True, slots=True)
class ObjectRemoved(Generic[K]):
    """An object is gone, or no longer matches the selector."""

    object: K


async def follow(
    client: KubeClient,
    kind: ApiKind[K],
    namespace: str = "",
    *,
    labels: str = "",
    shard: str = "",
    seconds: int = 240,
    random: Random | None = None,
    on_trouble: Callable[[KubeError], None] | None = None,
) -> AsyncGenerator[ObjectsListed[K] | ObjectChanged[K] | ObjectRemoved[K], None]:
    """All objects and then their changes. It never ends by itself."""
    random = Random() if random is None else random
    version = ""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            if not version:
                page = await client.list(kind, namespace, labels=labels, shard=shard)
                version = page.resource_version
                yield ObjectsListed(page.items)
            lasting = int(seconds * random.uniform(0.8, 1.0)) or 1
            watch = client.watch(
                kind,
                namespace,
                resource_version=version,
                labels=labels,
                shard=shard,
                seconds=lasting,
            )
            async with aclosing(watch) as notices:
                async for notice in notices:
                    version = notice.object.metadata.resource_version or version
                    pause_s = FIRST_PAUSE_S
                    if notice.type == "DELETED":
                        yield ObjectRemoved(notice.object)
                    elif notice.type != "BOOKMARK":
                        yield ObjectChanged(notice.object)
            # The server ended the watch, as it was asked to; a server that ends it at once is
            # asked again after a pause.
            await asyncio.sleep(FIRST_PAUSE_S)
        except KubeGone:
            log.info("the watch of %s is too old: listing again", kind.shown)
            version = ""
            await asyncio.sleep(FIRST_PAUSE_S)
        except KubeError as error:
            log.warning("%s; trying again in %.1f s", error, pause_s)
            if on_trouble is not None:
                on_trouble(error)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
