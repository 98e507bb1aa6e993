"""`domicile run`, as real processes."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import apsw
import pytest
from run_lab import APP, WAIT_S, Clerk, Running, as_client, running

from domicile import Client, MaybeExecuted, NotExecuted, Settings, Unavailable, connect_sync
from domicile.core.state.keys import NODES
from domicile.core.state.txn import Committed, Delete
from domicile.ops.watchdog import STUCK_EXIT
from domicile.stores.namespace import Namespace
from domicile.stores.sqlite.store import SqliteStore

LOOPS = [
    "asyncio",
    pytest.param(
        "uvloop",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("uvloop") is None, reason="uvloop is not installed"
        ),
    ),
]

SWEEP_S = 0.004
"""Seconds between the moments of a start at which a signal comes."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "clerkapp.py").write_text(APP, encoding="utf-8")
    return tmp_path


async def add_twice(client: Client) -> list[int]:
    clerk = client.ref(Clerk, "anna")
    return [await clerk.ask(Clerk.add), await clerk.ask(Clerk.add)]


async def keep_busy(client: Client, method: str, *arguments: float) -> None:
    """Tell, and make sure by a later answer of a neighbour that it has arrived."""
    clerk = client.ref(Clerk, "busy")
    if method == "ignore":
        await clerk.tell(Clerk.ignore)
    else:
        await clerk.tell(Clerk.linger if method == "linger" else Clerk.block, *arguments)
    if method != "block":
        await client.ref(Clerk, "anna").ask(Clerk.add)


async def block(client: Client, seconds: float) -> None:
    """Hold the node's loop; nobody answers then."""
    busy = client.ref(Clerk, "busy").options(timeout_s=1)
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                await busy.ask(Clerk.block, seconds)
            except NotExecuted:
                continue  # a busy machine did not send it in that time
            except MaybeExecuted:
                return
            raise AssertionError("it was answered")


async def remove_records(place: Path) -> int:
    """Take every node's record away, as an expiry would."""
    store = Namespace(SqliteStore(place / "clerk.db", by="test"), "domicile")
    try:
        keys = [item.key for item in (await store.list(NODES)).items]
        assert isinstance(await store.commit((), [Delete(key) for key in keys]), Committed)
    finally:
        await store.close()
    return len(keys)


async def records(place: Path) -> int:
    """How many nodes are registered."""
    store = Namespace(SqliteStore(place / "clerk.db", by="test"), "domicile")
    try:
        return len((await store.list(NODES)).items)
    finally:
        await store.close()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_node_serves_until_a_signal_asks_it_to_leave(
    place: Path, loop: str, kind: signal.Signals
) -> None:
    with running(place, "run", "clerkapp:node", "--loop", loop) as node:
        assert " INFO  desk  listening at 127.0.0.1:" in node.hear("listening")
        assert as_client(place, add_twice) == [1, 2]
        node.signal(kind)
        assert node.ended() == 0
        assert "joining cluster domicile in sqlite:///clerk.db" in node.said[0]
        asked = [number for number, line in enumerate(node.said) if "asked to leave" in line]
        left = [number for number, line in enumerate(node.said) if "left the cluster" in line]
        assert len(asked) == len(left) == 1
        assert asked < left
        assert node.process.stdout is not None
        assert node.process.stdout.read() == ""


def test_a_function_and_json_logs(place: Path) -> None:
    with running(place, "run", "clerkapp:make", "--log-format", "json") as node:
        assert json.loads(node.hear("listening"))["node"] == "made"
        node.signal(signal.SIGTERM)
        assert node.ended() == 0
        assert {json.loads(line)["level"] for line in node.said} == {"info"}


def test_a_second_signal_ends_it_at_once(place: Path) -> None:
    with running(place, "run", "clerkapp:node") as node:
        node.hear("listening")
        as_client(place, lambda client: keep_busy(client, "linger", 600))
        node.signal(signal.SIGTERM)
        node.hear("a second signal ends this process at once")
        node.signal(signal.SIGTERM)
        assert node.ended() == -signal.SIGTERM


