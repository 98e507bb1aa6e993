"""Settings of one server of a group: keywords, a TOML file, `DOMICILE_REPLICA_<NAME>` variables.

A variable wins over the file; `DOMICILE_REPLICA_SERVER_URL` is `url` of the table `[server]`. All
relations between timings are checked when the settings are made (L2). Nothing here connects. A
value of a wrong type or form is a `ConfigError`: it names the setting, the value and what to write.
"""

from __future__ import annotations

import difflib
import logging
import os
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, urlsplit, urlunsplit

from domicile.errors import ConfigError
from domicile.failover.database_kinds import DatabaseKind, Mode, ServerPlace, database_kind
from domicile.failover.elsewhere import PORTS, ServerPort, check_elsewhere, server_port
from domicile.failover.records import MAX_SERVERS, GroupConfig
from domicile.observe.http import split_address
from domicile.settings import Settings
from domicile.stores.namespace import check_cluster

log = logging.getLogger("domicile")

PREFIX = "DOMICILE_REPLICA_"
IN_SERVER = "SERVER_"

SERVER = ("url", "password_file", "command", "address", "data")
"""The names of the table `[server]` that all kinds have; some kinds have more."""

TIMINGS = ("ttl_s", "probe_s", "freeze_s", "restart_s", "switch_s")

