"""Certificates for tests, made when they are asked for."""

import os
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """A CA with its file, and what it signs."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        own = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, None), critical=True)
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
        )

    def issue(
        self, file_name: str, *, common_names: Sequence[str] = (), names: Sequence[x509.GeneralName] = ()
    ) -> tuple[Path, Path]:
        """The files of a certificate and of its key, mode 0600."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in common_names])
        builder = self._builder(subject, key)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=not common_names)
        certificate, key_file = self.folder / f"{file_name}.pem", self.folder / f"{file_name}.key"
        certificate.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        key_file.touch(mode=0o600)
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        os.chmod(key_file, 0o600)
        return certificate, key_file

    def server(self, file_name: str = "server") -> tuple[Path, Path]:
        return self.issue(file_name, names=[x509.DNSName("localhost")])

    def client_context(self, certificate: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """For a client that trusts this authority, and shows a certificate if given one."""
        context = ssl.create_default_context(cafile=self.file)
        if certificate is not None:
            context.load_cert_chain(*certificate)
        return context
