"""What a URL of the etcd store says: `etcd://user:password@a:2379,b:2379/root?ca=/path/ca.pem`.

Pure parsing. Files are named here and read by `connection`. No text may show a password.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote

from domicile.errors import ConfigError

SCHEME = "etcd"
PORT = 2379
ROOT = "domicile"
"""What the keys begin with, unless the URL says something else."""

OPTIONS = ("ca", "cert", "key", "server_name", "tls", "password_file", "log")

_FORM = "write etcd://host:2379 or etcd://user@a:2379,b:2379,c:2379/root?ca=/path/to/ca.pem"


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """Where an etcd cluster is, and how to speak to it."""

    endpoints: tuple[str, ...]
    """Each `host:port`, an IPv6 address in brackets."""
    shown: str
    """The URL for people to read, without the user, the password and the options."""
    root: str = ROOT
    """The first part of each key; several roots may share an etcd cluster."""
    user: str = ""
    password: str = field(default="", repr=False)
    password_file: str = ""
    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""
    """The name that the server's certificate has, if the URL names the server differently."""

    logged: bool = False
    """Whether each commit also says who made it and when, for checkers."""

    @property
    def data(self) -> bytes:
        """What the keys of all clusters begin with."""
        return f"{self.root}/clusters/".encode()

    @property
    def leases(self) -> bytes:
        """What the keys begin with that give a lease of ours its number in etcd."""
        return f"{self.root}/leases/".encode()

    @property
    def log(self) -> bytes:
        """The key under which each commit says who made it, if that is wanted."""
        return f"{self.root}/log".encode()


def parse_etcd_url(url: str) -> EtcdAddress:
    """The parts of a URL; `ConfigError` with the correct form if it is not complete."""
    rest = url.removeprefix(f"{SCHEME}://")
    rest, _, query = rest.partition("?")
    place, _, root = rest.partition("/")
    login, at, hosts = place.rpartition("@")
    endpoints = tuple(_endpoint(one) for one in hosts.split(",") if one.strip())
    root = unquote(root.strip("/")) or ROOT
    shown = f"{SCHEME}://{','.join(endpoints)}" + (f"/{root}" if root != ROOT else "")
    if not endpoints:
        raise ConfigError(f"{SCHEME}:// names no server: {_FORM}")
    if not root.isprintable():
        raise ConfigError(f"the store {shown} has a root that is not printable: {_FORM}")
    user, colon, password = login.partition(":")
    if at and not user:
        raise ConfigError(f"the store {shown} has an @ without a user before it: {_FORM}")
    options = _options(shown, query)
    if colon and "password_file" in options:
        raise ConfigError(
            f"the store {shown} has a password and a password_file; give it one of them"
        )
    if user and not colon and "password_file" not in options:
        raise ConfigError(
            f"the store {shown} has a user and no password: write user:password@ or "
            "?password_file=/path/to/file"
        )
    if "password_file" in options and not user:
        raise ConfigError(f"the store {shown} has a password_file and no user: write user@host")
    if bool(options.get("cert")) != bool(options.get("key")):
        raise ConfigError(
            f"the store {shown} needs cert= and key= together: the certificate of this process "
            "and its private key"
        )
    tls, logged = options.pop("tls", ""), options.pop("log", "")
    for name, value in (("tls", tls), ("log", logged)):
        if value not in ("", "true", "false"):
            raise ConfigError(
                f"the store {shown} has {name}={value!r}: write {name}=true or {name}=false"
            )
    secure = [name for name in ("ca", "cert", "server_name") if options.get(name)]
    if tls == "false" and secure:
        raise ConfigError(f"the store {shown} has tls=false and {secure[0]}=; drop one of them")
    return EtcdAddress(
        endpoints, shown, root, unquote(user), unquote(password),
        tls=tls == "true" or bool(secure), logged=logged == "true", **options,
    )  # fmt: skip


def _options(shown: str, query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in OPTIONS:
            raise ConfigError(
                f"the store {shown} has an unknown option {name!r}; known: {', '.join(OPTIONS)}"
            )
        if name in options or not value:
            raise ConfigError(f"the store {shown} must have a value for {name}=, and one only")
        options[name] = value
    return options


def _endpoint(text: str) -> str:
    """`host:port` of one entry; IPv6 in brackets, as `[::1]:2379`."""
    text = text.strip()
    if text.startswith("["):
        host, bracket, rest = text.partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ConfigError(f"{text!r} is no address: write [::1]:2379")
        host, port = f"{host}]", rest.removeprefix(":")
    else:
        if text.count(":") > 1:
            raise ConfigError(f"{text!r} is no address: an IPv6 address has brackets, [::1]:2379")
        host, _, port = text.partition(":")
    port = port or str(PORT)
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{text!r} is no server of the store: {_FORM}")
    return f"{host}:{port}"
