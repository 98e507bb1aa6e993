"""Credentials from a program, as clusters of the large clouds need, and several kubeconfigs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from domicile.errors import ConfigError
from domicile.kube.certificates import made_certificates
from domicile.kubeapi.credentials import Credentials, find_credentials
from domicile.kubeapi.exchange import ApiRequest, BrokenExchange
from domicile.kubeapi.exec_plugin import ExecPlugin, ExecStatus
from domicile.kubeapi.http_exchange import HttpExchange

V1 = "client.authentication.k8s.io/v1"

PROGRAM = """#!{python}
import json, os, pathlib, sys
home = pathlib.Path(__file__).parent
with (home / "runs").open("a") as runs:
    runs.write(json.dumps([sys.argv[1:], os.environ["KUBERNETES_EXEC_INFO"],
                           os.environ.get("PROFILE"), sys.stdin.read()]) + "\\n")
if (home / "fails").exists():
    sys.exit("no session: log in first")
print((home / "answer").read_text())
"""


class Plugin:
    """A program beside a kubeconfig, what it prints, and how it was run."""

    def __init__(self, home: Path, **more: Any) -> None:
        self.home = home
        program = home / "get-token"
        program.write_text(PROGRAM.format(python=sys.executable))
        program.chmod(0o755)
        section = {
            "apiVersion": V1, "command": "./get-token", "args": ["--cluster", "bank"],
            "env": [{"name": "PROFILE", "value": "dev"}], "provideClusterInfo": True,
            "interactiveMode": "IfAvailable", **more,
        }  # fmt: skip
        self.config = home / "config"
        self.config.write_text(
            json.dumps(
                {
                    "current-context": "main",
                    "contexts": [{"name": "main", "context": {"cluster": "c", "user": "u"}}],
                    "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
                    "users": [{"name": "u", "user": {"exec": section}}],
                }
            )
        )

    def prints(self, version: str = V1, *, ends_in_s: float | None = None, **status: str) -> None:
        if ends_in_s is not None:
            until = datetime.now(UTC) + timedelta(seconds=ends_in_s)
            status["expirationTimestamp"] = until.strftime("%Y-%m-%dT%H:%M:%SZ")
        answer = {"kind": "ExecCredential", "apiVersion": version, "status": status}
        (self.home / "answer").write_text(json.dumps(answer))

    @property
    def runs(self) -> list[list[Any]]:
        file = self.home / "runs"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def found(self) -> Credentials:
        return find_credentials(str(self.config))


def test_a_program_gives_a_token_which_is_kept_until_it_ends(tmp_path: Path) -> None:
    plugin = Plugin(tmp_path)
    plugin.prints(token="first", ends_in_s=3600)
    found = plugin.found()
    assert not plugin.runs, "it is run when a token is needed, not before"
    assert asyncio.run(found.bearer_now()) == found.bearer() == "first"
    ((arguments, told, profile, typed),) = plugin.runs
    assert (arguments, profile, typed) == (["--cluster", "bank"], "dev", "")
    assert json.loads(told) == {
        "kind": "ExecCredential", "apiVersion": V1,
        "spec": {"interactive": False, "cluster": {"server": "http://127.0.0.1:1"}},
    }  # fmt: skip
    assert "first" not in repr(found) + repr(found.plugin)
    # Refused by the server: asked again.
    assert found.plugin is not None
    plugin.prints(token="second", ends_in_s=60)
    found.plugin.forget()
    assert found.bearer() == "second"
    plugin.prints(token="third")
    found.plugin._given = None  # pyright: ignore[reportPrivateUsage]
    assert [found.bearer(), found.bearer()] == ["third", "third"]
    assert len(plugin.runs) == 3


def test_a_token_that_has_ended_is_asked_for_again(tmp_path: Path) -> None:
    plugin = Plugin(tmp_path)
    plugin.prints(token="first", ends_in_s=3600)
    found = plugin.found()
    assert found.bearer() == "first"
    assert found.plugin is not None
    given = found.plugin.credential()
    ended = type(given)(token="first", expiration_timestamp=datetime.now(UTC))
    found.plugin._given = ended  # pyright: ignore[reportPrivateUsage]
    plugin.prints(token="second", ends_in_s=3600)
    assert found.bearer() == "second"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("no json, but s3cret", "printed no ExecCredential"),
        ('{"kind": "Pod", "apiVersion": "v1", "status": {}}', "it printed Pod v1, not"),
        (f'{{"kind": "ExecCredential", "apiVersion": "{V1}", "status": {{}}}}', "neither"),
        (
            f'{{"kind": "ExecCredential", "apiVersion": "{V1}",'
            ' "status": {"clientCertificateData": "s3cret"}}',
            "without its key",
        ),
        (
            f'{{"kind": "ExecCredential", "apiVersion": "{V1}", "status": {{"token": "s3cret",'
            ' "expirationTimestamp": "2020-01-01T00:00:00Z"}}',
            "has ended already",
        ),
    ],
)
def test_what_is_no_credential_is_told_without_showing_it(
    tmp_path: Path, answer: str, said: str
) -> None:
    plugin = Plugin(tmp_path)
    (tmp_path / "answer").write_text(answer)
    with pytest.raises(ConfigError, match=said) as told:
        plugin.found().bearer()
    assert "s3cret" not in str(told.value)


def test_a_program_that_fails_or_is_missing_is_told(tmp_path: Path) -> None:
    plugin = Plugin(tmp_path)
    (tmp_path / "fails").touch()
    with pytest.raises(ConfigError, match="ended with 1: no session: log in first"):
        plugin.found().bearer()
    exchange = HttpExchange(plugin.found())

    async def ask() -> None:
        try:
            async with exchange.open(ApiRequest("GET", "/")):
                raise AssertionError("there is no answer without credentials")
        finally:
            await exchange.close()

    # While a process runs it is a fault like any other: it is tried again.
    with pytest.raises(BrokenExchange, match="log in first") as broken:
        asyncio.run(ask())
    assert not broken.value.sent
    missing = Plugin(tmp_path, command="no-such-program", installHint="apt install it")
    with pytest.raises(ConfigError, match="it is not there; apt install it"):
        missing.found().bearer()
    with pytest.raises(ConfigError, match="wants a terminal"):
        Plugin(tmp_path, interactiveMode="Always").found()
    with pytest.raises(ConfigError, match="needs a command and an apiVersion"):
        Plugin(tmp_path, apiVersion="client.authentication.k8s.io/v1alpha1").found()


def test_a_program_gives_a_certificate_and_then_another_one(tmp_path: Path) -> None:
    plugin = Plugin(tmp_path)
    plugin.config.write_text(plugin.config.read_text().replace("http:", "https:"))
    made = [made_certificates(["a"], datetime.now(UTC)) for _ in range(2)]

    def printed(number: int) -> None:
        one = made[number]
        plugin.prints(
            clientCertificateData=one.certificate.decode(), clientKeyData=one.key.decode()
        )

    printed(0)
    found = plugin.found()

    async def body() -> None:
        exchange = HttpExchange(found)
        # Stands for a connection on which the first one was shown.
        idle, ended = exchange._idle, list[str]()  # pyright: ignore[reportPrivateUsage]
        idle.append(SimpleNamespace(abort=lambda: ended.append("ended")))  # type: ignore[arg-type]
        try:
            for number in range(2):
                assert len(ended) == 0
                printed(number)
                if number:
                    assert found.plugin is not None
                    found.plugin.forget()
                assert await exchange._token() == ""  # pyright: ignore[reportPrivateUsage]
                assert exchange._shown == made[number].certificate  # pyright: ignore[reportPrivateUsage]
            assert ended
            assert not idle
        finally:
            await exchange.close()

    asyncio.run(body())


def test_a_program_never_runs_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the server refuses what it gave, to another request, before that was used."""
    plugin = Plugin(tmp_path)
    plugin.prints(token="t")
    found = plugin.found()
    asked, threads = ExecPlugin.credential, list[threading.Thread]()

    def forgotten(self: ExecPlugin) -> ExecStatus:
        threads.append(threading.current_thread())
        given = asked(self)
        self.forget()
        return given

    monkeypatch.setattr(ExecPlugin, "credential", forgotten)

    async def body() -> None:
        exchange = HttpExchange(found)
        assert await exchange._token() == "t"  # pyright: ignore[reportPrivateUsage]
        await exchange.close()

    asyncio.run(body())
    assert threads
    assert threading.current_thread() not in threads


