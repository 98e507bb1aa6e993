"""TCP addresses as people write them: `host:port`, `host:first-last`, `[::1]:port`.

Used by the TCP transport. Everything is pure except `primary_host`, which asks the kernel. Nothing
here may send anything.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

from domicile.errors import ConfigError
from domicile.transports.unix import PREFIX, is_unix, path_of

ANYWHERE = ("0.0.0.0", "::")
"""Hosts that one can listen at and not dial."""

_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses reserved for documentation: routed like any other, and never used."""


class Address(NamedTuple):
    """A host and an inclusive range of ports, mostly one. Port 0 is any."""

    host: str
    first: int
    last: int


def parse(text: str, meaning: str, *, ranges: bool = False) -> Address:
    """Read `host:port`, or `host:first-last` if `ranges` are allowed; raises `ConfigError`."""
    host, ports = _split(text, meaning)
    first, dash, last = ports.partition("-")
    if not _is_port(first) or (dash and not (ranges and _is_port(last))):
        wanted = "host:port or host:first-last" if ranges else "host:port"
        raise ConfigError(
            f"{meaning} {text!r} has no usable port: write {wanted}, ports up to 65535, "
            "an IPv6 host in brackets"
        )
    span = Address(host, int(first), int(last) if dash else int(first))
    if span.last < span.first or (dash and not span.first):
        raise ConfigError(f"{meaning} {text!r} is no range of ports: write first-last, from 1 up")
    return span


def parse_advertised(text: str, port: int) -> str:
    """Read `host` or `host:port`; returns the address with `port` if it names none."""
    if is_unix(text):
        return f"{PREFIX}{path_of(text, 'the advertised address')}"
    bare = text.endswith("]") if text.startswith("[") else ":" not in text
    address = parse(f"{text}:{port}" if bare else text, "the advertised address")
    if not address.first:
        raise ConfigError(f"the advertised address {text!r} has port 0, which nobody can dial")
    return written(address.host, address.first)


def written(host: str, port: int) -> str:
    """An address as `parse` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a numeric host is a loopback address, which no other machine can reach."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_numeric(host: str) -> bool:
    """Whether a host is numeric, so that it needs no look-up."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def primary_host(family: int) -> str:
    """An address of this machine that others may reach; its name if it has no network."""
    for kind in (family, socket.AF_INET):
        try:
            with socket.socket(kind, socket.SOCK_DGRAM) as probe:
                probe.connect((_ELSEWHERE[socket.AddressFamily(kind)], 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return socket.gethostname()


def _split(text: str, meaning: str) -> tuple[str, str]:
    host, colon, ports = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if bracketed else host
    if not colon or not name or any(sign in name for sign in "[]/ ") or bracketed != (":" in name):
        raise ConfigError(
            f"{meaning} {text!r} is no address: write host:port, an IPv6 host in brackets, "
            "as in 127.0.0.1:7000 or [::1]:7000"
        )
    return name, ports


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65535
