"""Clients for programs without an event loop: threads, Ctrl-C, forks, web frameworks, exits."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from domicile import (
    ConfigError,
    Entity,
    HandlerFailed,
    MaybeExecuted,
    Node,
    Rejection,
    Settings,
    SyncClient,
    Unavailable,
    connect_sync,
    handler,
)
from domicile.client import ConnectedClient
from domicile.errors import StoreUnavailable

QUICK = Settings(
    shards=4, ttl_s=20.0, settle_s=0.05, settle_max_s=0.1, linger_s=0.5, drain_deadline_s=1.0,
    ask_timeout_s=60.0, slow_s=60.0,
)  # fmt: skip
"""Quick where nothing has to be waited for, and silent about a busy machine."""

PATIENCE_S = 120.0


class Refused(Rejection, name="sync.refused"):
    """Says no."""


class Tally(Entity, name="sync.tally"):
    def __init__(self) -> None:
        self.seen: list[int] = []

    @handler
    async def add(self, number: int = 1) -> int:
        self.seen.append(number)
        return sum(self.seen)

    @handler(shared=True)
    async def all(self) -> list[int]:
        return self.seen

    @handler
    async def fail(self) -> None:
        raise ValueError("no")

    @handler
    async def refuse(self) -> None:
        raise Refused("not today")

    @handler(shared=True)
    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def until(condition: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def portals() -> list[threading.Thread]:
    """The threads that clients of this process have."""
    return [thread for thread in threading.enumerate() if thread.name == "domicile-sync"]


@contextmanager
def cluster(store: str) -> Generator[None]:
    """A node in a thread of its own, with a loop of its own."""
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        node = Node(store, entities=[Tally], settings=QUICK)
        async with node:
            while not await asyncio.to_thread(over.wait, 0.05):
                if node.life is not None and len(node.life.runtime.hosts) == QUICK.shards:
                    ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture
def client(store: str) -> Generator[SyncClient]:
    with cluster(store), connect_sync(store, settings=QUICK) as known:
        yield known
    assert portals() == []


@pytest.mark.scenario("DX-12")
def test_threads_share_a_client_and_each_keeps_its_order(client: SyncClient) -> None:
    def work(number: int) -> None:
        for step in range(50):
            client.ref(Tally, "t").tell(Tally.add, number * 1_000 + step)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    seen = client.ref(Tally, "t").ask(Tally.all)
    assert len(seen) == 8 * 50
    for number in range(8):
        mine = [one - number * 1_000 for one in seen if one // 1_000 == number]
        assert mine == list(range(50)), "in the order that one thread sent them (I5)"
    assert len(portals()) == 1


def test_an_ask_returns_the_value_of_the_handler(client: SyncClient) -> None:
    tally = client.ref(Tally, "t")
    assert tally.ask(Tally.add, 2) == 2
    assert tally.ask(Tally.add, number=3) == 5
    assert tally.id == "t"
    assert tally == client.ref(Tally, "t") != client.ref(Tally, "u")
    assert len({tally, client.ref(Tally, "t")}) == 1
    assert repr(tally) == "SyncRef(Tally, 't')"


@pytest.mark.parametrize(
    ("method", "kind", "text"),
    [(Tally.fail, HandlerFailed, "ValueError"), (Tally.refuse, Refused, "not today")],
)
def test_errors_come_up_in_the_callers_thread_without_the_frames_of_ours(
    client: SyncClient, method: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text) as caught:
        client.ref(Tally, "t").ask(method)
    files = [Path(frame.filename).name for frame in traceback.extract_tb(caught.tb)]
    assert files[0] == "test_sync_client.py"
    assert set(files[1:]) == {"sync.py"}
    assert caught.value.__context__ is None


def test_an_ask_that_takes_too_long_ends_in_time(client: SyncClient) -> None:
    slow = client.ref(Tally, "t").options(timeout_s=0.1)
    with pytest.raises(MaybeExecuted, match="did not answer in time"):
        slow.ask(Tally.wait, 60.0)
    with pytest.raises(ConfigError, match="must be a positive, finite number"):
        slow.options(timeout_s=0)
    with pytest.raises(ConfigError, match="needs an EventSourced"):
        slow.options(key="k")


def test_arguments_that_do_not_fit_are_told_to_the_caller(client: SyncClient) -> None:
    with pytest.raises(TypeError):
        client.ref(Tally, "t").ask(Tally.add, 1, 2, 3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="must be text"):
        client.ref(Tally, 5)  # type: ignore[arg-type]


def test_inside_an_event_loop_it_says_what_to_use(client: SyncClient) -> None:
    async def wrong() -> None:
        client.ref(Tally, "t").ask(Tally.add)

    with pytest.raises(ConfigError, match="async with connect"):
        asyncio.run(wrong())

    async def right() -> int:
        return await asyncio.to_thread(client.ref(Tally, "t").ask, Tally.add)

    assert asyncio.run(right()) == 1


def test_a_client_at_the_top_of_a_module_connects_when_it_is_used(store: str) -> None:
    client = connect_sync(store, settings=QUICK)
    assert portals() == []
    with cluster(store):
        assert client.ref(Tally, "t").ask(Tally.add) == 1
        client.close()
        assert portals() == []
        with pytest.raises(Unavailable, match="was closed"):
            client.ref(Tally, "t").ask(Tally.add)
        client.close()


def test_closing_waits_for_the_answers_of_others(store: str) -> None:
    with cluster(store), ThreadPoolExecutor(1) as pool:
        client = connect_sync(store, settings=QUICK)
        client.ref(Tally, "t").ask(Tally.add)
        waiting = pool.submit(client.ref(Tally, "t").ask, Tally.wait, 0.3)
        until(waiting.running)
        until(lambda: asks(client) == 1)
        client.close()
        assert waiting.result(PATIENCE_S) is None


def asks(client: SyncClient) -> int:
    """How many calls of a client are under way."""
    portal = client._portal
    return 0 if portal is None else len(portal._pending)


def test_a_url_that_is_none_is_found_at_once() -> None:
    with pytest.raises(ConfigError, match="sqlite:///x"):
        connect_sync("sqlit:///x")


def test_a_store_that_is_away_costs_a_call_its_time_and_no_more(tmp_path: Path) -> None:
    place = tmp_path / "no"
    place.write_text("a file where the directory should be", encoding="utf-8")
    client = connect_sync(f"sqlite:///{place / 'store.db'}", settings=QUICK)
    try:
        for _ in range(2):
            with pytest.raises((Unavailable, ConfigError, OSError)) as told:
                client.ref(Tally, "t").options(timeout_s=0.2).ask(Tally.add)
            assert str(told.value)
    finally:
        client.close()
    assert portals() == []


class Hesitant(ConnectedClient):
    """Fails to connect the first time."""

    tries = 0

    async def __aenter__(self) -> Self:
        Hesitant.tries += 1
        if Hesitant.tries == 1:
            raise StoreUnavailable("not now")
        return await super().__aenter__()


def test_a_failed_connection_is_tried_anew_by_the_next_call(store: str) -> None:
    def make() -> ConnectedClient:
        return Hesitant(store, cluster="domicile", settings=QUICK)

    with cluster(store):
        client = SyncClient(store, make, QUICK)
        tally = client.ref(Tally, "t")
        with pytest.raises(StoreUnavailable, match="not now"):
            tally.ask(Tally.add)
        assert tally.ask(Tally.add) == 1
        assert Hesitant.tries == 2
        client.close()


@pytest.mark.parametrize("ends_the_wait", [True, False])
def test_ctrl_c_ends_the_wait_and_cancels_the_ask(client: SyncClient, ends_the_wait: bool) -> None:
    client.ref(Tally, "t").ask(Tally.add)
    main = threading.main_thread()
    assert main is threading.current_thread()
    over, in_time = threading.Event(), list[bool]()

    def interrupt() -> None:
        until(lambda: asks(client) == 1)
        # One that another thread gets does not wake the main one, as if it had come too early.
        heard_by = main.ident if ends_the_wait else threading.get_ident()
        signal.pthread_kill(heard_by or 0, signal.SIGINT)
        in_time.append(over.wait(QUICK.handler_timeout_s / 3))

    thread = threading.Thread(target=interrupt)
    # Whoever runs tests in the background of a shell may have it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            client.ref(Tally, "t").options(timeout_s=60).ask(Tally.wait, 60.0)
    finally:
        signal.signal(signal.SIGINT, before)
    over.set()
    thread.join()
    assert in_time == [True]
    assert asks(client) == 0
    life = client._portal
    assert life is not None

    def given_up() -> bool:
        return not any("Ref.ask" in repr(task) for task in asyncio.all_tasks(life._loop))

    until(given_up, QUICK.handler_timeout_s / 3)
    assert client.ref(Tally, "u").ask(Tally.add) == 1, "and it can be used again"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_client_that_was_never_used_survives_a_fork(store: str) -> None:
    with cluster(store):
        script = f"""