def test_a_certificate_that_can_not_be_shown_is_asked_for_again(tmp_path: Path) -> None:
    plugin = Plugin(tmp_path)
    plugin.config.write_text(plugin.config.read_text().replace("http:", "https:"))
    one, two = (made_certificates(["a"], datetime.now(UTC)) for _ in range(2))

    async def body() -> None:
        plugin.prints(clientCertificateData=one.certificate.decode(),
                      clientKeyData=one.key.decode())  # fmt: skip
        found = plugin.found()
        exchange = HttpExchange(found)
        assert found.plugin is not None
        for key in (one.key, two.key):
            found.plugin.forget()
            plugin.prints(clientCertificateData=two.certificate.decode(),
                          clientKeyData=key.decode())  # fmt: skip
            if key is two.key:
                assert await exchange._token() == ""  # pyright: ignore[reportPrivateUsage]
                continue
            with pytest.raises(BrokenExchange, match="can't be used") as told:
                await exchange._token()  # pyright: ignore[reportPrivateUsage]
            assert not told.value.sent
        await exchange.close()

    asyncio.run(body())


def test_several_kubeconfigs_are_one(tmp_path: Path) -> None:
    """As kubectl: the first file that names something counts, missing files do not matter, and
    paths are beside the file that has them."""
    one, two = tmp_path / "one" / "config", tmp_path / "two" / "config"
    for path, content in (
        (
            one,
            {
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "users": [{"name": "u", "user": {"tokenFile": "token"}}],
            },
        ),
        (
            two,
            {
                "current-context": "x",
                "contexts": [{"name": "x", "context": {"cluster": "no", "user": "no"}}],
                "clusters": [{"name": "c", "cluster": {"server": "https://two"}}],
                "users": [{"name": "u", "user": {"token": "wrong"}}],
            },
        ),
    ):
        path.parent.mkdir()
        path.write_text(json.dumps(content))
        path.with_name("token").write_text(path.parent.name)
    paths = os.pathsep.join(map(str, (tmp_path / "missing", one, two)))
    found = find_credentials(environment={"KUBECONFIG": paths})
    assert (found.server, found.bearer()) == ("https://two", "one")
    gone = os.pathsep.join(str(tmp_path / name) for name in ("a", "b"))
    with pytest.raises(ConfigError, match="is there; set KUBECONFIG"):
        find_credentials(environment={"KUBECONFIG": gone})
