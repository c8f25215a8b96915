"""An authority made for one run of the tests, and certificates it signs."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


@dataclass(frozen=True)
class Authority:
    """Signs for servers; `pem` is the file that makes a client trust it."""

    folder: Path
    name: str
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def made(cls, folder: Path, name: str) -> Authority:
        authority = cls(folder, name, ec.generate_private_key(ec.SECP256R1()))
        certificate = authority._sign(_name(name), authority.key.public_key(), ca=True)
        authority.pem.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return authority

    @property
    def pem(self) -> Path:
        return self.folder / f"{self.name}.pem"

    def server(self, address: str = "127.0.0.1") -> ssl.SSLContext:
        """What a server at an address needs to speak TLS."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(_name("server"), key.public_key(), ca=False, address=address)
        both = self.folder / f"{self.name}-{address}.pem"
        both.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(both)
        return context

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, *, ca: bool, address: str | None = None
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(_name(self.name))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if address is not None:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self.key, hashes.SHA256())