import os, sys
from test_sync_client import QUICK, Tally
from domicile import connect_sync
client = connect_sync({store!r}, settings=QUICK)
child = os.fork()
total = client.ref(Tally, "t").ask(Tally.add)
if child:
    _, status = os.waitpid(child, 0)
    client.close()
    sys.exit(status)
sys.exit(0 if total in (1, 2) else 1)
"""
        done = run(script)
        assert done.returncode == 0, done.stderr
        with connect_sync(store, settings=QUICK) as client:
            assert client.ref(Tally, "t").ask(Tally.all) == [1, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_client_that_was_connected_says_so_in_a_fork(store: str) -> None:
    script = f"""
import os, sys
from test_sync_client import QUICK, Tally
from domicile import ConfigError, connect_sync
client = connect_sync({store!r}, settings=QUICK)
client.ref(Tally, "t").ask(Tally.add)
child = os.fork()
if child == 0:
    for other in (client, connect_sync({store!r}, settings=QUICK)):
        try:
            other.ref(Tally, "t").ask(Tally.add)
        except ConfigError as error:
            print(error, flush=True)
    client.close()
    sys.exit(0)
_, status = os.waitpid(child, 0)
print(client.ref(Tally, "t").ask(Tally.add), flush=True)
sys.exit(status)
"""
    with cluster(store):
        done = run(script)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert ["before this process was forked" in line for line in lines] == [True, True, False]
        assert lines[2] == "2", "the parent's own works on"


def test_a_program_that_ends_leaves_the_cluster_by_itself(store: str) -> None:
    script = f"""
