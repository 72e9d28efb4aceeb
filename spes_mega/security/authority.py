"""A run's own certificate authority: signs the hub's certificate and one for each node."""

import datetime
import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from spes_mega.errors import AccessError, cause_of

LOOPBACK = ("localhost", "127.0.0.1", "::1")
AUTHORITY_DAYS = 3650
SKEW = datetime.timedelta(days=1)  # clocks of machines that are far apart differ


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, in PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """A self-signed certificate and its key."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate, self._key = certificate, key

    @classmethod
    def new(cls) -> Self:
        """Keys on the curve P-256; valid for ten years, for the run may need further certificates."""
        key = ec.generate_private_key(ec.SECP256R1())
        # A serial number in the name, so that authorities of two runs are told apart.
        name = _name(f"spes-mega run {x509.random_serial_number() % 16**8:08x}")
        builder = _builder(name, name, key.public_key(), AUTHORITY_DAYS)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs=True), critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def read(cls, directory: Path) -> Self:
        """From `ca.pem` and `ca.key`. Raises AccessError naming what is missing or damaged."""
        try:
            certificate = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
            key = serialization.load_pem_private_key((directory / "ca.key").read_bytes(), None)
        except (OSError, ValueError, TypeError) as e:
            cause = cause_of(e) if isinstance(e, OSError) else e
            raise AccessError(
                f"{directory}: the authority's ca.pem and ca.key, which `spes-mega keys new` made, are needed to sign "
                f"further keys; bring them back if you keep them elsewhere ({cause})"
            ) from e
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise AccessError(f"{directory}: ca.key is not the key of ca.pem")
        return cls(certificate, key)

    @property
    def pair(self) -> Pair:
        return _pem(self._certificate, self._key)

    def sign_hub(self, hosts: Collection[str], days: int) -> Pair:
        """A certificate for a hub that is called by these names or addresses, or over loopback."""
        names = [_general_name(host) for host in dict.fromkeys((*hosts, *LOOPBACK))]
        return self._sign("hub", ExtendedKeyUsageOID.SERVER_AUTH, days, names)

    def sign_caller(self, name: str, days: int) -> Pair:
        """A certificate for a node, whose name is its common name."""
        return self._sign(name, ExtendedKeyUsageOID.CLIENT_AUTH, days, [])

    def _sign(self, name: str, usage: x509.ObjectIdentifier, days: int, names: list[x509.GeneralName]) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(name), self._certificate.subject, key.public_key(), days)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(signer, critical=False)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return _pem(builder.sign(self._key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    """`days` counts from now; a negative number gives a certificate that has expired."""
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - SKEW)
        .not_valid_after(end)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Pair(certificate.public_bytes(serialization.Encoding.PEM), private)
