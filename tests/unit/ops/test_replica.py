"""Commands on replica groups: what they show, ask, commit and log, on a store's file."""

from __future__ import annotations

import asyncio
import io
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_lab import contents
from groups_lab import CHAIN, electing, primary, records, server, serving, values, write
from msgspec import structs
from rich.console import Console
from typer.testing import CliRunner, Result

from domicile.core.state.keys import AUDIT, MOVED_KEY
from domicile.core.state.records import MoveRecord, encode_record
from domicile.core.state.txn import At, Committed, Put
from domicile.failover.records import (
    GroupConfig,
    GroupPhase,
    GroupState,
    LossReceipt,
    LossSum,
    PastPrimary,
    ServerRecord,
    WriteQuorum,
    config_key,
    decode_group_record,
    encode_group_record,
    loss_sum_key,
    receipt_key,
    state_key,
)
from domicile.failover.view import GroupView, group_view
from domicile.ops.cli import app
from domicile.ops.group_commits import (
    GroupHistory,
    PastEpoch,
    not_level,
    switch_commit,
    switch_target,
)
from domicile.ops.show_groups import groups_view, history_view
from domicile.stores.namespace import Namespace
from domicile.stores.sqlite.store import SqliteStore

WHOLE = values(serving(), primary(), server("s2", 1_900), server("s3", 1_950))
LEVEL = values(serving(), primary(), server("s2"), server("s3", 1_950))
COPYING = server("s2", 900, chain=CHAIN[:2])
STUCK = values(
    electing(quorums=(WriteQuorum("s1", ("s2", "s3"), 1),)),
    server("s2", role="fenced", final=4),
    config=GroupConfig("valkey", mode="sync"),
)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DOMICILE_STORE", raising=False)
    monkeypatch.chdir(tmp_path)


def replica(*arguments: str) -> Result:
    return CliRunner().invoke(app, ("replica", *arguments))


def stored_state(path: Path) -> GroupState:
    return decode_group_record(contents(path)[state_key("orders")], GroupState)


def stored_config(path: Path) -> GroupConfig:
    return decode_group_record(contents(path)[config_key("orders")], GroupConfig)


def audits(path: Path) -> list[dict[str, str]]:
    found = [item for item in sorted(contents(path).items()) if item[0].startswith(AUDIT)]
    return [json.loads(value) for _, value in found]


def _switching(state: GroupState) -> bool:
    return state.phase is GroupPhase.SWITCHING


def _electing(state: GroupState) -> bool:
    return state.phase is GroupPhase.ELECTING


class Stand:
    """Stands for a group's agents: answers the first change of the state that is awaited."""

    def __init__(
        self, path: Path, awaited: Callable[[GroupState], bool], answer: GroupState
    ) -> None:
        self._path, self._awaited, self._answer = path, awaited, answer
        self._done = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        store = Namespace(SqliteStore(self._path, by="agents"), "domicile")
        key = state_key("orders")
        try:
            while not self._done.is_set():
                item = await store.get(key)
                assert item is not None
                if self._awaited(decode_group_record(item.value, GroupState)):
                    wanted = [Put(key, encode_group_record(self._answer))]
                    assert isinstance(
                        await store.commit([At(key, item.revision)], wanted), Committed
                    )
                    return
                await asyncio.sleep(0.01)
        finally:
            await store.close()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()


@pytest.mark.scenario("FO-17")
def test_status_shows_a_group_in_one_table(tmp_path: Path) -> None:
    url = write(tmp_path / "s.db", WHOLE)
    result = replica("status", "orders", url)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert "orders  valkey, async, serving epoch 3: s1 at 127.0.0.1:7001" in result.stdout
    assert [
        "s1",
        "primary",
        "accepts",
        "writes",
        "3:2,000",
        "≤",
        "3",
        "s",
        "127.0.0.1:7001",
    ] in lines
    assert [
        "s2",
        "replica",
        "follows",
        "s1",
        "3:1,900",
        "100",
        "100",
        "≤",
        "3",
        "s",
        "127.0.0.1:7002",
    ] in lines
    assert "failing over now would choose s3 and lose 50 bytes" in result.stdout
    assert replica("status", url).stdout == result.stdout


