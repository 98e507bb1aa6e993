"""The pure parts of the driver of PostgreSQL: timelines, files of settings, counted commits."""

from __future__ import annotations

import pytest

from domicile.failover.drivers.postgres.config_files import (
    NOBODYS_NAME,
    FollowState,
    GateState,
    command_settings,
    conninfo,
    follow_conf,
    gate_conf,
    names_in,
    own_rules,
    passfile,
    quoted,
    rule_words,
    slot_name,
    standby_names,
    unquoted_value,
)
from domicile.failover.drivers.postgres.lost_log import (
    MOST_LOST_BYTES,
    count_commits,
    segments_beyond,
)
from domicile.failover.drivers.postgres.timelines import (
    Approach,
    Stretch,
    approach,
    lineage,
    lsn_of,
    lsn_text,
    newest_timeline,
    parting,
    segment_name,
    segment_number,
)
from domicile.failover.records import WriteQuorum

MB = 1 << 20
HISTORY = (
    "1\t0/3000000\tno recovery target specified\n\n2\t0/5000000\tno recovery target specified\n"
)


def test_settings_are_found_in_a_command_and_in_a_file() -> None:
    words = ["postgres", "-D", "/d", "-c", "Fsync=off", "-ca=1", "--work-mem=2MB", "--single", "-c"]
    assert command_settings(words) == {"fsync": "off", "a": "1", "work_mem": "2MB"}
    assert command_settings([]) == {}
    text = "# synchronous_commit = off\n\nPrimary_conninfo = 'a=b'\nfsync off\nfsync=on\n #x\n"
    assert names_in(text) == ["primary_conninfo", "fsync"]


def test_places_in_the_log_are_read_and_written() -> None:
    for text in ("0/0", "16/B374D848", "FFFFFFFF/FFFFFFFF"):
        assert lsn_text(lsn_of(text)) == text
    assert lsn_of("1/0") == 1 << 32


def test_a_lineage_ends_where_the_server_ends() -> None:
    one, two, three = 0x3000000, 0x5000000, 0x7000000
    assert lineage(HISTORY, 3, three) == (
        Stretch(1, 0, one), Stretch(2, one, two), Stretch(3, two, three),
    )  # fmt: skip
    # It has received nothing of timeline 3 yet, and not all of 2.
    assert lineage(HISTORY, 3, 0x4000000) == (Stretch(1, 0, one), Stretch(2, one, 0x4000000))
    assert lineage("", 1, 5) == (Stretch(1, 0, 5),)
    assert lineage("", 1, 0) == ()


def test_what_is_saved_of_a_log_is_what_is_there() -> None:
    size = 16 * MB
    far = 700 * size
    own = (Stretch(1, 0, far + size + 5), Stretch(2, far + size + 5, far + 3 * size))
    names = [segment_name(1, number, size) for number in range(690, 702)]
    names += [segment_name(2, number, size) for number in range(701, 704)]
    names += ["archive_status", "00000002.history", f"{names[0]}.partial"]
    # From a place that is known: all of it, and of each timeline its own files.
    found, whole = segments_beyond(own, far, far + 2 * size, size, names)
    assert found == [
        segment_name(1, 700, size), segment_name(1, 701, size), segment_name(2, 701, size),
    ]  # fmt: skip
    assert whole
    # The log may be longer than what is ever saved: only what is there counts.
    assert far > MOST_LOST_BYTES
    found, whole = segments_beyond(own, 0, far + size, size, names)
    assert found == [segment_name(1, number, size) for number in range(690, 701)]
    assert not whole
    assert segments_beyond(own, far, far, size, names) == ([], True)


def test_two_logs_part_where_one_of_them_leaves_a_timeline() -> None:
    primary = (Stretch(1, 0, 300), Stretch(2, 300, 900))
    assert parting((Stretch(1, 0, 200),), primary) == 200
    assert parting((Stretch(1, 0, 300), Stretch(2, 300, 700)), primary) == 700
    assert parting((Stretch(1, 0, 450),), primary) == 300
    assert parting((Stretch(1, 0, 250), Stretch(2, 250, 700)), primary) == 250
    assert parting((Stretch(4, 0, 250),), primary) == 0


