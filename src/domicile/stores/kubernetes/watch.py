"""A watch of keys: the changes of ConfigMaps since a revision, in order, none skipped (S8).

`KubernetesStore.watch` makes it. The server ends a watch after some minutes, and bookmarks move its
revision on; the watch then goes on from there without a word. It must never go on past a revision
that the server no longer knows: that is `WatchCompacted`, and the caller lists again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from random import Random

from domicile.core.state.txn import Change, Changes
from domicile.errors import StoreUnavailable, WatchCompacted
from domicile.kubeapi.errors import KubeError, KubeGone
from domicile.kubeapi.kinds import CONFIG_MAPS
from domicile.stores.kubernetes.client import KubernetesClient
from domicile.stores.kubernetes.objects import key_labels, read_item, read_key, revision_of

WATCH_S = 240
"""Seconds after which the server ends a watch."""


async def watched(
    client: KubernetesClient,
    prefix: bytes,
    from_revision: int,
    seen: Callable[[int], None],
    random: Random,
) -> AsyncGenerator[Changes, None]:
    """The changes under a prefix after a revision. `seen` gets every revision that is passed."""
    history, generation = client.history, client.generation
    history.check(generation)
    if from_revision > history.newest:
        # S5: the server would wait for a future revision, and follow from there (S12).
        history.saw(await client.revision(), from_revision, generation)
    address, revision = client.address, from_revision
    while True:
        try:
            notices = client.kube.watch(
                CONFIG_MAPS,
                address.namespace,
                resource_version=str(revision),
                labels=key_labels(address.store, prefix),
                seconds=int(WATCH_S * random.uniform(0.8, 1.0)),
            )
            async with aclosing(notices):
                async for notice in notices:
                    history.check(generation)
                    found = notice.object
                    revision = max(revision, revision_of(found))
                    seen(revision)
                    key = None if notice.type == "BOOKMARK" else read_key(found)
                    if key is None or not key.startswith(prefix):
                        continue
                    item = None if notice.type == "DELETED" else read_item(found)
                    if item is None and notice.type != "DELETED":
                        raise StoreUnavailable(
                            f"the ConfigMap {found.metadata.name} of {address.shown} can't be "
                            "read: it was changed from outside; restore or delete it"
                        )
                    yield Changes(revision, (Change(key, item),))
        except KubeGone as error:
            raise WatchCompacted(
                f"changes after revision {revision} are no longer kept; list again and watch from "
                "the listing's revision"
            ) from error
        except KubeError as error:
            raise StoreUnavailable(
                f"the watch was lost: {error}; resume from the last revision seen"
            ) from error
        # It ended as it was asked to. A store that was put back meanwhile is seen here (S5).
        history.saw(await client.revision(), revision, generation)
