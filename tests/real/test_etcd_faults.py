"""What only etcd can do to the store: members that come and go, logins, certificates, a full disk,
a restored backup, frozen servers.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from certificates_lab import Authority
from etcd_lab import EtcdMembers, etcd_lab, needed

from domicile import ConfigError
from domicile.core.state.txn import (
    Absent,
    At,
    Committed,
    Conflict,
    Delete,
    Outcome,
    Put,
    Unknown,
)
from domicile.errors import StoreError, StoreRewound, StoreUnavailable
from domicile.ports.store import Store
from domicile.stores.etcd import client as client_module
from domicile.stores.etcd import rpc_pb2 as pb
from domicile.stores.etcd.address import parse_etcd_url
from domicile.stores.etcd.leases import HASHES
from domicile.stores.etcd.store import EtcdStore
from proving.etcd_server import EtcdServer

PATIENCE_S = 120.0
SECRET = "s3cret-and-long"


@asynccontextmanager
async def opened(
    url: str, by: str = "a", cluster: str = "", op_s: float = 5.0
) -> AsyncIterator[EtcdStore]:
    store = EtcdStore(parse_etcd_url(url), by=by, cluster=cluster, op_timeout_s=op_s)
    try:
        yield store
    finally:
        await store.close()


@contextmanager
def server(*options: str, tls: bool = False) -> Iterator[EtcdServer]:
    one = needed(options=options, tls=tls)
    try:
        one.start()
        yield one
    finally:
        one.stop()


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await main()

    asyncio.run(bounded())


async def put(store: Store, key: bytes, value: bytes = b"", lease: str | None = None) -> int:
    outcome = await store.commit([], [Put(key, value, lease)])
    assert isinstance(outcome, Committed)
    return outcome.revision


async def done(call: Callable[[], Awaitable[Outcome]]) -> Committed:
    """The commit of a call that is made until the store takes it."""
    while True:
        try:
            outcome = await call()
            if isinstance(outcome, Committed):
                return outcome
        except StoreUnavailable:
            pass
        await asyncio.sleep(0.01)


def test_a_cluster_loses_its_leader_and_goes_on() -> None:
    """Acknowledged commits survive, a lease lives on, and each failure says whether it ran (I9)."""

    async def main() -> None:
        with EtcdMembers() as members:
            async with (
                opened(members.url(), op_s=3.0) as store,
                opened(members.url(), "b") as other,
            ):
                ttl_s = await store.grant("l", 30.0)
                start = await put(store, b"leased", b"", "l")
                seen: dict[bytes, int] = {}
                acknowledged: dict[bytes, int] = {}
                refused: list[bytes] = []
                ended = asyncio.Event()

                async def follow() -> None:
                    newest = start
                    while b"end" not in seen:
                        try:
                            async for changes in other.watch(b"", newest):
                                assert changes.revision > newest
                                newest = changes.revision
                                seen.update((one.key, newest) for one in changes.changes)
                                if b"end" in seen:
                                    return
                        except StoreUnavailable:
                            await asyncio.sleep(0.01)

                async def write(name: bytes) -> None:
                    number = 0
                    while not ended.is_set():
                        key = b"%s/%d" % (name, number)
                        number += 1
                        try:
                            outcome = await store.commit([Absent(key)], [Put(key, b"")])
                        except StoreUnavailable:
                            refused.append(key)
                            continue
                        if isinstance(outcome, Committed):
                            acknowledged[key] = outcome.revision
                        else:
                            assert isinstance(outcome, Unknown)

                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(follow())
                    writing = [tasks.create_task(write(name)) for name in (b"x", b"y")]
                    await until(lambda: len(acknowledged) > 50)
                    leader = members.leader()
                    leader.kill()
                    before = len(acknowledged)
                    await until(lambda: len(acknowledged) > before + 50)
                    leader.start()
                    second = members.leader()
                    second.freeze()
                    before = len(acknowledged)
                    await until(lambda: len(acknowledged) > before + 50)
                    second.thaw()
                    ended.set()
                    await asyncio.wait(writing)
                    await done(lambda: store.commit([], [Put(b"end", b"")]))
                listing = await other.list(b"")
                found = {item.key: item.revision for item in listing.items}
                for key, revision in acknowledged.items():
                    assert found[key] == revision
                    assert seen[key] == revision
                for key in refused:
                    assert key not in found, "it was said not to have run"
                assert await store.renew("l") == ttl_s
                assert b"leased" in found

    run(main)


def test_a_frozen_member_costs_a_call_and_no_more() -> None:
    async def main() -> None:
        with EtcdMembers() as members:
            # The members that are left may have to choose a leader first: a busy machine needs more
            # time than three seconds.
            assert await costs_no_more(members, 3.0) or await costs_no_more(members, 30.0)

    async def costs_no_more(members: EtcdMembers, op_s: float) -> bool:
        async with opened(members.url(), op_s=30.0) as store:
            await put(store, b"k", b"1")
        async with opened(members.url(), op_s=op_s) as store:
            try:
                await store.get(b"k")
            except StoreUnavailable:
                return False
            session = store.client.connections._session
            assert session is not None
            (asked,) = [m for m in members.members if session.endpoint.endswith(f":{m.port}")]
            asked.freeze()
            try:
                # What may be asked twice is asked elsewhere, in the time of the same call.
                item = await store.get(b"k")
                assert item is not None
                done = await store.commit([At(b"k", item.revision)], [Delete(b"k")])
            except StoreUnavailable:
                return False
            finally:
                asked.thaw()
            return isinstance(done, Committed)

    run(main)


def test_without_a_majority_nothing_is_acknowledged_and_the_text_says_why() -> None:
    async def main() -> None:
        with EtcdMembers() as members:
            async with opened(members.url(), op_s=2.0) as store:
                await store.grant("l", 30.0)
                await put(store, b"k", b"1")
                for member in members.members[:2]:
                    member.kill()
                with pytest.raises(StoreUnavailable):
                    await store.get(b"k")
                with pytest.raises(StoreUnavailable):
                    await store.renew("l")
                with suppress(StoreUnavailable):
                    assert await store.commit([], [Put(b"k", b"2")]) == Unknown()

    run(main)


def test_a_backup_that_was_restored_is_found() -> None:
    """S5: a restored member with the same name, address and token has the same cluster id."""

    async def main() -> None:
        with server() as one:
            async with opened(one.url()) as store, opened(one.url(), "late") as late:
                await put(store, b"k", b"kept")
                backup = one.home / "backup.db"
                one.ctl("snapshot", "save", str(backup))
                lost = await put(store, b"k", b"lost")
                assert (await late.list(b"")).revision == lost
                before = header(one)
                one.kill()
                one.data.rename(one.home / "old")
                subprocess.run(  # noqa: ASYNC221
                    [
                        str(one.bin / "etcdutl"), "snapshot", "restore", str(backup),
                        "--name", one.name, "--data-dir", str(one.data),
                        "--initial-cluster", one.cluster,
                        "--initial-advertise-peer-urls", f"http://127.0.0.1:{one.peer_port}",
                    ],
                    check=True, capture_output=True,
                )  # fmt: skip
                one.start()
                assert header(one)["cluster_id"] == before["cluster_id"]
                with pytest.raises(StoreRewound, match=r"is to come|had been seen"):
                    await store.get(b"k")
                while await put(store, b"k", b"instead") <= lost:
                    pass
                # Now the revision is higher than any that was seen, and the past is another one.
                with pytest.raises(StoreRewound, match="is not the commit that had been seen"):
                    await late.get(b"k")
                item = await late.get(b"k")
                assert item is not None
                assert item.value == b"instead"

    run(main)


def header(one: EtcdServer) -> dict[str, int]:
    said: dict[str, dict[str, int]] = json.loads(one.ctl("get", "none", "-w", "json"))
    return said["header"]


def test_another_cluster_behind_the_same_url_is_a_rewind() -> None:
    async def main() -> None:
        with server() as one, server() as two:
            url = f"etcd://127.0.0.1:{one.port},127.0.0.1:{two.port}"
            async with opened(url, "a") as store:
                await put(store, b"k", b"1")
                session = store.client.connections._session
                assert session is not None
                first = one if session.endpoint.endswith(f":{one.port}") else two
                first.kill()
                with pytest.raises(StoreRewound, match="several etcd clusters"):
                    await store.get(b"k")

    run(main)


def test_a_login_has_least_rights_and_its_token_is_renewed(tmp_path: Path) -> None:
    async def main() -> None:
        with server("--auth-token-ttl", "1", "--bcrypt-cost", "4") as one:
            one.ctl("user", "add", f"root:{SECRET}")
            one.ctl("user", "grant-role", "root", "root")
            one.ctl("user", "add", f"blue:{SECRET}")
            one.ctl("role", "add", "blue")
            for prefix in ("domicile/clusters/blue/", "domicile/leases/"):
                one.ctl("role", "grant-permission", "blue", "--prefix=true", "readwrite", prefix)
            one.ctl("user", "grant-role", "blue", "blue")
            one.ctl("auth", "enable")
            place = f"127.0.0.1:{one.port}"
            async with opened(f"etcd://blue:{SECRET}@{place}", cluster="blue") as store:
                await store.grant("l", 30.0)
                first = await put(store, b"blue/k", b"1", "l")
                watch = store.watch(b"blue/", first)
                assert await store.renew("l") is not None
                for _ in range(3):
                    # etcd forgets a token that is not used for a second.
                    await asyncio.sleep(2.5)
                    last = await put(store, b"blue/k", b"2", "l")
                    assert (await anext(watch)).revision == last
                await asyncio.sleep(2.5)
                assert (await anext(store.watch(b"blue/", first))).revision > first
                with pytest.raises(StoreError, match="does not let user 'blue' work"):
                    await store.commit([], [Put(b"green/k", b"")])
                await store.revoke("l")
            refused = {
                f"etcd://blue:wrong@{place}": "refuses user 'blue' or its password",
                f"etcd://{place}": "asks for a user: write user:password@",
            }
            for url, text in refused.items():
                async with opened(url, cluster="blue") as store:
                    with pytest.raises(ConfigError, match=text) as raised:
                        await store.get(b"blue/k")
                    assert SECRET not in str(raised.value)
                    assert "wrong" not in str(raised.value)
            secret = tmp_path / "password"
            secret.write_text(SECRET + "\n", encoding="utf-8")
            async with opened(
                f"etcd://blue@{place}?password_file={secret}", cluster="blue"
            ) as store:
                assert await store.get(b"blue/k") is None

    run(main)


def test_certificates_are_checked_on_both_sides(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    machine, node, stranger = ours.issue("machine"), ours.issue("node"), theirs.issue("stranger")
    name = "ours-machine"

    async def main() -> None:
        with server(
            "--cert-file", str(machine.cert), "--key-file", str(machine.key),
            "--trusted-ca-file", str(ours.cert), "--client-cert-auth", tls=True,
        ) as one:  # fmt: skip
            place = f"127.0.0.1:{one.port}"
            good = (
                f"etcd://{place}?ca={ours.cert}&cert={node.cert}&key={node.key}&server_name={name}"
            )
            async with opened(good) as store:
                await store.grant("l", 30.0)
                await put(store, b"k", b"1", "l")
                kept = store.beside().keep("l", b"k")
                assert (await asyncio.wrap_future(kept)).item is not None
            wrong = {
                f"etcd://{place}": "can't be reached.*if it speaks TLS",
                good.replace(
                    str(ours.cert), str(theirs.cert), 1
                ): "certificate that is not accepted",
                good.replace("ours-machine", "other"): "certificate that is not accepted",
                f"etcd://{place}?ca={ours.cert}&server_name={name}": "reached|certificate of",
                good.replace(str(node.cert), str(stranger.cert)).replace(
                    str(node.key), str(stranger.key)
                ): "can't be reached|certificate of this process",
                good.replace(
                    str(node.key), str(tmp_path / "none")
                ): "key= of the store .* can't be read",
            }
            for url, text in wrong.items():
                async with opened(url) as store:
                    with pytest.raises((ConfigError, StoreUnavailable), match=text):
                        await store.get(b"k")
        with server() as one:
            async with opened(f"etcd://127.0.0.1:{one.port}?ca={ours.cert}") as store:
                with pytest.raises(
                    (ConfigError, StoreUnavailable), match="does not speak TLS as its URL says"
                ):
                    await store.get(b"k")

    run(main)


def test_a_full_database_is_named_and_renewals_go_on() -> None:
    async def main() -> None:
        with server("--quota-backend-bytes", str(4 << 20)) as one:
            async with opened(one.url()) as store:
                ttl_s = await store.grant("l", 30.0)
                await filled(store)
                with pytest.raises(StoreUnavailable, match=r"NOSPACE.*etcdctl alarm disarm"):
                    await store.grant("n", 30.0)
                assert await store.renew("l") == ttl_s
                with pytest.raises(StoreUnavailable, match="NOSPACE"):
                    await store.grant("m", 30.0)
                item = await asyncio.wrap_future(store.beside().keep("l", b"0"))
                assert item.ttl_s == ttl_s
                await store.revoke("l")

    run(main)


async def filled(store: Store) -> None:
    """Many commits at once until the database is full: each that was done is told, or unknown."""
    told: dict[bytes, Outcome] = {}

    async def write(name: int) -> None:
        for n in range(100):
            key = b"%d/%d" % (name, n)
            told[key] = await store.commit([], [Put(key, bytes(100_000))])
            if Unknown() in told.values():
                return

    await asyncio.gather(*map(write, range(16)))
    for item in (await store.list(b"")).items:
        assert isinstance(told[item.key], Committed | Unknown)


def test_a_renewal_is_not_refused_by_a_leader_that_does_not_know_the_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So answers one that was stopped while another led, in the first moment after it goes on."""

    async def main() -> None:
        async with etcd_lab() as stores:
            store = stores.client("a")
            ttl_s = await store.grant("l", 30.0)
            await put(store, b"record", b"", "l")
            connections = store.client.connections
            run, answers = connections.run, [0, 0]

            async def stale(call: Any, until: float, **how: Any) -> Any:
                reply = await run(call, until, **how)
                if isinstance(reply, pb.LeaseKeepAliveResponse) and answers:
                    reply.TTL = answers.pop()
                return reply

            monkeypatch.setattr(connections, "run", stale)
            assert await store.renew("l") == ttl_s
            assert not answers
            answers = [0]
            assert (await store.client.keep("l", b"record")).ttl_s == ttl_s
            answers = [0, 0, 0]
            with pytest.raises(StoreUnavailable, match="leader"):
                await store.renew("l")
            await store.revoke("l")
            assert await store.renew("l") is None

    run(main)


