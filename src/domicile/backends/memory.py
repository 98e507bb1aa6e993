"""`memory://name`: store, journal and network of the nodes of one process.

The registry calls it. Nodes of one process that name the same URL and cluster share them. Nothing
survives the process.
"""

from __future__ import annotations

from collections.abc import Callable

from domicile.backends.registry import Backend, OpenOptions
from domicile.journals.memory import MemoryJournal
from domicile.membership.clock import SystemClock
from domicile.ports.journal import Journal
from domicile.ports.store import Store
from domicile.ports.transport import Transport
from domicile.stores.memory.store import MemoryStore
from domicile.transports.memory import MemoryNetwork, MemoryTransport


class SharedMemory:
    """What the nodes of one cluster share behind one `memory://name`."""

    def __init__(self) -> None:
        self.store = MemoryStore(SystemClock())
        self.journal = MemoryJournal()
        self.network = MemoryNetwork()


class MemoryBackend(Backend):
    """Everything in the memory of this process."""

    scheme = "memory"
    stores = "memory://name (one process)"
    journals = "memory:// (kept by this process alone and gone with it)"
    reach = "process"

    def __init__(self) -> None:
        self._shared: dict[tuple[str, str], SharedMemory] = {}

    def shared(self, url: str, cluster: str) -> SharedMemory:
        """The objects that a cluster shares behind a URL; made at the first call."""
        return self._shared.setdefault((url, cluster), SharedMemory())

    def forget(self, url: str, cluster: str) -> None:
        """Drop these objects, once no node of the cluster runs."""
        self._shared.pop((url, cluster), None)

    def open_store(self, url: str, options: OpenOptions) -> Store:
        """As `Backend.open_store`."""
        return self.shared(url, options.cluster).store.client(options.by)

    def missing(self, url: str) -> str | None:
        """As `Backend.missing`."""
        return (
            f"{url} lives inside one process and can't be looked at from another; give the nodes "
            "a sqlite:///path/to/file.db"
        )

    def transport(self, url: str, options: OpenOptions) -> Callable[[], Transport] | None:
        """As `Backend.transport`."""
        network = self.shared(url, options.cluster).network
        return lambda: MemoryTransport(network)

    def default_journal(self, url: str) -> str | None:
        """As `Backend.default_journal`."""
        return url

    def open_journal(self, url: str, options: OpenOptions) -> Journal:
        """As `Backend.open_journal`: with a `memory://` store, the journal that its nodes share.

        With any other store each node has a journal of its own.
        """
        if options.store.startswith(f"{self.scheme}://"):
            return self.shared(options.store, options.cluster).journal
        return MemoryJournal()


MEMORY = MemoryBackend()
