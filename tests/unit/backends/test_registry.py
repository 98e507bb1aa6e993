"""Which backend a URL means, what an unknown one is answered, and how other packages add theirs."""

from __future__ import annotations

import ast
import asyncio
import re
import sys
from pathlib import Path

import pytest
from backends_lab import WRAPPED, installed

from domicile import ConfigError, Entity, EventSourced, Manager, Node, Settings, connect, handler
from domicile.backends import Backend, OpenOptions, register, registry
from domicile.backends.memory import MEMORY
from domicile.backends.registry import journal_backend, store_backend
from domicile.backends.sqlite import SQLITE, sqlite_url
from domicile.backends.wiring import open_backends, open_whole_store
from domicile.core.state.txn import Put
from domicile.ports.health import TellsAge
from domicile.ports.store import Store
from domicile.stores.memory.store import MemoryStore
from domicile.testing.sim.clock import ManualClock

SRC = Path(registry.__file__).parents[1]
BARE = r"(memory|sqlite):/+"


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins with the built-in ones, and what it registers is forgotten after it."""
    monkeypatch.setattr(registry, "_known", {"memory": MEMORY, "sqlite": SQLITE})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of the import path; what is imported from it is forgotten after the test."""
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.syspath_prepend(str(path))
    for name in ("wrapped_store", "other_store"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return path


class Toy(Backend):
    """A store in this process's memory, under a scheme of its own."""

    scheme = "toy"
    stores = "toy://name (a test)"

    def __init__(self) -> None:
        self.store = MemoryStore(ManualClock())
        self.opened: list[OpenOptions] = []

    def open_store(self, url: str, options: OpenOptions) -> Store:
        self.opened.append(options)
        return self.store.client(options.by)


class Ledger(EventSourced[int, int], name="backends.ledger"):
    """Keeps events."""

    @staticmethod
    def initial(id: str, /) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: int, /) -> int:
        return state + event


class Parrot(Entity, name="backends.parrot"):
    """Says what it hears."""

    @handler
    async def say(self, text: str) -> str:
        return text


