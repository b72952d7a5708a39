"""Certificates of an authority made for one test, and an Apache Kafka that asks for them, for passwords and rights."""

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from chassis.testing.apache_kafka import ApacheKafka

PASSWORD: Final = "hunter2-of-everyone"
USERS: Final = ("root", "crm", "chessboard", "messenger", "topics")
LISTENERS: Final = {"TLS": "SSL", "MUTUAL": "SSL", "SASL": "SASL_SSL"}


class Authority:
    """A certificate authority with the certificates that it has issued, as PEM files in a folder.

    Attributes:
        ca_file: its own certificate.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _named(f"{name} authority")
        certificate = self._signed(self._subject, self._key, x509.BasicConstraints(ca=True, path_length=0))
        self.ca_file = self._write("ca", _pem(certificate))

    def issue(self, name: str, *, address: str | None = None) -> tuple[str, str]:
        """Issue a certificate to a name, for a server at an address or for a client; return its file and its key's."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.IPAddress(ipaddress.ip_address(address))] if address else [x509.DNSName(name)]
        certificate = self._signed(_named(name), key, x509.SubjectAlternativeName(names))
        return self._write(f"{name}.cert", _pem(certificate)), self._write(f"{name}.key", _key_pem(key))

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder().subject_name(subject).issuer_name(self._subject).public_key(key.public_key())
        )
        builder = builder.serial_number(x509.random_serial_number()).add_extension(extension, critical=False)
        builder = builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(hours=2))
        return builder.sign(self._key, hashes.SHA256())

    def _write(self, name: str, content: bytes) -> str:
        path = self._folder / f"{self._name}-{name}.pem"
        path.write_bytes(content)
        return str(path)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def start_secure_kafka(folder: Path, lib_dir: Path, authority: Authority) -> ApacheKafka:
    """Start a node with TLS, mutual TLS and SASL listeners and rights switched on; its plaintext one is the
    superuser's. SCRAM passwords are set afterwards (they live in the node's metadata)."""
    certificate, key = authority.issue("broker", address="127.0.0.1")
    store = folder / "broker-store.pem"
    store.write_text(Path(key).read_text() + Path(certificate).read_text())
    known = " ".join(f'user_{user}="{PASSWORD}"' for user in USERS)
    plain = "org.apache.kafka.common.security.plain.PlainLoginModule"
    scram = "org.apache.kafka.common.security.scram.ScramLoginModule"
    config = {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(store),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": authority.ca_file,
        "listener.name.mutual.ssl.client.auth": "required",
        "listener.name.mutual.ssl.principal.mapping.rules": "RULE:^CN=([a-z-]+)$/$1/,DEFAULT",
        "listener.name.sasl.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
        "listener.name.sasl.plain.sasl.jaas.config": f"{plain} required {known};",
        "listener.name.sasl.scram-sha-512.sasl.jaas.config": f"{scram} required;",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS;User:root",
    }
    return ApacheKafka.start(folder / "node", lib_dir=lib_dir, listeners=LISTENERS, config=config)