@pytest.mark.parametrize(
    ("own", "kept", "oldest", "how"),
    [
        # Nothing beyond: it streams, from the primary's timeline or the one before.
        ((Stretch(1, 0, 200),), 200, 0, Approach.STREAM),
        ((Stretch(1, 0, 300), Stretch(2, 300, 700)), 700, 0, Approach.STREAM),
        # Beyond the primary's branching off: back to it.
        ((Stretch(1, 0, 450),), 300, 0, Approach.REWIND),
        ((Stretch(1, 0, 250), Stretch(2, 250, 700)), 250, 0, Approach.REWIND),
        # The chains part before PostgreSQL sees it: two timelines 2.
        ((Stretch(1, 0, 300), Stretch(2, 300, 700)), 300, 0, Approach.COPY),
        ((Stretch(1, 0, 300), Stretch(2, 300, 500)), 300, 0, Approach.COPY),
        # The agent knows nothing of what the server has.
        ((Stretch(1, 0, 200),), 0, 0, Approach.COPY),
        # The primary has removed what it would need.
        ((Stretch(1, 0, 200),), 200, 250, Approach.COPY),
        ((), 0, 0, Approach.STREAM),
    ],
)
def test_how_a_server_comes_to_follow(
    own: tuple[Stretch, ...], kept: int, oldest: int, how: Approach
) -> None:
    primary = (Stretch(1, 0, 300), Stretch(2, 300, 900))
    assert approach(own, primary, kept=kept, oldest=oldest) is how


@pytest.mark.parametrize("size", [MB, 16 * MB, 1024 * MB])
def test_segments_have_names_and_numbers(size: int) -> None:
    for number in (0, 1, 255, 4095, 4096, 10**6):
        name = segment_name(7, number, size)
        assert len(name) == 24
        assert segment_number(name, size) == number
    assert segment_name(1, 257, 16 * MB) == "000000010000000100000001"


def test_the_timeline_is_that_of_the_newest_file_where_the_log_ends() -> None:
    size = 16 * MB
    names = [segment_name(1, 3, size), segment_name(2, 3, size), segment_name(9, 4, size),
             "00000002.history", "archive_status"]  # fmt: skip
    assert newest_timeline(names, 3 * size + 5, size) == 2
    assert newest_timeline(names, 4 * size, size) == 2
    assert newest_timeline(names, 4 * size + 1, size) == 9
    assert newest_timeline(names, 9 * size, size) == 0


def test_commits_wait_for_the_members_of_the_quorum() -> None:
    quorum = WriteQuorum("a", ("b", 'c"d'), 1)
    assert standby_names(GateState()) == ""
    assert standby_names(GateState(quorum=quorum)) == 'ANY 1 ("b", "c""d")'
    assert NOBODYS_NAME in standby_names(GateState(quorum=quorum, nobody=True))
    # Fewer members than it needs: writes wait.
    few = standby_names(GateState(quorum=WriteQuorum("a", ("b",), 2)))
    assert few == f'ANY 2 ("b", "{NOBODYS_NAME}")'


def test_what_was_written_is_what_is_read() -> None:
    for text in ("plain", "it's", "back\\slash", "''", "\\'"):
        assert unquoted_value(quoted(text)) == text


def test_a_shut_server_is_also_read_only_for_what_runs_inside() -> None:
    assert "default_transaction_read_only = on" in gate_conf(GateState())
    assert "default_transaction_read_only" not in gate_conf(GateState(epoch=1))


def test_who_follows_nobody_has_no_primary_in_its_settings() -> None:
    text = follow_conf(FollowState(), "host=elsewhere", "slot")
    assert "elsewhere" not in text
    assert "primary_conninfo = ''" in text


def test_only_the_groups_own_roles_keep_their_rules() -> None:
    rules = """
# a comment
local   all   all                       trust
host    shop  app,"agent"  10.0.0.0/8   scram-sha-256  # both
host    all   app          0.0.0.0/0    md5
host    replication  all   10.0.0.0/8   scram-sha-256
hostssl all   all          0.0.0.0 0.0.0.0  cert map=x
host    all   +admins      0.0.0.0/0    trust
host    all   /^a.*$       0.0.0.0/0    trust
include other.conf
host    all   agent,  app \\
        10.1.0.0/16   reject
"""
    assert own_rules(rules, ("agent",)).splitlines()[1:] == [
        'local all "agent" trust',
        'host shop "agent" 10.0.0.0/8 scram-sha-256',
        'host replication "agent" 10.0.0.0/8 scram-sha-256',
        'hostssl all "agent" 0.0.0.0 0.0.0.0 cert map=x',
        'host all "agent" 10.1.0.0/16 reject',
    ]
    assert own_rules("", ("agent",)).count("\n") == 1


