"""Whether a group's store lies in the database that the group fails over (F14).

A group's record must outlive its database, so the two must be different servers. Texts are compared
when settings are made; the agent then compares what the names mean on its machine, before it opens
the store. Errors name hosts and ports and never repeat a URL, which may have a password in it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from domicile.errors import ConfigError

PORTS = {"postgres": 5432, "postgresql": 5432, "redis": 6379, "rediss": 6379, "valkey": 6379}
"""The ports that URLs of databases leave out."""

SOCKET_FILES = ("redis", "rediss", "valkey")
"""Kinds whose socket files do not tell at which port the same server listens."""

HERE = "this machine"
"""The host of every address that is this machine's own."""

RESOLVED_S = 5.0
"""A name that has no answer within this time is compared as text only."""


class ServerPort(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def store_ports(url: str) -> tuple[ServerPort, ...]:
    """The servers that a URL of a store names; none for one in a file or in memory."""
    scheme, _, rest = url.partition("://")
    usual = PORTS.get(scheme, 0)
    place = rest.partition("/")[0].partition("?")[0].rpartition("@")[2]
    query = dict(parse_qsl(urlsplit(url.replace("[", "").replace("]", "")).query))
    hosts = [one for one in place.split(",") if one] or query.get("host", "").split(",")
    found: list[ServerPort] = []
    for one in hosts:
        host, port = _split(unquote(one))
        if scheme in ("postgres", "postgresql") and (not host or host.startswith("/")):
            # A socket file of PostgreSQL has the port in its name, and is on this machine.
            host = HERE
        number = port or query.get("port", "") or str(usual)
        if host and number.isdecimal() and int(number):
            found.append(_same(ServerPort(host, int(number))))
    return tuple(found)


def server_port(text: str, shown: str, usual: int = 0) -> ServerPort:
    """The parts of host:port; `ConfigError` names the setting `shown`."""
    host, port = _split(text)
    number = port or (str(usual) if usual and text == host else "")
    if not host or not (number.isascii() and number.isdecimal() and 0 < int(number) < 65_536):
        raise ConfigError(
            f"{shown} = {text!r} is not host:port: write it as in '10.0.0.5:6379', or '[::1]:6379'"
        )
    return ServerPort(host, int(number))


def check_elsewhere(store: str, servers: Iterable[ServerPort]) -> None:
    """Compare as texts; raises `ConfigError` if the store is one of these servers."""
    servers = tuple(map(_same, servers))
    _refuse_same(store_ports(store), servers)
    parts = urlsplit(store.replace("[", "").replace("]", ""))
    local = any(one.host == HERE for one in servers)
    if parts.scheme in SOCKET_FILES and not parts.hostname and parts.path and local:
        raise ConfigError(
            "store names a socket file, which does not tell whether it is the group's own server: "
            "a group's state must not lie in the database that it fails over (F14). Write "
            "redis://host:port, or name another store, as in etcd://host:2379"
        )


async def check_resolved(store: str, servers: Iterable[ServerPort]) -> None:
    """Compare what the names mean on this machine; raises `ConfigError` as `check_elsewhere`."""
    stores = await _meant(store_ports(store))
    _refuse_same(stores, await _meant(servers))


def _refuse_same(stores: Iterable[ServerPort], servers: Iterable[ServerPort]) -> None:
    of_group = dict.fromkeys(servers)
    for one in stores:
        if one in of_group:
            raise ConfigError(
                f"store is the server itself, at {one}: a group's state must not lie in the "
                "database that it fails over (F14). Name another store, as in etcd://host:2379"
            )


def _split(place: str) -> tuple[str, str]:
    if place.startswith("["):
        host, _, rest = place[1:].partition("]")
        return host, rest.removeprefix(":")
    if place.count(":") > 1:
        return place, ""
    host, _, port = place.partition(":")
    return host, port


def _same(one: ServerPort) -> ServerPort:
    """One text for each of the many by which a machine calls itself."""
    host = one.host.lower().rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return one._replace(host=HERE)
    try:
        known = ip_address(host.partition("%")[0])
    except ValueError:
        return one._replace(host=HERE if host == HERE else host)
    return one._replace(host=_named(known))


def _named(address: IPv4Address | IPv6Address) -> str:
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return HERE if address.is_loopback or address.is_unspecified else str(address)


async def _meant(places: Iterable[ServerPort]) -> tuple[ServerPort, ...]:
    found: list[ServerPort] = []
    for one in map(_same, places):
        found.append(one)
        if one.host == HERE:
            continue
        try:
            async with asyncio.timeout(RESOLVED_S):
                known = await asyncio.get_running_loop().getaddrinfo(
                    one.host, one.port, type=socket.SOCK_STREAM
                )
        except (OSError, TimeoutError, UnicodeError):
            continue
        for family, _, _, _, at in known:
            host = _named(ip_address(str(at[0]).partition("%")[0]))
            if host != HERE and _is_own(family, str(at[0])):
                host = HERE
            found.append(ServerPort(host, one.port))
    return tuple(dict.fromkeys(found))


def _is_own(family: int, host: str) -> bool:
    """Whether an address is this machine's: only then a socket can be bound to it."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as one:
            one.bind((host, 0))
    except OSError:
        return False
    return True
