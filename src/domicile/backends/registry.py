"""Which backend a URL means: the registry of URL schemes for stores and journals.

A backend is registered under a scheme: the built-in ones by this package, those of other packages
by an entry point of the group `domicile.backends` that has the scheme as its name. An entry point
is loaded when a URL first names its scheme, never before. This package is the only place that
knows schemes. Nothing here opens a file or a connection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from domicile.core.ids import Incarnation
from domicile.errors import ConfigError
from domicile.ports.health import Health
from domicile.ports.journal import Journal
from domicile.ports.meter import Meter, NoMeter
from domicile.ports.store import Store
from domicile.ports.transport import Transport
from domicile.stores.commit_log import QueuedCommit

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

GROUP = "domicile.backends"
"""The group of entry points by which other packages register their backends."""

Reach = Literal["process", "machine", "network"]

_FILES = "sqlite"
"""The scheme that is suggested for a text that is a path and not a URL."""


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """Which process opens a backend, and for what. Backends must ignore fields that they do not
    know."""

    by: str
    """The name of the process in the store's history."""
    cluster: str = ""
    """The cluster that the process belongs to; empty for a tool that reads all clusters."""
    store: str = ""
    """The URL of the cluster's store, for its journal."""
    op_timeout_s: float = 5.0
    """Seconds that one call may take before it ends as `StoreUnavailable` or `Unknown`."""
    meter: Meter = field(default_factory=NoMeter)
    reads_only: bool = False
    """Whether the process only reads: then its user need not be allowed to write."""
    creates: bool = True
    """Whether a store that is not there is made. Tools only work with what is there."""
    lives: Callable[[Sequence[Incarnation], str], Awaitable[bool]] | None = None
    """Whether the store has a record of one of these incarnations, or one that names this process,
    for a journal that must know it (J3)."""
    ttl_s: float = 0.0
    """Seconds for which a record stays after its node has stopped."""
    serves: bool = False
    """Whether a node opens it: a journal then tells the log why it does not answer."""


class Backend:
    """The stores and journals of one URL scheme. Derive from it and override what the backend has.

    A backend has stores, journals, or both. Its methods make objects and do no I/O; the objects
    open files and connections on their first call. A store that is only read must create nothing.
    """

    scheme: ClassVar[str]
    """The part of a URL before `://`, in lower case."""
    stores: ClassVar[str] = ""
    """An example URL of a store and, in brackets, its use; empty: no stores."""
    journals: ClassVar[str] = ""
    """An example URL of a journal and, in brackets, its use; empty: no journals."""
    reach: ClassVar[Reach] = "network"
    """How far apart the processes that share one store may be."""
    needs: ClassVar[tuple[str, ...]] = ()
    """The modules that must be installed in addition to Domicile."""
    install: ClassVar[str] = ""
    """What `pip install` takes to install them, as in `domicile[postgres]`."""

    def check_url(self, url: str) -> None:
        """Raise `ConfigError` with the correct form, unless a URL of this scheme is complete."""

    def similar(self, rest: str) -> str:
        """The URL that was probably meant by a misspelt scheme, `://` and `rest`."""
        return f"{self.scheme}://{rest}"

    def open_store(self, url: str, options: OpenOptions) -> Store:
        """The whole store at a URL; several clusters may share it, each under its own prefix."""
        raise NotImplementedError(f"{self.scheme}:// has no stores")

    def missing(self, url: str) -> str | None:
        """Why a tool in another process cannot read the store, and the next step; None: it can.

        Only reasons that are known at once, without a connection.
        """
        return None

    def health(self, url: str, options: OpenOptions) -> Health | None:
        """The port that proves deaths of the store's processes (L6, C9); None: there is none."""
        return None

    def transport(self, url: str, options: OpenOptions) -> Callable[[], Transport] | None:
        """A function that makes a new transport for each incarnation; None: TCP."""
        return None

    def default_journal(self, url: str) -> str | None:
        """The URL of the journal that belongs to a store; None: the program must name one."""
        return None

    def open_journal(self, url: str, options: OpenOptions) -> Journal:
        """The journal at a URL."""
        raise NotImplementedError(f"{self.scheme}:// has no journals")

    def copy_journal(self, url: str, to: str) -> None:
        """Copy a journal to a new place while nodes use it. Blocks. `ConfigError`: it can't be."""
        raise ConfigError(
            f"journals of {self.scheme}:// are copied with the tools of their database, as "
            "`pg_dump` for PostgreSQL"
        )

    def commits(self, url: str, after: int) -> list[QueuedCommit] | None:
        """The commits after a revision that a store still keeps, for checkers; None: it keeps none.

        Blocks. Their times are those of this machine's clock.
        """
        return None

    def sqlite_file(self, url: str) -> Path | None:
        """The SQLite file of a store that is one, for test tools that lock it or read its log."""
        return None


_known: dict[str, Backend] = {}

OpensHealth = Callable[[str, OpenOptions], Health]
"""Makes a health port from its URL, or raises `ConfigError`. It does no I/O."""

_healths: dict[str, OpensHealth] = {}