EXAMPLES = {
    "store": "etcd://127.0.0.1:2379", "group": "orders", "driver": "valkey", "id": "orders-1",
    "state": ".domicile/orders-1", "cluster": "domicile", "url": "redis://127.0.0.1:6379",
    "address": "10.0.0.5:6379", "http": "127.0.0.1:9465", "data": "/var/lib/postgresql/orders-1",
    "password_file": "/etc/domicile/password",
}  # fmt: skip
"""What an error proposes to write."""

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """One server, its group, and the timings of its agent and its guard."""

    store: str
    """The URL of the store that keeps the group's state. Never the database of the group (F14)."""
    group: str
    driver: str
    """The kind of the database: `valkey`, `redis`, `postgresql`, or one of another package."""
    url: str
    """How agent and guard reach the server."""
    state: Path
    """A folder beside the server's data: its id, its chain, locks, what is saved of lost writes."""
    id: str = ""
    """The server's id, for ever: one per server. Else the name of the folder `state`."""
    mode: Mode = "async"
    cluster: str = "domicile"
    """Under which name the group lies in a store that several clusters share."""
    password_file: Path | None = None
    """Has the password of `url`, in one line."""
    command: tuple[str, ...] = ()
    """Starts the server, as a child of the guard; without it somebody else does (attach mode)."""
    address: str = ""
    """host:port where the other servers and the clients reach the server; else that of `url`."""
    data: Path | None = None
    options: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    """What only this kind of database knows, as `binaries` for PostgreSQL."""
    ttl_s: float = 3.0
    """The lease: a primary whose agent is gone is replaced after this time."""
    probe_s: float = 1.0
    """A server that does not answer its agent within this time counts as down (FO-09)."""
    freeze_s: float = 1.0
    """How long an election waits for the positions of all live servers (F7)."""
    restart_s: float = 0.0
    """How long a primary that is down may take to come back before an election begins (F4)."""
    switch_s: float = 10.0
    """How long a switchover may hold writes back (F11)."""
    sync_count: int = 1
    """In mode `sync`: how many replicas must have a write before it is acknowledged."""
    http: str = ""
    """host:port where the agent serves metrics and answers about its server; empty: nowhere."""

    def __post_init__(self) -> None:
        self._check_types()
        if not self.id:
            object.__setattr__(self, "id", self.state.absolute().name)
        for name in ("group", "id"):
            value = getattr(self, name)
            if not value or "/" in value or not value.isprintable():
                example = "orders" if name == "group" else "orders-1"
                raise ConfigError(
                    f"{name} = {value!r} is no name: write some characters and no /, as in "
                    f"{name} = '{example}'"
                )
        check_cluster(self.cluster)
        if self.mode not in ("async", "sync"):
            raise ConfigError(f"mode = {self.mode!r} is not 'async' or 'sync': write one of them")
        if not 1 <= self.sync_count < MAX_SERVERS:
            raise ConfigError(
                f"sync_count must be at least 1 and less than {MAX_SERVERS}, the most servers of a "
                f"group; it is {self.sync_count!r}"
            )
        lease = self.lease()
        if self.probe_s > self.ttl_s - lease.margin_s:
            raise ConfigError(
                f"probe_s={self.probe_s:g} must be at most ttl_s − margin_s = "
                f"{self.ttl_s - lease.margin_s:g}: a server that hangs must be noticed before the "
                "lease could end. Lower probe_s or raise ttl_s"
            )
        if self.address:
            server_port(self.address, _shown("address"))
        if self.http:
            split_address(self.http)
        check_elsewhere(self.store, self.server_ports())

    def _check_types(self) -> None:
        for name in ("state", "data", "password_file"):
            value = getattr(self, name)
            if isinstance(value, str) and value:
                object.__setattr__(self, name, Path(value))
            elif not isinstance(value, Path) and (name == "state" or value is not None):
                raise _no_text(name, value, EXAMPLES[name])
        for name in ("store", "group", "driver", "url"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise _no_text(name, value, EXAMPLES[name])
        for name in ("id", "cluster", "address", "http"):
            if not isinstance(value := getattr(self, name), str):
                raise _no_text(name, value, EXAMPLES[name])
        for name in TIMINGS:
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ConfigError(
                    f"{name} must be a number, it is {value!r}: write seconds, as in {name} = 1.5"
                )
            if not (0 <= value < float("inf")) or (not value and name != "restart_s"):
                least = "0 or more" if name == "restart_s" else "positive"
                raise ConfigError(f"{name} must be {least}, it is {value!r}: write seconds")
        count = cast("object", self.sync_count)
        if not isinstance(count, int) or isinstance(count, bool):
            raise ConfigError(
                f"sync_count must be a whole number, it is {count!r}: write it as in sync_count = 1"
            )
        words = cast("object", self.command)
        if isinstance(words, list):
            words = tuple(cast("list[object]", words))
            object.__setattr__(self, "command", words)
        if not isinstance(words, tuple) or not all(
            isinstance(word, str) for word in cast("tuple[object, ...]", words)
        ):
            raise ConfigError(
                f"server.command must be a list of texts, it is {words!r}: write it as in "
                '["valkey-server", "valkey.conf"]'
            )
        for name, value in self.options.items():
            if not isinstance(cast("object", value), str):
                raise ConfigError(f"server.{name} must be a text, it is {value!r}: quote it")

    def lease(self) -> Settings:
        """The timings of the agent's lease; `ConfigError` if they do not fit each other (L2)."""
        try:
            return Settings(ttl_s=self.ttl_s)
        except ConfigError as error:
            raise ConfigError(f"ttl_s={self.ttl_s:g} does not do: {error}") from error

    def kind(self) -> DatabaseKind:
        """The kind of the database; `ConfigError` if it is not known or has not this mode."""
        kind = database_kind(self.driver)
        if self.mode not in kind.modes:
            raise ConfigError(
                f"mode = {self.mode!r} can't be: a group of {self.driver} has "
                f"{' or '.join(map(repr, kind.modes))} only"
            )
        return kind

    def place(self) -> ServerPlace:
        """Where the server is, with its password."""
        return ServerPlace(
            url=self._with_password(), folder=self.state, command=self.command, data=self.data,
            options=self.options, answer_s=self.probe_s,
        )  # fmt: skip

    def group_config(self) -> GroupConfig:
        """What all servers of the group must agree on."""
        return GroupConfig(
            driver=self.driver, mode=self.mode, sync_count=self.sync_count,
            freeze_s=self.freeze_s, restart_s=self.restart_s, switch_s=self.switch_s,
        )  # fmt: skip

    def reached_at(self) -> str:
        """host:port of the server for others."""
        return self.address or "{}:{}".format(*_host_port(self.url))

    def server_ports(self) -> tuple[ServerPort, ...]:
        """Where the server is, as far as these settings tell: for its agent, and for others."""
        own = ServerPort(*_host_port(self.url))
        if not self.address:
            return (own,)
        return (own, server_port(self.address, _shown("address")))

    def _with_password(self) -> str:
        if self.password_file is None:
            return self.url
        try:
            password = self.password_file.read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"server.password_file {str(self.password_file)!r} can't be read: {error.strerror}"
            ) from error
        parts = urlsplit(self.url)
        user, _, host = parts.netloc.rpartition("@")
        secret = f"{user.partition(':')[0]}:{quote(password, safe='')}@{host}"
        return urlunsplit(parts._replace(netloc=secret))


