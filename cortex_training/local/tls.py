"""A certificate made on the spot, for callers that speak nothing but https."""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_VALID = datetime.timedelta(days=30)
_RENEW_BEFORE = datetime.timedelta(days=2)


@dataclass(frozen=True)
class TlsFiles:
    """What a server and its callers need."""

    key: Path
    certificate: Path
    ca_bundle: Path
    """The certificates this machine trusts anyway, and the authority of the certificate: for REQUESTS_CA_BUNDLE and
    `ca_bundle`."""

    @classmethod
    def in_folder(cls, folder: Path) -> TlsFiles:
        return cls(folder / "server-key.pem", folder / "server-cert.pem", folder / "ca-bundle.pem")


def tls_files(folder: Path, host: str) -> TlsFiles:
    """The certificate in `folder`, kept while it is good for `host`, else a new one.

    Its authority's key is never written: whoever trusts the bundle trusts this one certificate. Raises OSError when
    the folder cannot be written.
    """
    files = TlsFiles.in_folder(folder)
    names = _names(host)
    if not _is_good(files, names):
        folder.mkdir(parents=True, exist_ok=True)
        _make(files, names)
    return files


def _names(host: str) -> list[str]:
    """What callers may call this server, loopback first."""
    local = ["127.0.0.1", "localhost", "::1"]
    beyond = [] if host in local else [host, socket.gethostname()]
    return [*local, *(name for name in beyond if name not in ("0.0.0.0", "::"))]


def _is_good(files: TlsFiles, names: list[str]) -> bool:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    try:
        certificate, authority = x509.load_pem_x509_certificates(files.certificate.read_bytes())
        alternative = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(files.certificate, files.key)
        trusted = authority.public_bytes(serialization.Encoding.PEM) in files.ca_bundle.read_bytes()
    except (OSError, ValueError, x509.ExtensionNotFound):
        return False
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    return trusted and left > _RENEW_BEFORE and set(alternative) == set(_alternative_names(names))


def _alternative_names(names: list[str]) -> list[Any]:
    from cryptography import x509

    found: list[Any] = []
    for name in names:
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            found.append(x509.DNSName(name))
    return found


def _make(files: TlsFiles, names: list[str]) -> None:
    import certifi
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.UTC)
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    # Named by the moment, so that two bundles one after the other are never taken for one another.
    authority_name = x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, f"Local Cortex Training authority {now:%Y-%m-%d %H:%M:%S.%f}")]
    )

    def certificate(subject: x509.Name, public_key: Any) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority_name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + _VALID)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
        )

    authority = (
        certificate(authority_name, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    own_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Local Cortex Training service")])
    own = (
        certificate(own_name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(_alternative_names(names)), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    files.key.unlink(missing_ok=True)
    with open(os.open(files.key, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    files.certificate.write_bytes(own.public_bytes(pem) + authority.public_bytes(pem))
    # A machine that already trusts a bundle of its own (a company proxy's, say) has to go on trusting it.
    usual = Path(os.environ.get("REQUESTS_CA_BUNDLE") or certifi.where())
    usual = usual if usual.is_file() else Path(certifi.where())
    files.ca_bundle.write_bytes(usual.read_bytes().rstrip() + b"\n" + authority.public_bytes(pem))


def _key_usage(*, signs_certificates: bool) -> Any:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
