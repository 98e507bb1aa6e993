"""Authorities and certificates for the tests, made anew for each: by the package `cryptography` if
it is installed, else by the program `openssl`."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest

from domicile import Settings
from domicile.transports import tls
from domicile.transports.tls import Certificates, Contexts

DAY = timedelta(days=1)
GOOD = (-DAY, 30 * DAY)
EXPIRED = (-3 * DAY, -DAY)
EARLY = (DAY, 30 * DAY)
SOON = (-DAY, 2 * DAY)
"""From when to when a certificate is valid, counted from now."""

Span = tuple[timedelta, timedelta]
CONFIG = """
[req]
distinguished_name = name
x509_extensions = authority
[name]
[authority]
basicConstraints = critical,CA:TRUE
"""


class Files(NamedTuple):
    """What one process is given."""

    cert: Path
    key: Path
    ca: Path

    @property
    def settings(self) -> dict[str, str]:
        return {"tls_cert": str(self.cert), "tls_key": str(self.key), "tls_ca": str(self.ca)}

    def into(self, settings: Settings) -> Settings:
        """The same settings with these files."""
        kept = {name: getattr(settings, name) for name in settings.__slots__}
        return Settings(**{**kept, **self.settings})

    @property
    def certificates(self) -> Certificates:
        return Certificates(str(self.cert), str(self.key), str(self.ca))

    @property
    def unchecked(self) -> Certificates:
        """As a process would use them that does not look at its own certificate."""
        return Unchecked(str(self.cert), str(self.key), str(self.ca))

    def replace(self, other: Files) -> None:
        """Become another's files, one after the other, each in one step."""
        for mine, its in zip(self, other, strict=True):
            draft = mine.with_suffix(".new")
            shutil.copy(its, draft)
            draft.replace(mine)


class Unchecked(Certificates):
    """A stranger's, or those of a process whose certificate has expired since it started."""

    def _read(self) -> Contexts:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tls, "_check_own", lambda *_: float("inf"))
            return super()._read()


class Authority:
    """Signs certificates; its files are in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self.cert = directory / "ca.pem"
        self._key = directory / "ca.key"
        self._make = _by_package if importlib.util.find_spec("cryptography") else _by_program
        self._make(self.cert, self._key, None, None, GOOD, "")

    def issue(self, name: str, span: Span = GOOD, host: str = "") -> Files:
        """A certificate, signed by this authority; with `host` it is that of a server there."""
        cert, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        self._make(cert, key, self.cert, self._key, span, host)
        ca = self._directory / f"{name}.ca"
        shutil.copy(self.cert, ca)
        return Files(cert, key, ca)


def _name(cert: Path) -> str:
    """Unlike that of any other authority, or one would be taken for the other."""
    return f"{cert.parent.name}-{cert.stem}"


def _by_package(
    cert: Path, key: Path, ca: Path | None, ca_key: Path | None, span: Span, host: str
) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    own = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _name(cert))])
    issuer, signer = subject, own
    if ca is not None and ca_key is not None:
        issuer = x509.load_pem_x509_certificate(ca.read_bytes()).subject
        loaded = serialization.load_pem_private_key(ca_key.read_bytes(), None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        signer = loaded
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + span[0])
        .not_valid_after(now + span[1])
        .add_extension(x509.BasicConstraints(ca=ca is None, path_length=None), critical=True)
    )
    if host:
        names = x509.SubjectAlternativeName([x509.DNSName(host)])
        builder = builder.add_extension(names, critical=False)
    built = builder.sign(signer, hashes.SHA256())
    cert.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        own.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


def _by_program(
    cert: Path, key: Path, ca: Path | None, ca_key: Path | None, span: Span, host: str
) -> None:
    if span[0] > -DAY or span[1] < DAY:
        pytest.skip("openssl makes no certificates of the past; install cryptography")
    days = str(span[1].days)
    config = cert.with_suffix(".cnf")
    config.write_text(CONFIG, encoding="utf-8")
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    new += ["-config", str(config), "-subj", f"/CN={_name(cert)}", "-keyout", str(key)]
    if ca is None:
        _openssl("req", "-x509", *new, "-days", days, "-out", str(cert))
        return
    wish = cert.with_suffix(".csr")
    _openssl("req", "-new", *new, "-out", str(wish))
    signer = ["-CA", str(ca), "-CAkey", str(ca_key), "-CAcreateserial"]
    if host:
        names = cert.with_suffix(".ext")
        names.write_text(f"subjectAltName=DNS:{host}\n", encoding="utf-8")
        signer += ["-extfile", str(names)]
    _openssl("x509", "-req", "-in", str(wish), *signer, "-days", days, "-out", str(cert))


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
