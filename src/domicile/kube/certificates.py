"""The webhook's certificates: made and renewed by the sharder itself, or read from files.

The sharder's own lie in a Secret that all replicas share: an authority, and a certificate that it
signed. Any replica renews what is due, by the Secret's resourceVersion, so that one wins. A new
authority is added before the old one; the certificate is signed by it only at its next renewal,
weeks later, when the API server has long been told of the new one.
"""

from __future__ import annotations

import base64
import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from domicile.errors import ConfigError
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.errors import KubeConflict, KubeNotFound
from domicile.kubeapi.kinds import SECRETS

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as missing:
    raise ConfigError(
        "the webhook's certificates need more packages: pip install 'domicile[kubernetes]'"
    ) from missing

AUTHORITY_DAYS = 5 * 365
CERTIFICATE_DAYS = 90

SECRET = "domicile-sharder-webhook"


@dataclass(frozen=True, slots=True, repr=False)
class WebhookCertificates:
    """What the server shows, and what the API server has to trust. All are PEM."""

    authorities: bytes
    """The newest first."""
    certificate: bytes
    key: bytes
    authority_key: bytes = b""

    def load_into(self, context: ssl.SSLContext) -> None:
        """Have a server show this certificate from its next connection on."""
        with tempfile.TemporaryDirectory(prefix="domicile-") as folder:
            pair = Path(folder) / "pair.pem"
            pair.touch(0o600)
            pair.write_bytes(self.certificate + b"\n" + self.key)
            try:
                context.load_cert_chain(pair)
            except (ssl.SSLError, OSError) as error:
                raise ConfigError(f"the webhook's certificate can't be used: {error}") from error


def made_certificates(
    names: Sequence[str], now: datetime, old: WebhookCertificates | None = None
) -> WebhookCertificates:
    """What is there, with everything renewed that is due: `old` itself if nothing is."""
    if old is None:
        authority, authority_key = _authority(now)
        certificate, key = _signed(names, authority, authority_key, now)
        return WebhookCertificates(authority, certificate, key, authority_key)
    authorities, authority_key = old.authorities, old.authority_key
    certificate, key = old.certificate, old.key
    newest = x509.load_pem_x509_certificates(authorities)[0]
    if _due(newest, now):
        authority, authority_key = _authority(now)
        authorities = authority + _pem(newest)
    elif _due(x509.load_pem_x509_certificate(certificate), now):
        certificate, key = _signed(names, authorities, authority_key, now)
    else:
        return old
    return WebhookCertificates(authorities, certificate, key, authority_key)


async def shared_certificates(
    client: KubeClient, namespace: str, names: Sequence[str], now: datetime
) -> WebhookCertificates:
    """The certificates of all replicas, renewed if that is due."""
    while True:
        try:
            secret = await client.get(SECRETS, SECRET, namespace)
        except KubeNotFound:
            made = made_certificates(names, now)
            body = {
                "metadata": {"name": SECRET},
                "type": "kubernetes.io/tls",
                "data": _fields(made),
            }
            try:
                await client.create(SECRETS, body, namespace)
            except KubeConflict:
                continue
            return made
        data = {key: base64.b64decode(value) for key, value in (secret.data or {}).items()}
        try:
            old = WebhookCertificates(
                data["ca.crt"], data["tls.crt"], data["tls.key"], data["ca.key"]
            )
            made = made_certificates(names, now, old)
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"the Secret {namespace}/{SECRET} has no usable certificates ({error}); delete it, "
                "and it is made anew"
            ) from error
        if made is old:
            return old
        try:
            await client.patch(
                SECRETS,
                SECRET,
                namespace,
                merge={"data": _fields(made)},
                resource_version=secret.metadata.resource_version,
            )
        except KubeConflict:
            continue
        return made


def certificates_from_files(certificate: Path, key: Path, authority: Path) -> WebhookCertificates:
    """What somebody else makes and renews, cert-manager for instance."""
    try:
        return WebhookCertificates(
            authority.read_bytes(), certificate.read_bytes(), key.read_bytes()
        )
    except OSError as error:
        raise ConfigError(f"the webhook's certificates can't be read: {error}") from error


def _fields(made: WebhookCertificates) -> dict[str, str]:
    found = {
        "ca.crt": made.authorities,
        "ca.key": made.authority_key,
        "tls.crt": made.certificate,
        "tls.key": made.key,
    }
    return {name: base64.b64encode(value).decode() for name, value in found.items()}


def _due(certificate: x509.Certificate, now: datetime) -> bool:
    """Whether two thirds of its time are over."""
    since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return now >= since + (until - since) * 2 / 3


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _builder(
    name: str, issuer: x509.Name | None, now: datetime, days: int
) -> tuple[x509.CertificateBuilder, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # An hour for clocks that are behind.
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=days))
    )
    return builder, key


def _authority(now: datetime) -> tuple[bytes, bytes]:
    builder, key = _builder(f"domicile sharder {now:%Y-%m-%d}", None, now, AUTHORITY_DAYS)
    made = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True).sign(
        key, hashes.SHA256()
    )
    return _pem(made), _key_pem(key)


def _signed(
    names: Sequence[str], authorities: bytes, authority_key: bytes, now: datetime
) -> tuple[bytes, bytes]:
    authority = x509.load_pem_x509_certificates(authorities)[0]
    signer = serialization.load_pem_private_key(authority_key, None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    builder, key = _builder(names[0], authority.subject, now, CERTIFICATE_DAYS)
    alternatives = x509.SubjectAlternativeName([_alternative(name) for name in names])
    made = (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .add_extension(alternatives, False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .sign(signer, hashes.SHA256())
    )
    return _pem(made), _key_pem(key)


def _alternative(name: str) -> x509.GeneralName:
    import ipaddress

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