def replica_settings(
    file: Path | None = None, environ: Mapping[str, str] | None = None, **given: Any
) -> ReplicaSettings:
    """Settings from keywords, else from the environment, else from a TOML file."""
    values = {} if file is None else _from_toml(file)
    values |= _from_environment(
        os.environ if environ is None else environ, values.get("driver"), values.get("options", {})
    )
    values |= given
    needed = [
        one.name
        for one in fields(ReplicaSettings)
        if one.default is MISSING and one.default_factory is MISSING
    ]
    missing = [name for name in needed if name not in values]
    if missing:
        where = "the settings" if file is None else f"settings file {file}"
        raise ConfigError(
            f"{where} must say {', '.join(map(_shown, missing))}; an example is in "
            "docs/how-to/run-a-replica-group.md"
        )
    return ReplicaSettings(**values)


def _from_toml(file: Path) -> dict[str, Any]:
    try:
        whole: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"settings file {file} can't be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"settings file {file} is not TOML: {error}") from error
    server = whole.pop("server", {})
    if not isinstance(server, dict):
        raise ConfigError(f"settings file {file}: `server` must be a table")
    inner = cast("dict[str, Any]", server)
    top = [one.name for one in fields(ReplicaSettings) if one.name not in (*SERVER, "options")]
    # A wrong driver is told when the kind is needed, with the kinds that there are.
    special = set(inner) - set(SERVER)
    more = kind_options(whole.get("driver")) if special else ()
    for names, known, table in ((whole, top, ""), (inner, [*SERVER, *more], "[server] ")):
        for name in names:
            if name not in known:
                # A table may be meant by a table only.
                meant = ["server"] if isinstance(names[name], dict) else known
                close = difflib.get_close_matches(name, meant, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                if (
                    not close
                    and not table
                    and name in (*SERVER, *kind_options(whole.get("driver")))
                ):
                    hint = ": it belongs into the table [server]"
                raise ConfigError(f"settings file {file} has an unknown name {table}{name!r}{hint}")
    values = {**whole, **{name: value for name, value in inner.items() if name in SERVER}}
    if special:
        values["options"] = {name: inner[name] for name in inner if name in special}
    return values


def kind_options(driver: object) -> tuple[str, ...]:
    """The names of the table `[server]` that only this kind of database has."""
    try:
        return database_kind(str(driver)).options
    except ConfigError:
        return ()


def _from_environment(
    source: Mapping[str, str], driver: object, options: Mapping[str, str]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    _tell_unknown(source, source.get(f"{PREFIX}DRIVER", driver))
    known = {f"{PREFIX}{IN_SERVER}{name.upper()}" for name in SERVER}
    more = [name for name in source if name.startswith(PREFIX + IN_SERVER) and name not in known]
    special = {
        name: source[variable]
        for name in (kind_options(source.get(f"{PREFIX}DRIVER", driver)) if more else ())
        if (variable := f"{PREFIX}{IN_SERVER}{name.upper()}") in more
    }
    if special:
        values["options"] = {**options, **special}
    for one in fields(ReplicaSettings):
        if one.name == "options":
            continue
        variable = PREFIX + (IN_SERVER if one.name in SERVER else "") + one.name.upper()
        if variable not in source:
            continue
        text = source[variable]
        kind = {"float": float, "int": int}.get(str(one.type))
        if one.name == "command":
            values[one.name] = tuple(shlex.split(text))
        elif kind is None:
            values[one.name] = text
        else:
            try:
                values[one.name] = kind(text)
            except ValueError as error:
                number = "a number" if kind is float else "a whole number"
                raise ConfigError(f"{variable}={text!r} is not {number}") from error
    return values


def _tell_unknown(source: Mapping[str, str], driver: object) -> None:
    """Variables that look like settings and are none: one of them may be misspelt."""
    top = [one.name for one in fields(ReplicaSettings) if one.name not in (*SERVER, "options")]
    inner = [f"{IN_SERVER}{name}" for name in (*SERVER, *kind_options(driver))]
    known = [f"{PREFIX}{name.upper()}" for name in (*top, *inner)]
    for name in sorted(source):
        if name.startswith(PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            log.warning("%s is set in the environment, and nothing reads it%s", name, hint)


def _shown(name: str) -> str:
    return f"server.{name}" if name in SERVER else name


def _no_text(name: str, value: object, example: str) -> ConfigError:
    shown = _shown(name)
    return ConfigError(
        f"{shown} must be a text, it is {value!r}: write it as in {name} = {example!r}"
    )


def _host_port(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        # The URL may have a password in it, so it is not shown.
        raise ConfigError("server.url is not a URL: write scheme://host:port") from None
    if not host:
        raise ConfigError("server.url must name a host: write scheme://host:port")
    return "127.0.0.1" if host in LOOPBACK else host, port or PORTS.get(parts.scheme, 0)