def test_a_group_that_has_left_a_store_says_where_it_is(tmp_path: Path) -> None:
    """Else it looks like a group whose agents are all gone."""
    mark = {MOVED_KEY: encode_record(MoveRecord("to", "etcd://a:2379", "x"))}
    url = write(tmp_path / "s.db", {**values(serving()), **mark})
    result = replica("status", "orders", url)
    assert result.exit_code == 3
    assert "moved   to etcd://a:2379: processes refuse this store" in result.stdout
    assert "domicile replica run" not in result.stdout
    (shown,) = json.loads(replica("status", "orders", url, "--json").stdout)
    assert shown["moved"] == "to etcd://a:2379: processes refuse this store"


def test_a_server_that_is_down_has_no_position(tmp_path: Path) -> None:
    url = write(
        tmp_path / "s.db", values(serving(), primary(), server("s2", 0, role="down", fit=False))
    )
    lines = [line.split() for line in replica("status", url).stdout.splitlines()]
    assert ["s2", "down", "≤", "3", "s", "127.0.0.1:7002"] in lines


def test_status_says_since_when_and_what_came_of_a_later_change(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    past = PastPrimary(epoch=3, server="s1", at="2026-01-02T03:04:05+00:00", why="the group begins")
    found = values(serving(), primary(), server("s2"), past=[past])
    url = write(path, found)
    lines = replica("status", "orders", url).stdout.splitlines()
    assert "since   2026-01-02 03:04:05 UTC: the group begins" in map(str.strip, lines)
    assert not [line for line in lines if line.startswith("last")]
    given_up = structs.replace(serving(), why="the switchover took too long")
    write(path, values(given_up))
    lines = replica("status", "orders", url).stdout.splitlines()
    assert "since   2026-01-02 03:04:05 UTC: the group begins" in map(str.strip, lines)
    assert "last    the switchover took too long" in map(str.strip, lines)
    (shown,) = json.loads(replica("status", "orders", url, "--json").stdout)
    assert (shown["since"], shown["began_by"]) == (past.at, past.why)


@pytest.mark.parametrize(("columns", "offsets"), [(60, False), (80, True), (120, True)])
def test_a_narrow_history_keeps_its_words_whole(columns: int, offsets: bool) -> None:
    past = [
        PastPrimary(
            epoch=epoch, server=f"orders-{epoch}", at="2026-01-02T03:04:05+00:00",
            why="an operator asked for orders-1",
        )
        for epoch in (1, 2, 3)
    ]  # fmt: skip
    history = GroupHistory(
        "orders",
        tuple(PastEpoch(one.epoch, one.server, one.at, one.why, 1_003_659_216) for one in past),
        (),
    )
    console = Console(file=io.StringIO(), width=columns, highlight=False)
    with console.capture() as captured:
        console.print(history_view(history))
    lines = [line.rstrip() for line in captured.get().splitlines()]
    assert max(map(len, lines)) <= columns
    words = " ".join(" ".join(lines).split())
    assert "2026-01-02 03:04:05" in words
    for word in ("an", "operator", "asked", "for", "orders-1"):
        assert words.split().count(word) >= 3
    assert ("1,003,659,216" in words) == offsets


def test_status_as_json_is_for_tools(tmp_path: Path) -> None:
    url = write(tmp_path / "s.db", {**WHOLE, **values(serving("s2"), group="bills")})
    result = replica("status", url, "--json")
    assert result.exit_code == 3
    bills, orders = json.loads(result.stdout)
    assert (bills["group"], bills["served"], bills["primary"]) == ("bills", False, None)
    assert (orders["group"], orders["loss_bytes"]) == ("orders", 50)
    assert [one["would_lose"] for one in orders["servers"]] == [None, 100, 50]


def test_a_group_that_waits_shows_the_next_step_and_exits_with_3(tmp_path: Path) -> None:
    result = replica("status", write(tmp_path / "s.db", STUCK))
    assert result.exit_code == 3
    assert "electing epoch 4: no primary accepts writes" in result.stdout
    assert "domicile replica failover orders --force" in result.stdout
    assert "s3: its agent is not registered" in result.stdout


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_row_is_broken_on_a_narrow_terminal(columns: int) -> None:
    console = Console(file=io.StringIO(), width=columns, highlight=False)
    with console.capture() as captured:
        console.print(groups_view([group_view(records(WHOLE)), group_view(records(STUCK))]))
    lines = [line.rstrip() for line in captured.get().splitlines()]
    assert max(map(len, lines)) <= columns
    # Each server in one line, and the group that waits in its own.
    assert len([line for line in lines if re.match(r" s\d ", line)]) == 6
    assert any("follows s1" in line for line in lines)
    assert any("127.0.0.1:7002" in line for line in lines[:8]) == (columns == 120)


@pytest.mark.scenario("FO-17")
def test_scripts_get_the_primary_and_an_exit_code(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = write(path, WHOLE)
    result = replica("primary", "orders", url)
    assert (result.exit_code, result.stdout) == (0, "127.0.0.1:7001\n")
    found = json.loads(replica("primary", "orders", url, "--json").stdout)
    assert (found["server"], found["epoch"]) == ("s1", 3)
    assert found["known_until"].endswith("Z")
    unknown = replica("primary", "bills", url)
    assert (unknown.exit_code, unknown.stdout) == (1, "")
    assert "groups there: orders" in unknown.stderr
    missing = replica("primary", "orders", f"sqlite:///{tmp_path}/none.db")
    assert (missing.exit_code, missing.stdout) == (3, "")
    assert replica("primary", "orders").exit_code == 2


def test_a_group_without_a_primary_has_no_answer_for_scripts(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = write(path, STUCK)
    result = replica("primary", "orders", url)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "electing 4" in result.stderr
    with Stand(path, _electing, serving("s2", 4)):
        assert replica("primary", "orders", url, "--wait", "30").stdout == "127.0.0.1:7002\n"


def test_a_switchover_is_asked_for_and_awaited(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = write(path, LEVEL)
    with Stand(path, _switching, serving("s2", 4)):
        result = replica("switchover", "orders", url, "--to", "s2", "--why", "new disks")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("s2 is the primary of orders, epoch 4, after ")
    (record,) = audits(path)
    assert record["command"] == "replica switchover"
    assert record["what"] == "orders from s1 to s2, epoch 3"
    assert record["why"] == "new disks"


def test_a_switchover_keeps_to_its_target_though_another_one_is_ahead_by_then() -> None:
    """Under load replicas that are level overtake each other between two looks."""
    before = records(values(serving(), primary(), server("s2", 1_900), server("s3", 1_950)))
    later = records(values(serving(), primary(), server("s2", 2_000), server("s3", 1_950)))
    target = switch_target(before, None)
    assert target == "s3"
    assert switch_target(later, None) == "s2"
    assert switch_commit(later, target).what == switch_commit(before, target).what


def test_a_switchover_that_reverts_is_told(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = write(path, WHOLE)
    reverted = structs.replace(serving(), why="the switchover took too long")
    with Stand(path, _switching, reverted):
        result = replica("switchover", "orders", url, "--anyway")
    assert result.exit_code == 1
    # Without --to it is the most advanced one.
    told = "s3 did not become primary, s1 serves on: the switchover took too long"
    assert f"{told}, s3 lacks 50 bytes" in result.stderr


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (server("s2", 1_900), "s2 lacks 100 bytes that s1 has, after 0 s; nothing was done"),
        (COPYING, "s2: catches up with s1, after 0 s; nothing was done"),
        (server("s2", role="fenced"), "s2: follows nobody, after 0 s; nothing was done"),
    ],
)
def test_no_write_is_held_back_for_a_server_that_is_behind(
    tmp_path: Path, one: ServerRecord, says: str
) -> None:
    path = tmp_path / "s.db"
    url = write(path, values(serving(), primary(), one))
    before = contents(path)
    result = replica("switchover", "orders", url, "--to", "s2", "--wait", "0")
    assert result.exit_code == 1
    assert says in result.stderr
    assert "or say --anyway: then writes wait for it, 10 s at most" in result.stderr
    assert contents(path) == before
    with Stand(path, _switching, serving("s2", 4)):
        assert replica("switchover", "orders", url, "--to", "s2", "--anyway").exit_code == 0


def test_a_switchover_begins_once_its_server_is_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.db"
    url = write(path, values(serving(), primary(), COPYING))
    monkeypatch.setattr("domicile.ops.replica.PROGRESS_S", 0.0)
    looked: list[str] = []

    def seen(view: GroupView, to: str, behind_s: float | None) -> str:
        assert view.phase == "serving"
        why = not_level(view, to, behind_s)
        looked.append(why)
        if len(looked) == 2:
            # Its agent tells that the copy is whole.
            level = values(None, server("s2"), config=None)
            told = threading.Thread(target=write, args=(path, level))
            told.start()
            told.join()
        return why

    monkeypatch.setattr("domicile.ops.group_commits.not_level", seen)
    with Stand(path, _switching, serving("s2", 4)):
        result = replica("switchover", "orders", url, "--to", "s2")
    assert result.exit_code == 0, result.output
    assert looked == ["s2: catches up with s1", "s2: catches up with s1", ""]
    assert result.stderr.startswith("waiting: s2: catches up with s1\nlogged as ")


@pytest.mark.parametrize(
    ("found", "to", "says"),
    [
        (WHOLE, "s1", "s1 is the primary already"),
        (WHOLE, "s9", "'s9' is not a live replica; choose one of s2, s3"),
        (
            values(serving(), primary(), server("s2", fit=False, why="being replaced")),
            "s2",
            "may not become primary: being replaced",
        ),
        (STUCK, "s2", "begins from serving, and the group is electing"),
        (
            values(serving(), primary(), server("s2"), config=GroupConfig("valkey", paused=True)),
            "s2",
            "domicile replica resume orders",
        ),
        (values(None, server("s2")), "s2", "has no state yet"),
    ],
)
def test_a_switchover_that_cannot_be_says_why_and_changes_nothing(
    tmp_path: Path, found: dict[bytes, bytes], to: str, says: str
) -> None:
    path = tmp_path / "s.db"
    url = write(path, found)
    before = contents(path)
    result = replica("switchover", "orders", url, "--to", to)
    assert result.exit_code == 1
    assert says in result.stderr
    assert contents(path) == before


def test_a_forced_failover_states_the_loss_and_asks(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = write(path, STUCK)
    looked = replica("failover", "orders", url)
    assert looked.exit_code == 1
    assert "s2 becomes primary, at 3:2000" in looked.stderr
    assert "LOST is everything after byte 2,000 of epoch 3" in looked.stderr
    assert "this breaks its promise" in looked.stderr
    unanswered = replica("failover", "orders", url, "--force")
    assert unanswered.exit_code == 2
    assert not stored_state(path).force
    with Stand(path, lambda state: state.force, serving("s2", 4)):
        result = replica("failover", "orders", url, "--force", "--yes", "--why", "fire")
    assert result.exit_code == 0, result.output
    assert result.stdout == "s2 is the primary of orders, epoch 4\n"
    assert "LOST is" in result.stderr
    (record,) = audits(path)
    assert record["command"] == "replica failover --force"
    assert record["what"] == "orders, epoch 4: s2 at 3:2000"


def test_what_an_epoch_lost_whole_is_stated(tmp_path: Path) -> None:
    behind = server("s2", 900, chain=CHAIN[:2], role="fenced", final=4)
    url = write(tmp_path / "s.db", values(electing(), behind))
    result = replica("failover", "orders", url)
    assert "LOST is all of epoch 3, which began at byte 1,000" in result.stderr


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (WHOLE, "domicile replica switchover orders --to SERVER"),
        (values(serving(), server("s2")), "the agent of s1 is gone; an election begins"),
        (
            values(electing(), server("s2", role="fenced", final=4)),
            "the election needs no force: s2 is being chosen",
        ),
        (
            values(electing(), server("s2", role="fenced", final=4, fit=False, why="broken")),
            "force would not help",
        ),
    ],
)
def test_force_is_for_elections_that_wait_for_a_person(
    tmp_path: Path, found: dict[bytes, bytes], says: str
) -> None:
    path = tmp_path / "s.db"
    url = write(path, found)
    before = contents(path)
    result = replica("failover", "orders", url, "--force", "--yes")
    assert result.exit_code == 1
    assert says in result.stderr
    assert contents(path) == before


def test_a_group_is_paused_and_resumed(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = write(path, WHOLE)
    result = replica("pause", "orders", url, "--why", "new disks")
    assert result.exit_code == 0, result.output
    assert "until `domicile replica resume orders`" in result.stdout
    assert stored_config(path) == GroupConfig("valkey", paused=True)
    assert "PAUSED" in replica("status", url).stdout
    again = replica("pause", "orders", url)
    assert (again.exit_code, "paused already" in again.stderr) == (1, True)
    assert replica("resume", "orders", url).exit_code == 0
    assert stored_config(path) == GroupConfig("valkey")
    assert [one["command"] for one in audits(path)] == ["replica pause", "replica resume"]


SYNCED = GroupConfig("postgresql", mode="sync")


def test_what_all_servers_share_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    found = values(serving(), primary(), server("s2"), server("s3"), config=SYNCED)
    url = write(path, found)
    words = ("configure", "orders", url, "freeze_s=2", "restart_s=0", "sync_count=2")
    result = replica(*words, "--why", "slow disks")
    assert result.exit_code == 0, result.output
    assert result.stdout == "orders freeze_s=2 (was 1), sync_count=2 (was 1)\n"
    assert stored_config(path) == structs.replace(SYNCED, freeze_s=2.0, sync_count=2)
    (audit,) = audits(path)
    assert audit["command"] == "replica configure"
    assert "replica configure: orders freeze_s=2" in replica("history", "orders", url).stdout


@pytest.mark.parametrize(
    ("config", "words", "code", "says"),
    [
        (SYNCED, ["sync_count=3"], 1, "needs 3 servers beside the primary, and 2 are registered"),
        (SYNCED, ["freeze_s=1"], 1, "has these values already"),
        (GroupConfig("valkey"), ["sync_count=2"], 1, "is asynchronous"),
        (SYNCED, ["mode=async"], 2, "write NAME=VALUE, once for each of freeze_s"),
        (SYNCED, ["freeze_s"], 2, "write NAME=VALUE"),
        (SYNCED, ["freeze_s=1", "freeze_s=2"], 2, "once for each"),
        (SYNCED, ["freeze_s=0"], 2, "freeze_s must be positive"),
        (SYNCED, ["freeze_s=nan"], 2, "freeze_s must be positive"),
        (SYNCED, ["switch_s=soon"], 2, "switch_s must be a number of seconds"),
        (SYNCED, ["sync_count=1.5"], 2, "sync_count must be a whole number"),
        (SYNCED, ["sync_count=0"], 2, "sync_count must be at least 1"),
        (None, ["freeze_s=2"], 1, "has no configuration yet"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(
    tmp_path: Path, config: GroupConfig | None, words: list[str], code: int, says: str
) -> None:
    path = tmp_path / "s.db"
    url = write(path, values(serving(), primary(), server("s2"), server("s3"), config=config))
    before = contents(path)
    result = replica("configure", "orders", url, *words)
    assert (result.exit_code, says in " ".join(result.stderr.split())) == (code, True), (
        result.stderr
    )
    assert contents(path) == before


def test_fewer_servers_than_synchronous_replicas_are_told(tmp_path: Path) -> None:
    config = structs.replace(SYNCED, sync_count=2)
    url = write(tmp_path / "s.db", values(serving(), primary(), server("s2"), config=config))
    shown = " ".join(replica("status", "orders", url).stdout.split())
    told = "commits wait: sync_count is 2, and 1 servers are there beside the primary"
    assert told in shown
    assert "domicile replica configure orders sync_count=1" in shown


def test_history_tells_of_receipts_that_were_added_up(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    whole = LossSum(receipts=12, size=5_000, writes=40, uncounted=2, until=9)
    found = values(serving(), primary())
    url = write(path, {**found, loss_sum_key("orders"): encode_group_record(whole)})
    shown = " ".join(replica("history", "orders", url).stdout.split())
    assert "lost before, up to epoch 9: 12 receipts, 5,000 bytes, 40 writes, and 2 that" in shown
    told = json.loads(replica("history", "orders", url, "--json").stdout)
    assert told["lost_before"]["receipts"] == 12


RECEIPT = LossReceipt(
    server="s4", epoch=3, chain=CHAIN[:2], kept=1_000, had=1_250, writes=7, saved="/saved/1"
)


def test_history_tells_epochs_losses_and_commands(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    past = PastPrimary(
        epoch=1, server="s4", at="2026-01-01T00:00:00+00:00", why="the group begins", by="s4"
    )
    found = values(serving(), primary(), server("s2"), receipts=[RECEIPT], past=[past])
    url = write(path, found)
    assert replica("pause", "orders", url).exit_code == 0
    assert replica("resume", "orders", url).exit_code == 0
    shown = replica("history", "orders", url).stdout
    assert "lost s4: 250 bytes (7 writes), saved at /saved/1" in shown
    assert "replica pause: orders" in shown
    told = json.loads(replica("history", "orders", url, "--json").stdout)
    assert [(one["epoch"], one["server"], one["begin"]) for one in told["epochs"]] == [
        (1, "s4", 0), (3, "s1", 1_000),
    ]  # fmt: skip
    assert len(told["commands"]) == 2


def test_a_server_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    other = structs.replace(RECEIPT, server="s5")
    url = write(path, values(serving(), primary(), server("s2"), receipts=[RECEIPT, other]))
    asked = replica("remove", "orders", "s4", url)
    assert asked.exit_code == 2
    assert "s4: 250 bytes (7 writes), saved at /saved/1" in asked.stderr
    assert replica("remove", "orders", "s4", url, "--yes").stdout == "s4 is forgotten in orders\n"
    kept = [key for key in contents(path) if b"receipt" in key]
    assert kept == [receipt_key("orders", 3, "s5")]
    assert audits(path)[0]["what"] == "orders/s4: 1 receipts"


def test_a_server_with_more_receipts_than_a_commit_takes_is_forgotten_whole(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    many = [structs.replace(RECEIPT, epoch=epoch) for epoch in range(1, 51)]
    url = write(path, values(serving(), primary(), server("s2"), receipts=many))
    assert replica("remove", "orders", "s4", url, "--yes").stdout == "s4 is forgotten in orders\n"
    assert not [key for key in contents(path) if b"receipt" in key]
    assert [one["what"] for one in audits(path)] == [
        "orders/s4: 32 of 50 receipts", "orders/s4: 18 receipts",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("found", "name", "says"),
    [
        (WHOLE, "s2", "s2 has an agent that is registered"),
        (STUCK, "s3", "is in a write quorum that may hold acknowledged writes"),
        (values(electing(), server("s2")), "s1", "s1 is the last primary of group 'orders'"),
        (WHOLE, "s9", "Nothing needs to be removed"),
    ],
)
def test_a_server_that_is_needed_is_not_removed(
    tmp_path: Path, found: dict[bytes, bytes], name: str, says: str
) -> None:
    path = tmp_path / "s.db"
    url = write(path, found)
    before = contents(path)
    result = replica("remove", "orders", name, url, "--yes")
    assert result.exit_code == 1
    assert says in result.stderr
    assert contents(path) == before
