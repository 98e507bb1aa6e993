"""Where the API server is and who we are: from inside a pod, or from a kubeconfig.

Understood: certificates, as files or inline; tokens, as text or in a file that is read again when
it changes, because a pod's token is replaced about every hour. An `exec` plugin or `auth-provider`
runs a program to get credentials: that is refused with a message that says what to do instead.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from domicile.errors import ConfigError

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

    def __repr__(self) -> str:
        return f"Credentials({self.server!r}, account={self.account!r})"

    def bearer(self) -> str:
        """The token to send now; empty if there is none. A token file is read each time."""
        if self.token_file is None:
            return self.token
        try:
            return self.token_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(
                f"the token file {self.token_file} can't be read: {error.strerror}; a pod has one "
                "unless automountServiceAccountToken is false"
            ) from error


def find_credentials(
    kubeconfig: str | None = None,
    context: str | None = None,
    environment: Mapping[str, str] = os.environ,
    service_account: Path = SERVICE_ACCOUNT,
) -> Credentials:
    """From the named kubeconfig, else of the pod, else from KUBECONFIG or ~/.kube/config."""
    if kubeconfig is None and environment.get("KUBERNETES_SERVICE_HOST") and not context:
        return of_pod(environment, service_account)
    path = kubeconfig or environment.get("KUBECONFIG", "").split(os.pathsep)[0]
    return of_kubeconfig(Path(path or "~/.kube/config").expanduser(), context)


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


def of_kubeconfig(path: Path, context: str | None = None) -> Credentials:
    """The credentials of one context of a kubeconfig."""
    import yaml  # the extra's; only people's machines need it

    try:
        loaded: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"no API server is known: {path} can't be read ({error.strerror}); set KUBECONFIG or "
            "give --kubeconfig"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    config: dict[str, Any] = dict(loaded) if isinstance(loaded, Mapping) else {}  # pyright: ignore[reportUnknownArgumentType]
    name = context or config.get("current-context") or ""
    chosen = _named(config, "contexts", "context", name, path)
    cluster = _named(config, "clusters", "cluster", chosen.get("cluster", ""), path)
    user = _named(config, "users", "user", chosen.get("user", ""), path)
    for unsupported in ("exec", "auth-provider"):
        if unsupported in user:
            raise ConfigError(
                f"the user {chosen.get('user')!r} of {path} gets credentials by {unsupported}, "
                "which runs a program and is not supported; use a token or a certificate, for "
                "instance of a service account: kubectl create token NAME"
            )
    server = str(cluster.get("server", ""))
    if not server.startswith(("https://", "http://")):
        raise ConfigError(f"the cluster of context {name!r} in {path} has no server address")
    token_file = user.get("tokenFile")
    return Credentials(
        server.rstrip("/"),
        namespace=str(chosen.get("namespace") or "default"),
        ca=_data(cluster, "certificate-authority", path),
        certificate=_data(user, "client-certificate", path),
        key=_data(user, "client-key", path),
        token=str(user.get("token", "")),
        token_file=_beside(path, str(token_file)) if token_file else None,
        server_name=str(cluster.get("tls-server-name", "")),
        insecure=bool(cluster.get("insecure-skip-tls-verify", False)),
        account=f"the user {chosen.get('user')!r} of {path.name}",
    )


def _named(config: dict[str, Any], many: str, one: str, name: str, path: Path) -> dict[str, Any]:
    for entry in config.get(many) or ():
        if entry.get("name") == name:
            return dict(entry.get(one) or {})
    known = ", ".join(str(entry.get("name")) for entry in config.get(many) or ()) or "none"
    raise ConfigError(f"{path} has no {one} named {name!r}; it has: {known}")


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