def test_a_call_of_several_requests_is_of_one_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another loop may notice a rewind between two of them (S5)."""

    async def main() -> None:
        monkeypatch.setattr(client_module, "PAGE", 2)
        async with etcd_lab() as stores:
            store, holder = stores.client("a"), stores.client("b")
            for n in range(5):
                await put(store, b"k%d" % n)
            await holder.grant("l", 30.0)
            history, asked = store.history, store.client.connections.ask

            async def ask(*request: Any, **how: Any) -> Any:
                reply = await asked(*request, **how)
                with suppress(StoreRewound):
                    raise history.rewound(history.now(), "a test says so")
                return reply

            for call in (
                lambda: store.list(b""),
                lambda: store.commit([], [Put(b"new", b"", "l")]),
            ):
                monkeypatch.setattr(store.client.connections, "ask", ask)
                with pytest.raises(StoreRewound):
                    await call()
                monkeypatch.undo()
                monkeypatch.setattr(client_module, "PAGE", 2)
            assert await store.get(b"new") is None

    run(main)


def test_a_store_that_closes_while_it_connects_leaves_no_connection() -> None:
    async def main() -> None:
        async with etcd_lab() as stores:
            store = stores.client("a")
            await stores.slow(0.1)
            connections = store.client.connections
            asked = asyncio.ensure_future(store.commit([], [Put(b"late", b"")]))
            await until(connections._opening.locked)
            await store.close()
            with pytest.raises(StoreUnavailable, match="closed"):
                await asked
            assert connections._session is None
            assert await stores.client("b").get(b"late") is None

    run(main)


def test_no_revision_is_the_revision_of_an_absent_key() -> None:
    async def main() -> None:
        async with etcd_lab() as stores:
            store = stores.client("a")
            assert await store.commit([At(b"k", 0)], [Put(b"k", b"")]) == Conflict(b"k")
            revision = await put(store, b"k")
            assert await store.commit([At(b"k", 0)], [Put(b"k", b"")]) == Conflict(b"k")
            outcome = await store.commit([At(b"k", revision)], [Put(b"k", b"")])
            assert isinstance(outcome, Committed)

    run(main)


def test_a_lease_is_looked_at_on_a_member_that_lags_behind() -> None:
    """Its revision is older than what the process has seen elsewhere: that is no rewind."""

    async def main() -> None:
        async with etcd_lab() as stores:
            store = stores.client("a")
            await store.grant("l", 30.0)
            revision = await put(store, b"k")
            number = store._numbers.get("l")
            assert number is not None
            sent = store.history.now()
            ahead = pb.ResponseHeader(cluster_id=store.history._cluster_id, revision=revision + 9)
            store.history.check(ahead, sent)
            until = store.client.connections.deadline()
            assert not await store.client._is_foreign(number, until)
            assert store.history.generation == 0

    run(main)


def test_a_watch_takes_answers_that_come_in_fragments() -> None:
    async def main() -> None:
        async with etcd_lab() as stores:
            store = stores.client("a")
            start = await put(store, b"k")
            revisions = []
            for n in range(6):
                outcome = await store.commit(
                    [], [Put(b"%d/%d" % (n, m), bytes(100_000)) for m in range(9)]
                )
                assert isinstance(outcome, Committed)
                revisions.append(outcome.revision)
            watch = store.watch(b"", start)
            for revision in revisions:
                changes = await anext(watch)
                assert (changes.revision, len(changes.changes)) == (revision, 9)

    run(main)


def test_a_listing_of_several_pages_is_of_one_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PAGE", 3)

    async def main() -> None:
        async with etcd_lab() as stores:
            store, other = stores.client("a"), stores.client("b")
            await store.commit([], [Put(b"k/%02d" % n, b"") for n in range(10)])
            ended = asyncio.Event()

            async def churn() -> None:
                while not ended.is_set():
                    await other.commit([], [Delete(b"k/09"), Put(b"k/00", b"x")])
                    await other.commit([], [Put(b"k/09", b""), Put(b"k/00", b"")])

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(churn())
                for _ in range(30):
                    listing = await store.list(b"k/")
                    found = {item.key: item for item in listing.items}
                    assert (b"k/09" in found) == (found[b"k/00"].value == b"")
                    assert max(item.revision for item in listing.items) <= listing.revision
                ended.set()

    run(main)


def test_leases_whose_hashes_are_equal_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {0: 7_000_001, 1: 7_000_002, 2: 7_000_003, 3: 7_000_004}
    monkeypatch.setattr(client_module, "lease_number", lambda _, __, attempt: numbers[attempt])

    async def main() -> None:
        async with etcd_lab() as stores:
            first, second = stores.client("a"), stores.client("b")
            # Another program has a key under the first number.
            stores.server.ctl("lease", "grant", "30")
            ttl_s = await first.grant("one", 30.0)
            assert await second.grant("two", 30.0) == ttl_s
            assert await second.grant("one", 30.0) == ttl_s, "granted again: renewed"
            await put(first, b"1", b"", "one")
            await put(second, b"2", b"", "two")
            # A third process knows neither number.
            third = stores.client("c")
            assert await third.renew("two") == ttl_s
            await third.revoke("one")
            assert [item.key for item in (await first.list(b"")).items] == [b"2"]
            assert await first.renew("one") is None
            assert await second.renew("two") == ttl_s
            assert await first.commit([], [Put(b"1", b"", "one")]) == Conflict(b"1")
            await second.grant("three", 30.0)
            await second.grant("four", 30.0)
            await second.grant("five", 30.0)
            with pytest.raises(StoreUnavailable, match="belongs to another lease"):
                await second.grant("six", 30.0)
            for lease in ("two", "three", "four", "five"):
                await second.revoke(lease)

    run(main)


def test_a_number_of_another_root_hides_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {0: 7_000_011, 1: 7_000_012, 2: 7_000_013, 3: 7_000_014}
    monkeypatch.setattr(client_module, "lease_number", lambda _, __, attempt: numbers[attempt])

    async def main() -> None:
        async with etcd_lab() as elsewhere, etcd_lab() as stores:
            await elsewhere.client("a").grant("same", 30.0)
            ttl_s = await stores.client("a").grant("same", 30.0)
            # Other processes know only the name.
            await put(stores.client("b"), b"k", b"", "same")
            assert await stores.client("c").renew("same") == ttl_s
            await stores.client("d").revoke("same")
            assert (await stores.client("e").list(b"")).items == ()
            for lab in (elsewhere, stores):
                await lab.client("z").revoke("same")

    run(main)


def test_many_roots_have_a_lease_of_the_same_name() -> None:
    async def main() -> None:
        async with AsyncExitStack() as labs:
            for _ in range(HASHES + 2):
                stores = await labs.enter_async_context(etcd_lab())
                assert await stores.client("a").grant("same", 30.0)

    run(main)


def test_the_real_ttl_is_answered() -> None:
    async def main() -> None:
        # Its least ttl is one and a half election timeouts, in whole seconds.
        with server("--election-timeout", "1500", "--heartbeat-interval", "100") as one:
            async with opened(one.url()) as store:
                assert await store.grant("l", 1.0) == 3.0
                assert await store.renew("l") == 3.0
                assert await store.grant("m", 4.2) == 5.0

    run(main)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_members_that_join_and_leave_are_passed_over_and_names_of_new_ones_take_effect() -> None:
    """The servers of a URL stay the same, and one of them that is a member suffices."""

    async def main() -> None:
        with EtcdMembers() as members:
            url = members.url("coming")
            async with opened(url, op_s=10.0) as store:
                first = await committed(store, b"1")
                joined = await asyncio.to_thread(members.add)
                assert await committed(store, b"2") > first
                # Both leave of which the process may be asking one, one after the other.
                for leaves in members.members[:2]:
                    await asyncio.to_thread(members.remove, leaves, joined)
                    leaves.stop()
                    assert await committed(store, b"3") > first
                found = await store.get(b"k")
                assert found is not None
                # What only the new member's address is known to sees the same store.
                async with opened(joined.url("coming"), by="b", op_s=10.0) as other:
                    assert await other.get(b"k") == found

    asyncio.run(main())


async def committed(store: EtcdStore, value: bytes) -> int:
    """The revision of a commit; tried again while members change."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(StoreUnavailable):
                outcome = await store.commit([], [Put(b"k", value)])
                if isinstance(outcome, Committed):
                    return outcome.revision
