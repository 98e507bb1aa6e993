"""Where the API server is and who we are: from inside a pod, or from a kubeconfig.

Understood: certificates, as files or inline; tokens, as text or in a file that is read again when
it changes, because a pod's token is replaced about every hour; `exec`, a program that prints one of
these. An `auth-provider`, which kubectl has not understood since 1.26, is refused with a message
that says what to do instead. Several files in KUBECONFIG are merged: the first that names something
counts.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from domicile.errors import ConfigError
from domicile.kubeapi.exec_plugin import ExecPlugin, plugin_of

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """A server and an identity. Its text never contains a secret."""

    server: str
    namespace: str = "default"
    ca: bytes = b""
    certificate: bytes = b""
    key: bytes = b""
    token: str = ""
    token_file: Path | None = None
    server_name: str = ""
    insecure: bool = False
    account: str = ""
    plugin: ExecPlugin | None = None

    def __repr__(self) -> str:
        return f"Credentials({self.server!r}, account={self.account!r})"

    def bearer(self) -> str:
        """The token to send now; empty if there is none. A token file is read each time, and a
        plugin is run if what it gave has ended."""
        if self.plugin is not None:
            return self.plugin.credential().token
        if self.token_file is None:
            return self.token
        try:
            return self.token_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(
                f"the token file {self.token_file} can't be read: {error.strerror}; a pod has one "
                "unless automountServiceAccountToken is false"
            ) from error

    async def bearer_now(self) -> str:
        """As `bearer`; a plugin runs in a thread."""
        return (await self.shown_now())[0]

    async def shown_now(self) -> tuple[str, bytes, bytes]:
        """The token, the certificate and its key; a plugin runs in a thread. They are of one answer
        of its program: the server may refuse that to another request at any moment."""
        if self.plugin is None:
            return self.bearer(), self.certificate, self.key
        given = self.plugin.kept
        if given is None:
            given = await asyncio.to_thread(self.plugin.credential)
        pair = given.client_certificate_data.encode(), given.client_key_data.encode()
        return given.token, *pair

    def pair(self) -> tuple[bytes, bytes]:
        """The certificate to show and its key; empty if there is none."""
        if self.plugin is None:
            return self.certificate, self.key
        given = self.plugin.credential()
        return given.client_certificate_data.encode(), given.client_key_data.encode()


def find_credentials(
    kubeconfig: str | None = None,
    context: str | None = None,
    environment: Mapping[str, str] = os.environ,
    service_account: Path = SERVICE_ACCOUNT,
) -> Credentials:
    """From the named kubeconfig, else of the pod, else from KUBECONFIG or ~/.kube/config."""
    if kubeconfig is None and environment.get("KUBERNETES_SERVICE_HOST") and not context:
        return of_pod(environment, service_account)
    named = [kubeconfig] if kubeconfig else environment.get("KUBECONFIG", "").split(os.pathsep)
    paths = [Path(one).expanduser() for one in named if one]
    return of_kubeconfig(paths or [Path("~/.kube/config").expanduser()], context)


def of_pod(
    environment: Mapping[str, str] = os.environ, folder: Path = SERVICE_ACCOUNT
) -> Credentials:
    """The credentials that every pod is given."""
    host, port = (
        environment.get("KUBERNETES_SERVICE_HOST", ""),
        environment.get("KUBERNETES_SERVICE_PORT", "443"),
    )
    if not host:
        raise ConfigError("this process is in no pod: KUBERNETES_SERVICE_HOST is not set")
    try:
        ca = (folder / "ca.crt").read_bytes()
        namespace = (folder / "namespace").read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(
            f"the pod's service account can't be read: {error}; a pod has one unless "
            "automountServiceAccountToken is false"
        ) from error
    host = f"[{host}]" if ":" in host else host
    return Credentials(
        f"https://{host}:{port}",
        namespace=namespace,
        ca=ca,
        token_file=folder / "token",
        account=f"the service account of this pod in namespace {namespace}",
    )


NAMED = "set KUBECONFIG, or give --kubeconfig; in the URL of a store it is ?kubeconfig=FILE"
"""How a kubeconfig is named."""

_Entries = dict[str, list[tuple[dict[str, Any], Path]]]


def of_kubeconfig(paths: Sequence[Path], context: str | None = None) -> Credentials:
    """The credentials of one context of one or several kubeconfigs."""
    entries: _Entries = {"contexts": [], "clusters": [], "users": []}
    current = ""
    loaded = [(path, found) for path in paths if (found := _loaded(path, paths)) is not None]
    if not loaded:
        shown = ", ".join(map(str, paths))
        raise ConfigError(f"none of {shown} is there; {NAMED}")
    for path, config in loaded:
        current = current or str(config.get("current-context") or "")
        for many, known in entries.items():
            known += [(one, path) for one in config.get(many) or ()]
    where = ", ".join(str(path) for path, _ in loaded)
    name = context or current
    chosen, _ = _named(entries, "contexts", "context", name, where)
    cluster, cluster_path = _named(entries, "clusters", "cluster", chosen.get("cluster", ""), where)
    user, path = _named(entries, "users", "user", chosen.get("user", ""), where)
    if "auth-provider" in user:
        raise ConfigError(
            f"the user {chosen.get('user')!r} of {path} gets credentials by auth-provider, which "
            "is not supported, and not by kubectl either since 1.26; use exec, a token or a "
            "certificate, for instance of a service account: kubectl create token NAME"
        )
    server = str(cluster.get("server", ""))
    if not server.startswith(("https://", "http://")):
        raise ConfigError(f"the cluster of context {name!r} in {where} has no server address")
    authority = _data(cluster, "certificate-authority", cluster_path)
    plugin: ExecPlugin | None = None
    if "exec" in user:
        told = {
            "server": server,
            "certificate-authority-data": base64.b64encode(authority).decode(),
            "tls-server-name": str(cluster.get("tls-server-name", "")),
            "insecure-skip-tls-verify": bool(cluster.get("insecure-skip-tls-verify", False)),
        }
        about = {key: value for key, value in told.items() if value}
        plugin = plugin_of(user["exec"] or {}, path, str(chosen.get("user")), about)
    token_file = user.get("tokenFile")
    return Credentials(
        server.rstrip("/"),
        namespace=str(chosen.get("namespace") or "default"),
        ca=authority,
        certificate=_data(user, "client-certificate", path),
        key=_data(user, "client-key", path),
        token=str(user.get("token", "")),
        token_file=_beside(path, str(token_file)) if token_file else None,
        server_name=str(cluster.get("tls-server-name", "")),
        insecure=bool(cluster.get("insecure-skip-tls-verify", False)),
        account=f"the user {chosen.get('user')!r} of {path.name}",
        plugin=plugin,
    )


def _loaded(path: Path, paths: Sequence[Path]) -> dict[str, Any] | None:
    """A file's content; None if it is one of several and is not there."""
    import yaml  # the extra's; only people's machines need it

    try:
        loaded: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        if len(paths) > 1 and isinstance(error, FileNotFoundError):
            return None
        raise ConfigError(
            f"no API server is known: {path} can't be read ({error.strerror}); {NAMED}"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    return dict(loaded) if isinstance(loaded, Mapping) else {}  # pyright: ignore[reportUnknownArgumentType]


def _named(
    entries: _Entries, many: str, one: str, name: str, where: str
) -> tuple[dict[str, Any], Path]:
    for entry, path in entries[many]:
        if entry.get("name") == name:
            return dict(entry.get(one) or {}), path
    known = ", ".join(str(entry.get("name")) for entry, _ in entries[many]) or "none"
    raise ConfigError(f"{where} has no {one} named {name!r}; it has: {known}")


def _beside(path: Path, name: str) -> Path:
    return (path.parent / Path(name).expanduser()).resolve()


def _data(section: dict[str, Any], key: str, path: Path) -> bytes:
    inline = section.get(f"{key}-data")
    try:
        if inline:
            return base64.b64decode(inline, validate=True)
        return _beside(path, section[key]).read_bytes() if section.get(key) else b""
    except (OSError, binascii.Error, ValueError) as error:
        raise ConfigError(f"{key} of {path} can't be read: {error}") from error