def test_the_built_in_ones_are_there() -> None:
    assert store_backend("memory://dev") is MEMORY
    assert store_backend("sqlite:///dev.db") is SQLITE
    assert journal_backend("memory://") is MEMORY
    assert (MEMORY.reach, SQLITE.reach, Backend.reach) == ("process", "machine", "network")


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("dev.db", "sqlite:///dev.db"),
        ("/tmp/dev.db", "sqlite:////tmp/dev.db"),
        ("sqlite:dev.db", "sqlite:///dev.db"),
        ("sqlite:/dev.db", "sqlite:///dev.db"),
        ("sqllite:///dev.db", "sqlite:///dev.db"),
        ("sqllite:////tmp/dev.db", "sqlite:////tmp/dev.db"),
        ("SQLITE:///dev.db", "sqlite:///dev.db"),
        ("memori://dev", "memory://dev"),
    ],
)
def test_an_unknown_kind_lists_the_known_ones_and_what_was_meant(url: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        store_backend(url)
    assert str(caught.value) == (
        f"store {url!r} is not one of the known kinds: memory://name (one process), "
        f"sqlite:///path/to/file.db (many processes of one machine); did you mean {meant}?"
    )


@pytest.mark.parametrize("url", ["", "://", "sqlite:", "sqllite://", "zookeeper://a:2181"])
def test_nothing_is_meant_by_what_is_like_nothing(url: str) -> None:
    with pytest.raises(ConfigError, match="known kinds") as caught:
        store_backend(url)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("url", ["sqlite://dev.db", "sqlite:///", "sqlite:///dev/"])
def test_a_url_without_a_file_is_told_the_form(url: str) -> None:
    with pytest.raises(ConfigError, match=r"names no file: write sqlite:///relative/file.db"):
        store_backend(url)


@pytest.mark.parametrize("url", ["dev.db", "toy://x"])
def test_a_kind_without_journals_is_no_journal(url: str) -> None:
    register(Toy())
    with pytest.raises(ConfigError) as caught:
        journal_backend(url)
    assert str(caught.value) == (
        f"journal {url!r} is not one of the known kinds: memory:// (kept by this process alone "
        "and gone with it), sqlite:///path/to/file.db.journal (many processes of one machine)"
        + ("; did you mean sqlite:///dev.db?" if url == "dev.db" else "")
    )


def test_every_way_into_a_cluster_asks_the_registry() -> None:
    for make in (Node, Manager, connect):
        with pytest.raises(ConfigError, match=r"did you mean sqlite:///dev.db"):
            make("dev.db")
        make("sqlite:///dev.db")
    with pytest.raises(ConfigError, match=r"journal 'dev.db' is not one of the known kinds"):
        Node("sqlite:///dev.db", journal="dev.db")


def test_events_need_a_journal_that_comes_with_the_store_or_is_named() -> None:
    register(Toy())
    with pytest.raises(ConfigError, match=r"Ledger keeps events.*comes without a journal"):
        Node("toy://x", entities=[Ledger])
    Node("toy://x", entities=[Ledger], journal="memory://")
    Node("toy://x", entities=[Ledger], journal="sqlite:///events.journal")
    for url in ("memory://dev", "sqlite:///dev.db"):
        Node(url, entities=[Ledger])


def test_a_journal_in_memory_is_shared_only_beside_a_store_in_memory() -> None:
    def journal(store: str, cluster: str = "a", named: str | None = None) -> object:
        made = open_backends(store, cluster=cluster, settings=Settings(), journal=named)
        return made.journal

    ours = journal("memory://shared")
    assert ours is not None
    assert journal("memory://shared") is ours
    assert journal("memory://shared", named="memory://") is ours
    assert journal("memory://shared", "b") is not ours
    own = journal("sqlite:///dev.db", named="memory://")
    assert own is not None
    assert journal("sqlite:///dev.db", named="memory://") is not own


def test_a_registered_backend_gets_who_opens_it_and_each_cluster_its_part() -> None:
    async def scenario() -> None:
        made = open_backends("toy://x", cluster="blue", settings=Settings(), by="node-1")
        await made.store.commit((), (Put(b"k", b"v"),))
        assert made.health is None
        assert made.journal is None
        whole = open_whole_store("toy://x", by="tool")
        assert [item.key for item in (await whole.store.list(b"")).items] == [b"blue/k"]
        assert whole.health is None

    toy = Toy()
    register(toy)
    asyncio.run(scenario())
    first, second = toy.opened
    assert (first.by, first.cluster, first.store) == ("node-1", "blue", "toy://x")
    assert first.op_timeout_s == Settings().op_timeout_s
    assert (second.by, second.cluster, second.op_timeout_s) == ("tool", "", 5.0)


def test_nodes_form_a_cluster_on_a_registered_store() -> None:
    class Live(Toy):
        """With the clock and the network of the process."""

        def __init__(self) -> None:
            self.shared = MEMORY.shared("memory://of-toy", "domicile")

        def open_store(self, url: str, options: OpenOptions) -> Store:
            return self.shared.store.client(options.by)

    async def scenario() -> None:
        settings = Settings(shards=2, settle_s=0.05)
        async with (
            Node("toy://x", entities=[Parrot], settings=settings),
            connect("toy://x", settings=settings) as client,
        ):
            assert await client.ref(Parrot, "p").ask(Parrot.say, "hello") == "hello"

    register(Live())
    asyncio.run(scenario())


def test_a_scheme_is_registered_once() -> None:
    toy = Toy()
    register(toy)
    register(toy)
    with pytest.raises(ConfigError, match=r"toy:// is registered already, by .*Toy: give .*Toy"):
        register(Toy())


def test_what_a_backend_needs_is_named_with_the_command_that_installs_it() -> None:
    class Far(Toy):
        needs = ("no_such_driver", "nowhere.at_all", "asyncio")
        install = "domicile[far]"

    register(Far())
    with pytest.raises(ConfigError) as caught:
        Node("toy://x")
    assert str(caught.value) == (
        "store 'toy://x' needs no_such_driver, nowhere.at_all, not installed here: "
        "pip install 'domicile[far]'"
    )


# other packages


def test_an_installed_package_is_loaded_when_its_scheme_is_named(site: Path) -> None:
    installed(site, "wrapped_store", WRAPPED)
    store_backend("sqlite:///dev.db")
    assert "wrapped_store" not in sys.modules
    backend = store_backend("wrapped://x")
    assert type(backend).__name__ == "WrappedBackend"
    assert store_backend("wrapped://y") is backend
    with pytest.raises(ConfigError, match="names nothing: write wrapped://path/to/file"):
        store_backend("wrapped://")


def test_an_unknown_kind_lists_those_of_packages_without_loading_them(site: Path) -> None:
    installed(site, "wrapped_store", "raise RuntimeError('loaded')")
    with pytest.raises(ConfigError, match=r"wrapped://… \(of wrapped_store:BACKEND \(package wr"):
        store_backend("dev.db")
    with pytest.raises(ConfigError, match="did you mean wrapped://x"):
        store_backend("wraped://x")


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        ("", "AttributeError: "),
        ("BACKEND = 7", "must be an instance of domicile.backends.Backend"),
        (WRAPPED.replace('scheme = "wrapped"', 'scheme = "w"'), "with scheme='wrapped'"),
    ],
)
def test_a_broken_package_is_named(site: Path, code: str, complaint: str) -> None:
    installed(site, "wrapped_store", code)
    with pytest.raises(ConfigError, match="the backend for wrapped:// can't be") as caught:
        store_backend("wrapped://x")
    text = str(caught.value)
    assert complaint in text
    assert "wrapped_store:BACKEND (package wrapped_store)" in text
    assert "uninstall that package" in text


def test_two_packages_for_one_scheme_are_told_apart(site: Path) -> None:
    installed(site, "wrapped_store", WRAPPED)
    installed(site, "other_store", WRAPPED)
    with pytest.raises(ConfigError, match=r"several installed packages.*uninstall all but one"):
        store_backend("wrapped://x")


# what only the embedded store has


def test_the_embedded_store_offers_its_file_its_locks_and_ages(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "s.db")
    assert SQLITE.sqlite_file(url) == tmp_path / "s.db"
    locks = SQLITE.health(url, OpenOptions("test"))
    assert isinstance(locks, TellsAge)
    assert MEMORY.sqlite_file("memory://x") is None
    assert MEMORY.health("memory://x", OpenOptions("test")) is None


def bare_schemes(text: str) -> list[str]:
    """Texts that compare or make URLs: a scheme alone, or one at the start of a built text."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
        if isinstance(first, ast.Constant) and re.fullmatch(BARE, str(first.value)):
            found.append(f"line {first.lineno}: {first.value}")
    return found


def test_a_bare_scheme_is_found() -> None:
    assert bare_schemes('if url.startswith("sqlite://"): ...')
    assert bare_schemes('x = f"sqlite:///{path}"')
    assert bare_schemes('"""See `sqlite://`."""\nx = "as in sqlite:///dev.db"') == []


def test_no_other_package_knows_schemes() -> None:
    others = [path for path in SRC.rglob("*.py") if path.parent.name != "backends"]
    assert len(others) > 100
    found = {str(path.relative_to(SRC)): bare_schemes(path.read_text("utf-8")) for path in others}
    assert {path: lines for path, lines in found.items() if lines} == {}