def test_a_signal_before_it_has_joined_ends_it_as_well(place: Path) -> None:
    with running(place, "run", "clerkapp:node") as node:
        node.hear("listening")
        node.signal(signal.SIGTERM)
        assert node.ended() == 0
    other = apsw.Connection(str(place / "clerk.db"))
    try:
        other.execute("BEGIN IMMEDIATE")
        with running(place, "run", "clerkapp:node") as node:
            node.hear("joining")
            node.signal(signal.SIGTERM)
            node.hear("SIGTERM came before it had joined")
            assert node.ended() == 0
    finally:
        other.close()


def test_a_signal_at_any_moment_of_the_start_makes_it_leave(place: Path) -> None:
    for moment in range(12):
        with running(place, "run", "clerkapp:node") as node:
            node.hear("joining")
            with suppress(subprocess.TimeoutExpired):
                node.process.wait(moment * SWEEP_S)
            node.signal(signal.SIGTERM)
            assert node.ended() == 0
            assert any("before it had joined" in line or "left" in line for line in node.said)
            assert asyncio.run(records(place)) == 0


@pytest.mark.scenario("DX-27")
def test_a_client_that_starts_before_the_first_node_waits_for_it(place: Path) -> None:
    async def early(client: Client) -> list[int]:
        clerk = client.ref(Clerk, "anna")
        with pytest.raises(Unavailable, match="no node of role 'default' is up"):
            await clerk.options(timeout_s=0.2).ask(Clerk.add)
        patient = clerk.options(timeout_s=120)
        asks = [asyncio.ensure_future(patient.ask(Clerk.add)) for _ in range(3)]
        await asyncio.wait(asks, timeout=0.2)
        assert not any(ask.done() for ask in asks)
        with running(place, "run", "clerkapp:node"):
            return await asyncio.gather(*asks)

    assert as_client(place, early) == [1, 2, 3]


@pytest.mark.scenario("DX-27")
def test_a_sync_client_waits_for_the_first_node_too(place: Path) -> None:
    store, settings = f"sqlite:///{place / 'clerk.db'}", Settings(ask_timeout_s=60)
    with connect_sync(store, settings=settings) as client, ThreadPoolExecutor(1) as pool:
        clerk = client.ref(Clerk, "anna")
        with pytest.raises(Unavailable, match="no node of role 'default' is up"):
            clerk.options(timeout_s=0.2).ask(Clerk.add)
        asking = pool.submit(clerk.options(timeout_s=120).ask, Clerk.add)
        with running(place, "run", "clerkapp:node"):
            assert asking.result(WAIT_S) == 1


def test_a_port_in_use_is_one_line(place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (place / "portapp.py").write_text(
            "from domicile import Node\n"
            f'node = Node("sqlite:///clerk.db", listen="127.0.0.1:{port}")\n'
        )
        with running(place, "run", "portapp:node", "--log-level", "warning") as node:
            assert node.ended() == 1
            # A busy machine may make it wait for its store first.
            *waited, said = node.said
            assert all("not joined yet" in line for line in waited)
            assert said.startswith("error: ")
            assert str(port) in said


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ('Node("clerk.db")', 1, "did you mean sqlite:///clerk.db?"),
        ('Node("sqlite:///clerk.db", settings=Settings(shards=0))', 1, "shards"),
        ('Node("sqlite:///clerk.db", listen="here")', 1, "listen"),
        ('Node("sqlite:////proc/no/such.db")', 3, "directory /proc/no/such.db.d can't be made"),
        ('Node("sqlite:///wrongapp.py")', 3, "wrongapp.py is not a database"),
        ('Node("sqlite:///wrongapp.py/x.db")', 3, "wrongapp.py/x.db"),
        ('"memory://"', 2, "is a str, not a Node"),
    ],
)
def test_what_a_node_can_not_be_is_one_line(place: Path, text: str, code: int, words: str) -> None:
    (place / "wrongapp.py").write_text(f"from domicile import Node, Settings\nnode = {text}\n")
    with running(place, "run", "wrongapp:node", "--log-level", "warning") as node:
        assert node.ended() == code
        assert words in node.said[-1]
        # What the module itself is to blame for has its place in it above that line.
        shown = [f'  File "{place / "wrongapp.py"}", line 2, in <module>', f"    node = {text}"]
        assert node.said[:-1] in ([], shown)
        assert bool(node.said[:-1]) == (" could not be imported: " in node.said[-1])


