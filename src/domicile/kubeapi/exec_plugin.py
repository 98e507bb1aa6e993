"""Credentials from a program that a kubeconfig names: `ExecCredential`, v1 and v1beta1.

The program is run as kubectl runs it, without a terminal: it prints a token, or a certificate with
its key, and until when that is good. The answer is kept until then. What it prints is secret: it
must never be logged or shown.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from domicile.errors import ConfigError

VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")

RUN_S = 60.0
"""A program that takes longer is ended."""

EARLY_S = 10.0
"""It is run again so long before what it gave ends."""


class ExecStatus(msgspec.Struct, rename="camel", frozen=True):
    """What the program gave."""

    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: datetime | None = None

    def __repr__(self) -> str:
        return f"ExecStatus(until {self.expiration_timestamp})"

    def good(self) -> bool:
        """Whether it can still be used."""
        until = self.expiration_timestamp
        return until is None or (until - datetime.now(UTC)).total_seconds() > EARLY_S


class _ExecCredential(msgspec.Struct, rename="camel", frozen=True):
    kind: str
    api_version: str
    status: ExecStatus


@dataclass(slots=True, repr=False)
class ExecPlugin:
    """One program and what it gave last. It may be asked from several threads."""

    command: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    version: str = VERSIONS[0]
    hint: str = ""
    cluster: Mapping[str, Any] | None = None
    """What the program is told about the cluster, if it wants that."""
    _given: ExecStatus | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __repr__(self) -> str:
        return f"ExecPlugin({self.command!r})"

    @property
    def kept(self) -> ExecStatus | None:
        """What the program gave, if that is still good. The program is not run."""
        given = self._given
        return given if given is not None and given.good() else None

    def credential(self) -> ExecStatus:
        """What the program gave; it is run if that has ended. This blocks: ask from a thread."""
        with self._lock:
            if self._given is None or not self._given.good():
                self._given = self._run()
            return self._given

    def forget(self) -> None:
        """The server refused it: ask again next time."""
        self._given = None

    def _run(self) -> ExecStatus:
        spec: dict[str, Any] = {"interactive": False}
        if self.cluster is not None:
            spec["cluster"] = dict(self.cluster)
        told = {"kind": "ExecCredential", "apiVersion": self.version, "spec": spec}
        environment = {
            **os.environ, **self.environment, "KUBERNETES_EXEC_INFO": json.dumps(told),
        }  # fmt: skip
        try:
            done = subprocess.run(
                [self.command, *self.arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=RUN_S,
                check=False,
            )
        except FileNotFoundError as error:
            raise self._failed(
                "it is not there" + (f"; {self.hint}" if self.hint else "")
            ) from error
        except OSError as error:
            raise self._failed(str(error)) from error
        except subprocess.TimeoutExpired as error:
            raise self._failed(f"it gave no answer within {RUN_S:.0f} s") from error
        if done.returncode:
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
            said = lines[-1][:300] if lines else "it said nothing"
            raise self._failed(f"it ended with {done.returncode}: {said}")
        try:
            found = msgspec.json.decode(done.stdout, type=_ExecCredential)
        except msgspec.DecodeError as error:
            # The message of the error has no values, only the place.
            raise self._failed(f"it printed no ExecCredential: {error}") from None
        if found.kind != "ExecCredential" or found.api_version != self.version:
            raise self._failed(f"it printed {found.kind} {found.api_version}, not {self.version}")
        status = found.status
        if bool(status.client_certificate_data) != bool(status.client_key_data):
            raise self._failed("it printed a certificate without its key, or a key alone")
        if not status.token and not status.client_certificate_data:
            raise self._failed("it printed neither a token nor a certificate")
        if not status.good():
            raise self._failed(
                "what it printed has ended already; is the clock of this machine right?"
            )
        return status

    def _failed(self, why: str) -> ConfigError:
        return ConfigError(
            f"the program {self.command!r}, which gets the credentials, failed: {why}"
        )


def plugin_of(
    section: Mapping[str, Any], path: Path, user: str, cluster: Mapping[str, Any]
) -> ExecPlugin:
    """The plugin that the `exec` section of a user names."""
    command = str(section.get("command") or "")
    version = str(section.get("apiVersion") or "")
    if not command or version not in VERSIONS:
        raise ConfigError(
            f"the exec section of the user {user!r} of {path} needs a command and an apiVersion "
            f"of {' or '.join(VERSIONS)}; it has {command!r} and {version!r}"
        )
    if section.get("interactiveMode") == "Always":
        raise ConfigError(
            f"the program {command!r} of the user {user!r} of {path} wants a terminal "
            "(interactiveMode: Always), and none is given to it; use another user, for instance "
            "with a token of a service account: kubectl create token NAME"
        )
    if os.sep in command:  # as kubectl: beside the file; a bare name is looked up in PATH
        command = str((path.parent / command).resolve())
    environment = {str(one["name"]): str(one["value"]) for one in section.get("env") or ()}
    return ExecPlugin(
        command,
        tuple(str(one) for one in section.get("args") or ()),
        environment,
        version,
        str(section.get("installHint") or "").strip(),
        cluster if section.get("provideClusterInfo") else None,
    )
