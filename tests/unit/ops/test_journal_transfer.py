"""Exports of journals as lines, and imports of them into journals of both kinds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec
import pytest
from postgres_lab import shared_server
from typer.testing import CliRunner, Result
from xxhash import xxh3_128

from domicile.backends.registry import OpenOptions, journal_backend
from domicile.core.ids import EntityKey, ShardKey
from domicile.ops.cli import app
from domicile.ports.journal import (
    Batch,
    Claim,
    Journal,
    JournalWrite,
    StoredReply,
    Wanted,
    WriteRefused,
    Written,
)
from domicile.testing.suites.journal import A, B, remembered_ids, scanned

ALICE, BOB, CARL, DORA, EVE = (
    EntityKey("account", id) for id in ("alice", "bob", "carl", "dora", "eve ü/\n")
)
ZERO, ONE = ShardKey("default", 0), ShardKey("other", 1)
CLAIMS = (Claim(ZERO, 0, 3, A), Claim(ONE, 0, 4, A))
numbers = count()

EVENT = b'{"kind":"event","shard":0,"offset":1,"seq":1}\n'


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DOMICILE_STORE", raising=False)
    monkeypatch.chdir(tmp_path)


def domicile(*words: str, source: bytes = b"") -> Result:
    return CliRunner().invoke(app, ["journal", *words], input=source)


def opened(url: str, cluster: str) -> Journal:
    return journal_backend(url).open_journal(url, OpenOptions("test", cluster))


async def fill(journal: Journal) -> None:
    """Two shards and a bare key: all that a journal can have of entities."""
    await journal.claim(CLAIMS)
    for number, writes in enumerate(
        (
            (
                JournalWrite(
                    ZERO,
                    ALICE,
                    0,
                    (b"1", b""),
                    (("k1", None), ("k2", b"yes")),
                    snapshot=(1, b"\0s"),
                ),
                JournalWrite(ONE, BOB, 0, (b"1",), remember=True),
            ),
            (JournalWrite(ZERO, ALICE, 2, (b"3",), replies=(("k1", b"later"),), remember=True),),
            (JournalWrite(ONE, BOB, 1, delete=True),),
            (JournalWrite(ONE, BOB, 2, (b"again",)),),
            (JournalWrite(ZERO, CARL, 0, state=b"\xff" * 3_000, saves=3, remember=True),),
            (JournalWrite(ZERO, EVE, 0, inbox=(("only", b""),)),),
            tuple(
                JournalWrite(ZERO, EntityKey("many", f"{n}"), 0, (b"x" * 100,))
                for n in range(1_500)
            ),
        ),
        1,
    ):
        shards = [write.shard for write in writes]
        mine = tuple(claim for claim in CLAIMS if claim.shard in shards)
        answers = await journal.write(Batch(number, mine, writes))
        assert all(isinstance(one, Written) for one in answers)


def new_url(kind: str, directory: Path) -> str:
    if kind == "postgresql":
        return shared_server().new_database()
    return f"sqlite:///{directory / f'{next(numbers)}.journal'}"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The URL of a journal of a kind that has something of the cluster `lines`."""
    urls: dict[str, str] = {}

    def url_of(kind: str) -> str:
        if kind not in urls:
            urls[kind] = url = new_url(kind, tmp_path_factory.mktemp("filled"))

            async def filling() -> None:
                journal = opened(url, "lines")
                await fill(journal)
                await journal.close()

            asyncio.run(filling())
        return urls[kind]

    return url_of


def exported(url: str, to: Path, cluster: str = "lines") -> list[bytes]:
    done = domicile("export", str(to), "--journal", url, "--cluster", cluster)
    assert done.exit_code == 0, done.output
    return to.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("source", ["sqlite", "postgresql"])
@pytest.mark.parametrize("target", ["sqlite", "postgresql"])
def test_a_round_trip_keeps_everything(
    source: str, target: str, filled: Callable[[str], str], tmp_path: Path
) -> None:
    there, back = new_url(target, tmp_path), new_url(source, tmp_path)
    lines = exported(filled(source), tmp_path / "first.jsonl")
    done = domicile("import", "first.jsonl", "--journal", there)
    assert done.exit_code == 0, done.output
    assert "imported 1,504 entities, 1,505 events of cluster 'lines': all agree" in done.stdout
    again = exported(there, tmp_path / "second.jsonl")
    assert domicile("import", "second.jsonl", "--journal", back).exit_code == 0
    assert exported(back, tmp_path / "third.jsonl")[1:-1] == lines[1:-1]
    histories = [json.loads(one[0])["history"] for one in (lines, again)]
    assert histories[0] != histories[1]

    async def looking() -> None:
        journal = opened(there, "lines")
        assert [one.data for one in await scanned(journal, ONE)] == [None, b"again"]
        assert (await scanned(journal, ZERO))[:3] == (await scanned(opened(back, "lines"), ZERO))[
            :3
        ]
        assert await remembered_ids(journal, ZERO) == ["carl", "alice"]
        assert await remembered_ids(journal, ONE) == []
        [ann, carl, eve] = await journal.recover(
            [Wanted(ALICE), Wanted(CARL), Wanted(EVE)], 1 << 20
        )
        assert (ann.snapshot, ann.events, ann.seq) == ((1, b"\0s"), (b"", b"3"), 3)
        assert sorted(ann.keys or ()) == ["k1", "k2"]
        assert (carl.state, carl.seq, eve.keys) == (b"\xff" * 3_000, 3, ("only",))
        replies = await journal.inbox([(ALICE, "k1"), (ALICE, "k2"), (EVE, "only"), (BOB, "k")])
        assert replies == [StoredReply(b"later"), StoredReply(b"yes"), StoredReply(b""), None]
        # No owner from before can go on, and the next epoch can.
        assert await journal.claim(CLAIMS[:1]) == [3]
        refused = await journal.write(
            Batch(1_000, CLAIMS[:1], (JournalWrite(ZERO, ALICE, 3, (b"4",)),))
        )
        assert isinstance(refused[0], WriteRefused)
        claim = Claim(ZERO, 0, 4, B)
        assert await journal.claim([claim]) == [None]
        write = JournalWrite(ZERO, ALICE, 3, (b"4",), (("k3", b""),))
        assert await journal.write(Batch(1, (claim,), (write,))) == [Written(4, 1_504)]
        await journal.close()

    asyncio.run(looking())