from test_sync_client import QUICK, Tally
from domicile import connect_sync
client = connect_sync({store!r}, settings=QUICK)
print(client.ref(Tally, "t").ask(Tally.add))
"""
    with cluster(store):
        done = run(script)
        assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
        assert done.stderr == ""
        with connect_sync(store, settings=QUICK) as client:
            assert client.ref(Tally, "t").ask(Tally.add) == 2
    assert sorted(path.name for path in Path(store[10:]).parent.glob("*.d/*")) == []


def run(script: str) -> subprocess.CompletedProcess[str]:
    """A program of its own, to its end."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )


# web frameworks


@pytest.mark.scenario("DX-12")
def test_a_flask_view_asks(client: SyncClient) -> None:
    flask = pytest.importorskip("flask")
    app = flask.Flask(__name__)

    @app.post("/tally/<id>")
    def add(id: str) -> dict[str, int]:
        return {"total": client.ref(Tally, id).ask(Tally.add, 2)}

    with app.test_client() as browser:
        assert browser.post("/tally/f").json == {"total": 2}
        assert browser.post("/tally/f").json == {"total": 4}


@pytest.mark.scenario("DX-12")
def test_a_django_view_asks(client: SyncClient) -> None:
    pytest.importorskip("django")
    from django.conf import settings
    from django.http import HttpRequest, JsonResponse
    from django.test import AsyncRequestFactory, RequestFactory

    if not settings.configured:
        settings.configure(DEFAULT_CHARSET="utf-8", ALLOWED_HOSTS=["*"])

    def add(request: HttpRequest, id: str) -> JsonResponse:
        return JsonResponse({"total": client.ref(Tally, id).ask(Tally.add, 2)})

    assert add(RequestFactory().post("/tally/d"), "d").content == b'{"total": 2}'

    async def under_asgi() -> JsonResponse:
        from asgiref.sync import sync_to_async

        return await sync_to_async(add)(AsyncRequestFactory().post("/tally/d"), "d")

    assert asyncio.run(under_asgi()).content == b'{"total": 4}', "as Django runs such a view"