def test_a_module_that_fails_shows_its_own_lines_only(place: Path) -> None:
    (place / "failing.py").write_text("def broken():\n    return 1 / 0\n\n\nbroken()\n")
    with running(place, "run", "failing:node") as node:
        assert node.ended() == 1
        said = "\n".join(node.said)
        assert "failing.py" in said
        assert "return 1 / 0" in said
        assert "importlib" not in said
        assert node.said[-1] == "error: failing could not be imported: ZeroDivisionError: " + (
            "division by zero"
        )


PLAIN = """
from domicile import Entity, handler


class Lamp(Entity, name="lamp"):
    @handler
    def light(self) -> None: ...
"""

TWICE = """
from domicile import Entity, Node


class Lamp(Entity, name="lamp"): ...


class Bulb(Entity, name="lamp"): ...


node = Node("sqlite:///clerk.db", entities=[Lamp, Bulb])
"""

HINT = """
from domicile import Entity, Node, handler


class Lamp(Entity, name="lamp"):
    @handler
    async def light(self, colour: "Unknown") -> None: ...


node = Node("sqlite:///clerk.db", entities=[Lamp])
"""


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (PLAIN, "    @handler", "TypeError: @handler Lamp.light must be an `async def` method"),
        (TWICE, "    node = Node(", "are both named 'lamp'"),
        (HINT, "    node = Node(", "Unknown"),
    ],
)
def test_what_domicile_refuses_is_shown_by_the_last_line_of_the_module(
    place: Path, text: str, line: str, words: str
) -> None:
    (place / "refused.py").write_text(text)
    with running(place, "run", "refused:node") as node:
        assert node.ended() == 1
        where, what, error = node.said
        assert where.startswith(f'  File "{place / "refused.py"}", line ')
        assert what.startswith(line)
        assert error.startswith("error: refused could not be imported: ")
        assert words in error