def test_an_export_through_a_pipe(filled: Callable[[str], str], tmp_path: Path) -> None:
    out = domicile("export", "-", "--journal", filled("sqlite"), "--cluster", "lines")
    assert out.exit_code == 0, out.output
    to = new_url("sqlite", tmp_path)
    words = ("import", "-", "--journal", to, "--cluster", "green")
    done = domicile(*words, source=out.stdout_bytes)
    assert done.exit_code == 0, done.output
    assert "of cluster 'green'" in done.stdout


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_an_import_wants_an_empty_journal(
    kind: str, filled: Callable[[str], str], tmp_path: Path
) -> None:
    exported(filled("sqlite"), tmp_path / "e.jsonl")
    refused = domicile("import", "e.jsonl", "--journal", filled(kind))
    assert refused.exit_code == 2
    assert "already; import into a new" in refused.stderr


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda lines: lines[:-1], "ends after"),
        (lambda lines: [*lines[:-1], lines[-1][:-9]], "ends after"),
        (lambda lines: [*lines[:-2], lines[-1]], "were lost or changed"),
        (lambda lines: [*lines[:9], *lines[9:10], *lines[9:]], "do not fit together"),
        (lambda lines: [EVENT, *lines], "first line"),
        (lambda lines: [lines[0], EVENT], "did not come"),
        (lambda lines: [lines[0], b'{"kind":"more"}\n'], "line 2: Invalid value 'more'"),
        (lambda lines: [lines[0].replace(b'"version":1', b'"version":2')], "versions up to 1"),
        (lambda lines: [b"SQLite format 3\n"], "line 1: "),
    ],
)  # fmt: skip
def test_what_is_no_whole_export_leaves_nothing(
    kind: str,
    harm: Callable[[list[bytes]], list[bytes]],
    said: str,
    filled: Callable[[str], str],
    tmp_path: Path,
) -> None:
    lines = exported(filled("sqlite"), tmp_path / "e.jsonl")
    to = new_url(kind, tmp_path)
    Path("bad.jsonl").write_bytes(b"".join(harm(lines)))
    refused = domicile("import", "bad.jsonl", "--journal", to)
    assert refused.exit_code == 2, refused.output
    assert said in refused.stderr
    assert domicile("import", "e.jsonl", "--journal", to).exit_code == 0


def test_imported_keys_count_as_new(filled: Callable[[str], str], tmp_path: Path) -> None:
    """Days of one journal mean nothing in another: a key is kept too long rather than too short."""
    lines = exported(filled("sqlite"), tmp_path / "e.jsonl")
    rows = [json.loads(line) for line in lines[:-1]]
    for row in rows:
        if row["kind"] == "key" and row["key"] in ("k1", "k2"):
            row["day"] -= 8 if row["key"] == "k1" else 3
    text = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    end = {"kind": "end", "lines": len(rows), "digest": xxh3_128(text).hexdigest()}
    Path("old.jsonl").write_bytes(text + msgspec.json.encode(end) + b"\n")
    for kind in ("sqlite", "postgresql"):
        to = new_url(kind, tmp_path)
        assert domicile("import", "old.jsonl", "--journal", to).exit_code == 0

        async def looking(to: str = to) -> None:
            journal = opened(to, "lines")
            found = await journal.inbox([(ALICE, "k1"), (ALICE, "k2"), (EVE, "only")])
            assert found == [StoredReply(b"later"), StoredReply(b"yes"), StoredReply(b"")]
            claim = Claim(ZERO, 0, 9, B)
            await journal.claim([claim])
            again = JournalWrite(ZERO, ALICE, 3, (b"4",), (("k2", b"twice"),))
            [answer] = await journal.write(Batch(1, (claim,), (again,)))
            assert isinstance(answer, WriteRefused)
            assert answer.why == "key"
            await journal.close()

        asyncio.run(looking())


def test_wrong_usage_says_what_to_write(filled: Callable[[str], str], tmp_path: Path) -> None:
    url = filled("sqlite")
    assert domicile("export", "x.jsonl").exit_code == 2
    other = domicile("export", "x.jsonl", "--journal", url, "--cluster", "blue")
    assert (other.exit_code, "nothing of cluster 'blue'" in other.stderr) == (3, True)
    assert list(tmp_path.iterdir()) == []
    nowhere = domicile("export", "no/dir/x.jsonl", "--journal", url, "--cluster", "lines")
    assert (nowhere.exit_code, "can't be written" in nowhere.stderr) == (1, True)
    exported(url, tmp_path / "x.jsonl")
    twice = domicile("export", "x.jsonl", "--journal", url, "--cluster", "lines")
    assert (twice.exit_code, "is there already" in twice.stderr) == (2, True)
    missing = domicile("import", "y.jsonl", "--journal", "sqlite:///new.journal")
    assert (missing.exit_code, "can't be read" in missing.stderr) == (2, True)
    memory = domicile("import", "x.jsonl", "--journal", "memory://")
    assert (memory.exit_code, "can't be imported into" in memory.stderr) == (1, True)
    assert not Path("new.journal").exists()