def register(backend: Backend) -> None:
    """Make a backend known in this process; `ConfigError` if another one has its scheme."""
    if _known.setdefault(backend.scheme, backend) is not backend:
        raise ConfigError(
            f"{backend.scheme}:// is registered already, by {_name(_known[backend.scheme])}: give "
            f"{_name(backend)} another scheme"
        )


def register_health(scheme: str, opens: OpensHealth) -> None:
    """Make a health port known that has a URL of its own, apart from the store's (C9)."""
    if _healths.setdefault(scheme, opens) is not opens:
        raise ConfigError(f"{scheme}:// has a health port already: use another scheme")


def open_health(url: str, options: OpenOptions) -> Health:
    """The health port at a URL; raises `ConfigError` unless the URL is complete."""
    scheme, found, _ = url.partition("://")
    if not found or scheme not in _healths:
        known = ", ".join(f"{one}://" for one in _healths)
        raise ConfigError(
            f"health {shown_url(url)!r} is not one of the known kinds: {known}; leave it out to "
            "have the store's own"
        )
    return _healths[scheme](url, options)


def store_backend(url: str) -> Backend:
    """The backend of a store's URL; raises `ConfigError` unless the URL is complete."""
    found = _find(url)
    if found is None or not found.stores:
        raise _unknown("store", url)
    return _usable("store", url, found)


def journal_backend(url: str) -> Backend:
    """The backend of a journal's URL; raises `ConfigError` unless the URL is complete."""
    found = _find(url)
    if found is None or not found.journals:
        raise _unknown("journal", url)
    return _usable("journal", url, found)


def shown_url(url: str) -> str:
    """A URL for people to read: without the user, password and options that it may contain."""
    scheme, found, rest = url.partition("://")
    server, slash, path = rest.partition("/")
    if "@" in path and server and "@" not in server.partition("?")[0]:
        # A password that should be quoted and is not: all before the last @ may belong to it.
        return f"{scheme}{found}{path.rpartition('@')[2].partition('?')[0]}"
    server = server.rpartition("@")[2].partition("?")[0]
    return f"{scheme}{found}{server}{slash}{path.partition('?')[0]}"


def _find(url: str) -> Backend | None:
    scheme, found, _ = url.partition("://")
    if not found or not scheme:
        return None
    return _known.get(scheme) or _loaded(scheme)


def _usable(what: str, url: str, backend: Backend) -> Backend:
    absent = [name for name in backend.needs if not _installed(name)]
    if absent:
        raise ConfigError(
            f"{what} {shown_url(url)!r} needs {', '.join(absent)}, not installed here: "
            f"pip install '{backend.install or absent[0]}'"
        )
    backend.check_url(url)
    return backend


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False  # nor is the package that it would be in


def _loaded(scheme: str) -> Backend | None:
    """The backend that an installed package has for a scheme; it is registered from then on."""
    points = {point.value: point for point in _entry_points() if point.name == scheme}
    if not points:
        return None
    if len(points) > 1:
        raise ConfigError(
            f"several installed packages have a backend for {scheme}://: "
            f"{', '.join(map(_origin, points.values()))}; uninstall all but one"
        )
    (point,) = points.values()
    try:
        backend = point.load()
    except Exception as error:
        raise ConfigError(
            f"the backend for {scheme}:// can't be loaded from {_origin(point)}: "
            f"{type(error).__name__}: {error}; repair or uninstall that package"
        ) from error
    if not isinstance(backend, Backend) or backend.scheme != scheme:
        raise ConfigError(
            f"the backend for {scheme}:// can't be used: {_origin(point)} must be an instance of "
            f"domicile.backends.Backend with scheme={scheme!r}, it is {backend!r}; repair or "
            "uninstall that package"
        )
    return _known.setdefault(scheme, backend)


def _entry_points() -> EntryPoints:
    # Here, because it takes long to import and the built-in backends do not need it.
    from importlib.metadata import entry_points

    return entry_points(group=GROUP)


def _origin(point: EntryPoint) -> str:
    return point.value if point.dist is None else f"{point.value} (package {point.dist.name})"


def _name(backend: Backend) -> str:
    kind = type(backend)
    return f"{kind.__module__}.{kind.__qualname__}"


def _unknown(what: Literal["store", "journal"], url: str) -> ConfigError:
    forms = {
        scheme: one.stores if what == "store" else one.journals for scheme, one in _known.items()
    }
    forms |= {
        point.name: f"{point.name}://… (of {_origin(point)})"
        for point in _entry_points()
        if point.name not in _known
    }
    kinds = {scheme: form for scheme, form in forms.items() if form}
    meant = _meant(url, list(kinds))
    hint = f"; did you mean {shown_url(meant)}?" if meant else ""
    listed = ", ".join(kinds.values())
    return ConfigError(f"{what} {shown_url(url)!r} is not one of the known kinds: {listed}{hint}")


def _meant(url: str, schemes: list[str]) -> str:
    """The URL that was probably meant; empty if that is not clear."""
    scheme, found, rest = url.partition("://")
    if not found:
        scheme = _FILES
        rest = url.removeprefix(f"{_FILES}:") if url.startswith(f"{_FILES}:") else url and f"/{url}"
    close = get_close_matches(scheme.lower(), schemes, n=1)
    if not close or not rest:
        return ""
    backend = _known.get(close[0])
    return f"{close[0]}://{rest}" if backend is None else backend.similar(rest)