def test_a_function_that_fails_is_not_an_import_that_fails(place: Path) -> None:
    (place / "making.py").write_text(
        "from domicile import Node\n\n\ndef make():\n    raise RuntimeError('oops')\n\n\n"
        "def wrong():\n    return Node('clerk.db')\n"
    )
    with running(place, "run", "making:make") as node:
        assert node.ended() == 1
        assert node.said[0].startswith("Traceback")
        assert "    raise RuntimeError('oops')" in node.said
        assert "apps.py" not in "".join(node.said)
        assert node.said[-1] == "error: making:make() failed: RuntimeError: oops"
    with running(place, "run", "making:wrong") as node:
        assert node.ended() == 1
        assert node.said[1] == "    return Node('clerk.db')"
        assert node.said[-1].startswith("error: making:wrong() failed: store 'clerk.db'")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("DOMICILE_TTL_S", "abc", "DOMICILE_TTL_S='abc' is not a number (float expected)"),
        ("DOMICILE_TTL_S", "0.1", "renew_s must be positive"),
        ("DOMICILE_SETTINGS", "no.toml", "DOMICILE_SETTINGS: settings file no.toml can't be read"),
    ],
)
def test_a_wrong_environment_is_wrong_usage(
    place: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    (place / "bare.py").write_text(
        "from domicile import Node, Settings\n\n\ndef make():\n    return Node('memory://x')\n\n\n"
        "def own():\n    return Node('memory://x', settings=Settings(shards=0))\n\n\n"
        "node = None\n"
    )
    monkeypatch.setenv(name, value)
    with running(place, "run", "bare:make") as node:
        assert node.ended() == 2
        assert len(node.said) == 1
        assert node.said[0].startswith(f"error: wrong environment: {words}")
    with running(place, "run", "bare:own") as node:
        assert node.ended() == 1, "what the program says wrongly is not the environment's fault"


def test_a_second_process_of_the_same_name_is_warned_of(place: Path) -> None:
    with running(place, "run", "clerkapp:node") as node:
        address = node.hear("listening").rpartition(" ")[2]
        with running(place, "run", "clerkapp:node") as twin:
            said = twin.hear("has the node id 'desk' as well")
            assert " WARN  desk  " in said
            assert address in said
        node.signal(signal.SIGKILL)
        node.ended()
    # Their records stand until their leases end, but nobody holds their locks any more (L6).
    with running(place, "run", "clerkapp:node") as again:
        again.hear("listening")
        again.signal(signal.SIGTERM)
        assert again.ended() == 0
        assert not any("as well" in line for line in again.said)


def test_a_library_that_is_missing_is_named(place: Path) -> None:
    (place / "needy.py").write_text("import no_such_library\n")
    with running(place, "run", "needy:node") as node:
        assert node.ended() == 1
        assert "No module named 'no_such_library'" in node.said[-1]


def test_a_blocked_loop_ends_the_process(place: Path) -> None:
    with running(place, "run", "clerkapp:hasty") as node:
        node.hear("listening")
        as_client(place, lambda client: block(client, 600))
        assert node.ended() == 1
        assert any(line.startswith("Timeout (") for line in node.said)
        assert any("in block" in line for line in node.said)


def test_without_the_watchdog_it_joins_anew_instead(place: Path) -> None:
    with running(place, "run", "clerkapp:hasty", "--no-watchdog") as node:
        node.hear("listening")
        as_client(place, lambda client: block(client, 3))
        node.hear("fenced, rejoining")
        node.hear("joined")
        assert as_client(place, add_twice) == [1, 2]
        node.signal(signal.SIGTERM)
        assert node.ended() == 0


def test_a_handler_that_ignores_its_cancellation_ends_the_process(place: Path) -> None:
    with running(place, "run", "clerkapp:patient") as node:
        node.hear("listening")
        as_client(place, lambda client: keep_busy(client, "ignore"))
        assert asyncio.run(remove_records(place)) == 1
        assert node.ended() == STUCK_EXIT
        assert "1 handler ignores its cancellation" in node.said[-1]


def stop_outside_of_writes(node: Running, place: Path) -> None:
    """SIGSTOP; once more if it fell into a write, whose lock would hold up everybody (S9)."""
    while True:
        node.signal(signal.SIGSTOP)
        other = apsw.Connection(str(place / "clerk.db"))
        try:
            other.set_busy_timeout(200)
            other.execute("BEGIN IMMEDIATE")
            return
        except apsw.BusyError:
            node.signal(signal.SIGCONT)
        finally:
            other.close()


def test_a_process_that_was_stopped_past_its_lease_never_goes_on_as_before(place: Path) -> None:
    with running(place, "run", "clerkapp:node") as node:
        node.hear("listening")
        stop_outside_of_writes(node, place)

        async def until_gone() -> None:
            store = Namespace(SqliteStore(place / "clerk.db", by="test"), "domicile")
            try:
                while (await store.list(NODES)).items:  # noqa: ASYNC110 - another process ends it
                    await asyncio.sleep(0.05)
            finally:
                await store.close()

        asyncio.run(asyncio.wait_for(until_gone(), WAIT_S))
        assert node.process.poll() is None
        node.signal(signal.SIGCONT)
        # The watchdog's thread and the loop wake at the same time: the first one to end its work
        # decides.
        if "Timeout (" in node.hear("Timeout (", "joined"):
            # It shows the stacks of threads that run on meanwhile, and may crash over that.
            assert node.ended() in (1, -signal.SIGSEGV)
        else:
            assert any("fenced, rejoining" in line for line in node.said)
            node.signal(signal.SIGTERM)
            assert node.ended() == 0
