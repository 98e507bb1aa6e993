"""Files of certificates: what is wrong with them is said at the start, and changes are noticed."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest
from certificates_lab import EARLY, EXPIRED, SOON, Authority, Files, Span
from tcp_lab import Echo, Recorder, on_both_loops, run, until

from domicile.errors import ConfigError
from domicile.transports.tcp import TcpTransport
from domicile.transports.tls import AGAIN_S, LOOK_S, Certificates

ENCRYPTED = "-----BEGIN ENCRYPTED PRIVATE KEY-----"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


class Clock:
    """A clock to be turned by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def load(files: Files, clock: Clock | None = None) -> Certificates:
    made = Certificates(*map(str, files), clock or Clock())
    made.load()
    return made


def test_all_three_files_or_none() -> None:
    assert Certificates.of("", "", "") is None
    with pytest.raises(ConfigError, match="tls_key and tls_ca are missing"):
        Certificates.of("cert.pem", "", "")
    with pytest.raises(ConfigError, match="tls_ca is missing"):
        Certificates.of("cert.pem", "key.pem", "")


@pytest.mark.parametrize("name", ["cert", "key", "ca"])
def test_a_file_that_is_missing_or_no_pem_is_named(name: str, authority: Authority) -> None:
    files = authority.issue("one")
    path: Path = getattr(files, name)
    path.write_text("nonsense", encoding="utf-8")
    with pytest.raises(ConfigError, match="in PEM form") as caught:
        load(files)
    assert str(path) in str(caught.value)
    path.unlink()
    with pytest.raises(ConfigError, match=f"tls_{name}=.*can't be read: No such file"):
        load(files)


def test_a_key_of_another_certificate_is_refused(authority: Authority) -> None:
    files = authority.issue("one")._replace(key=authority.issue("two").key)
    with pytest.raises(ConfigError, match="key values mismatch"):
        load(files)


def test_a_key_with_a_password_is_refused_and_nobody_is_asked(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = authority.issue("one")
    body = "MIGjMF8GCSqGSIb3DQEFDTBSMDEGCSqGSIb3DQEFDDAkBBB" + "A" * 17
    files.key.write_text(
        f"{ENCRYPTED}\n{body}\n-----END ENCRYPTED PRIVATE KEY-----\n", encoding="utf-8"
    )
    with pytest.raises(ConfigError, match="without a password"):
        load(files)


def test_changed_files_are_used_within_a_second(authority: Authority) -> None:
    clock = Clock()
    files = authority.issue("one")
    made = load(files, clock)
    before = made.contexts
    assert made.contexts is before, "files that are as they were are not read again"
    files.replace(authority.issue("two"))
    clock.now += LOOK_S / 2
    assert made.contexts is before, "nor looked at all the time"
    clock.now += LOOK_S
    assert made.contexts is not before


def test_files_that_became_useless_leave_things_as_they_were(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """Certificate and key are two files: between their changes they do not fit."""
    clock = Clock()
    files, other = authority.issue("one"), authority.issue("two")
    made = load(files, clock)
    before = made.contexts
    os.replace(other.cert, files.cert)
    for _ in range(5):
        clock.now += 2 * LOOK_S
        assert made.contexts is before
    assert [record.levelname for record in caplog.records] == ["ERROR"], "said once"
    assert "the old ones stay" in caplog.text
    os.replace(other.key, files.key)
    clock.now += 2 * LOOK_S
    after = made.contexts
    assert after is not before
    files.ca.unlink()
    clock.now += 2 * LOOK_S
    assert made.contexts is after


@pytest.mark.parametrize(
    ("span", "why"),
    [(EXPIRED, "certificate has expired"), (EARLY, "certificate is not yet valid")],
)
def test_a_certificate_is_refused_before_and_after_its_time(
    span: Span, why: str, authority: Authority
) -> None:
    with pytest.raises(ConfigError, match=f"no peer would accept: {why}") as caught:
        load(authority.issue("one", span))
    assert "one.pem" in str(caught.value)


def test_a_certificate_of_another_authority_is_no_good(
    authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "theirs")
    with pytest.raises(ConfigError, match=r"no peer would accept.*authority of tls_ca=") as caught:
        load(other.issue("one")._replace(ca=authority.cert))
    assert str(authority.cert) in str(caught.value)


def test_a_certificate_that_became_too_old_does_not_replace_a_good_one(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    clock, files = Clock(), authority.issue("one")
    made = load(files, clock)
    before = made.contexts
    files.replace(authority.issue("two", EXPIRED))
    clock.now += 2 * LOOK_S
    assert made.contexts is before
    assert "the old ones stay" in caplog.text
    assert "has expired" in caplog.text


def test_the_end_of_a_certificate_is_announced_once_a_day(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    clock, wall, files = Clock(), Clock(), authority.issue("one", SOON)
    wall.now = time.time()

    def said() -> list[str]:
        clock.now += 2 * LOOK_S
        assert made.contexts
        warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
        found = [record.levelname for record in warned]
        caplog.clear()
        return found

    made = Certificates(*map(str, files), clock, wall)
    assert said() == ["WARNING"]
    assert said() == []
    wall.now += AGAIN_S
    assert said() == ["WARNING"]
    wall.now += 2 * AGAIN_S
    assert said() == ["ERROR"], "it is over"
    files.replace(authority.issue("two"))
    assert said() == [], "a new one is good for a while"


@on_both_loops
def test_connections_stay_and_new_ones_use_the_new_authority(loop: str, tmp_path: Path) -> None:
    """The way to another authority: first trust both, then change certificates, then trust one."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")

    async def body() -> None:
        clock = Clock()
        files = [old.issue("far"), old.issue("near")]
        far, near = (
            TcpTransport(certificates=Certificates(*map(str, mine), clock)) for mine in files
        )
        recorders: list[Recorder] = []
        address = await far.listen(Echo)

        async def dial() -> Recorder:
            clock.now += 2 * LOOK_S
            recorders.append(Recorder())
            near.dial(address, recorders[-1])
            await until(lambda: recorders[-1].connection or recorders[-1].reasons)
            return recorders[-1]

        try:
            await dial()
            both = old.cert.read_text(encoding="utf-8") + new.cert.read_text(encoding="utf-8")
            for mine in files:
                mine.ca.write_text(both, encoding="utf-8")
                await dial()
            for name, mine in zip(("far", "near"), files, strict=True):
                its = new.issue(name)
                os.replace(its.cert, mine.cert)
                os.replace(its.key, mine.key)
                await dial()
            for mine in files:
                mine.ca.write_bytes(new.cert.read_bytes())
                await dial()
            for recorder in recorders:
                recorder.send(b"still here")
            await until(lambda: all(recorder.data for recorder in recorders))
            assert [recorder.reasons for recorder in recorders] == [[]] * 7
            late = TcpTransport(certificates=old.issue("late")._replace(ca=files[1].ca).unchecked)
            refused = Recorder()
            late.dial(address, refused)
            await until(lambda: refused.reasons)
            await late.close()
        finally:
            await near.close()
            await far.close()

    run(loop, body())