def test_quotes_and_comments_of_rules() -> None:
    assert rule_words('host "my db" "a#b",c 1.2.3.4/32 trust # why') == [
        "host", '"my db"', '"a#b",c', "1.2.3.4/32", "trust",
    ]  # fmt: skip


def test_words_for_programs_are_quoted() -> None:
    assert conninfo(host="h", user="o'b\\x", dbname="") == "host='h' user='o\\'b\\\\x'"
    assert passfile("*", "u:1", "p\\w") == "*:*:*:u\\:1:p\\\\w\n"


def test_slots_have_plain_names() -> None:
    assert slot_name("orders-1") == "domicile_orders_2d_1"
    assert slot_name("ORDERS_1") == "domicile_orders_1"
    assert len(slot_name("x" * 100)) == 63


DUMP_15 = """\
rmgr: LogicalMessage len (rec/tot):     60/    60, tx:        735, lsn: 0/03000110, prev 0/030000D8, desc: LOGICAL MESSAGE transactional, prefix "domicile"; payload (1 bytes): 31
rmgr: Heap        len (rec/tot):     59/    59, tx:        735, lsn: 0/03000150, prev 0/03000110, desc: INSERT off 1 flags 0x00, blkref #0: rel 1663/5/16390 blk 0
rmgr: Transaction len (rec/tot):     46/    46, tx:        735, lsn: 0/03000190, prev 0/03000150, desc: COMMIT 2026-11-19 04:00:00.000000 UTC
rmgr: Heap        len (rec/tot):     59/    59, tx:        736, lsn: 0/030001C0, prev 0/03000190, desc: INSERT off 1 flags 0x00, blkref #0: rel 1663/5/16384 blk 0
rmgr: Transaction len (rec/tot):     46/    46, tx:        736, lsn: 0/03000200, prev 0/030001C0, desc: COMMIT 2026-11-19 04:00:00.000000 UTC
rmgr: Heap        len (rec/tot):     59/    59, tx:        737, lsn: 0/03000230, prev 0/03000200, desc: INSERT off 2 flags 0x00, blkref #0: rel 1663/5/16384 blk 0
rmgr: Transaction len (rec/tot):     46/    46, tx:        737, lsn: 0/03000270, prev 0/03000230, desc: ABORT 2026-11-19 04:00:00.000000 UTC
rmgr: Heap        len (rec/tot):     59/    59, tx:        738, lsn: 0/030002A0, prev 0/03000270, desc: INSERT off 9 flags 0x00, blkref #0: rel 1663/5/2619 blk 3
rmgr: Btree       len (rec/tot):     64/    64, tx:        738, lsn: 0/030002E0, prev 0/030002A0, desc: INSERT_LEAF off 4, blkref #0: rel 1663/5/2696 blk 1
rmgr: Heap        len (rec/tot):    188/   188, tx:        738, lsn: 0/03000320, prev 0/030002E0, desc: INPLACE off 1, blkref #0: rel 1663/5/1259 blk 0
rmgr: Transaction len (rec/tot):     82/    82, tx:        738, lsn: 0/030003E0, prev 0/03000320, desc: COMMIT 2026-11-19 04:00:00.000000 UTC; inval msgs: catcache 58
rmgr: Standby     len (rec/tot):     50/    50, tx:          0, lsn: 0/03000438, prev 0/030003E0, desc: RUNNING_XACTS nextXid 739 latestCompletedXid 738 oldestRunningXid 739
rmgr: Heap        len (rec/tot):     59/    59, tx:        740, lsn: 0/03000470, prev 0/03000438, desc: INSERT off 2 flags 0x00, blkref #0: rel 1663/5/16384 blk 0
"""  # noqa: E501


def test_commits_of_clients_are_counted() -> None:
    # A mark, a write, a rolled back one, statistics, one that has not committed.
    assert count_commits(DUMP_15) == 1
    assert count_commits("") == 0
