"""TLS for every door: the context from files, a socket that looks like a plain one, the name in a certificate. Driver.

TLS 1.2 and later, no renegotiation, no compression. Clients' certificates are checked against the CA file of the
configuration and no other; without one, nobody is asked for a certificate and nobody can log in with one. Whatever is
wrong with a file is an error with the file's name, never a door that is more open than was meant.
Neighbours: listener.py shakes hands, the doors read and write through TlsSocket as if it were a socket.
"""

import os
import socket
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import trio

from headrace.core_log.errors import HeadraceError

_NAME_BYTES_MAX = 255
_WILDCARDS = frozenset("*#+")
_SAN_KINDS = ("DNS", "email", "URI")


class TlsError(HeadraceError):
    """A file that TLS needs cannot be used; the text begins with its path."""


class NameFrom(StrEnum):
    """Which field of a certificate has the user's name."""

    SAN_OR_CN = "san_or_cn"
    SAN = "san"
    CN = "cn"


@dataclass(frozen=True, slots=True)
class TlsConfig:
    certificate: Path
    key: Path
    # Whose certificates clients may log in with.
    client_ca: Path | None = None
    # Turn away whoever has none.
    client_certificate_required: bool = False
    name_from: NameFrom = NameFrom.SAN_OR_CN

    def __post_init__(self) -> None:
        if self.client_certificate_required and self.client_ca is None:
            raise ValueError("client certificates cannot be required without a client_ca to check them by")


def load_context(config: TlsConfig) -> ssl.SSLContext:
    """A context for serving, or TlsError."""
    _check_key_file(config.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_CIPHER_SERVER_PREFERENCE
    # A resumed session would bring along a certificate that was checked by an older CA file.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    try:
        # An encrypted key would be asked for on the terminal; no terminal is there.
        context.load_cert_chain(config.certificate, config.key, password=_no_password)
    except _Encrypted:
        raise TlsError(f"{config.key}: the key is encrypted; give it without a passphrase") from None
    except OSError as error:
        raise TlsError(f"{_blamed(config, error)}: {_text(error)}") from error
    if config.client_ca is not None:
        _load_ca(context, config.client_ca)
        required = config.client_certificate_required
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    return context


def _check_key_file(path: Path) -> None:
    try:
        found = path.stat()
    except OSError as error:
        raise TlsError(f"{path}: {error.strerror}") from error
    # As PostgreSQL does: for its owner only; if it is root's, its group may be ours.
    allowed = stat.S_IRWXU | (stat.S_IRGRP if found.st_uid == 0 and os.geteuid() != 0 else 0)
    if stat.S_IMODE(found.st_mode) & ~allowed:
        mode = stat.S_IMODE(found.st_mode)
        raise TlsError(f"{path}: others may read the key (mode {mode:04o}); it must be 0600")


class _Encrypted(Exception):
    pass


def _no_password() -> str:
    raise _Encrypted


def _blamed(config: TlsConfig, error: OSError) -> Path:
    """OpenSSL does not say which of the two it could not read."""
    if isinstance(error, ssl.SSLError):
        if error.reason == "KEY_VALUES_MISMATCH":
            return config.key
        if not _is_certificate(config.certificate):
            return config.certificate
        return config.key
    return config.certificate


def _is_certificate(path: Path) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except OSError:
        return False
    return True


def _load_ca(context: ssl.SSLContext, path: Path) -> None:
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise TlsError(f"{path}: {_text(error)}") from error
    if not context.cert_store_stats()["x509_ca"]:
        raise TlsError(f"{path}: there is no CA certificate in it")


def _text(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not PEM").replace("_", " ").lower()
    return error.strerror or str(error)


class TlsSocket:
    """A TLS connection that reads and writes like a non-blocking socket: BlockingIOError when it would wait.

    OpenSSL keeps what it could not send and wants the same octets again; whoever calls `send` after a BlockingIOError
    begins with the octets that were refused, as outboxes do anyway.
    """

    def __init__(self, wrapped: ssl.SSLSocket) -> None:
        self._wrapped = wrapped

    def recv(self, bytes_max: int) -> bytes:
        """Up to so much, gathered from as many TLS records as have come."""
        parts: list[bytes] = []
        left = bytes_max
        while left:
            try:
                data = self._wrapped.recv(left)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if not parts:
                    raise BlockingIOError from None
                break
            except OSError:
                if not parts:
                    raise
                break
            if not data:
                break
            parts.append(data)
            left -= len(data)
        return b"".join(parts)

    def send(self, data: bytes | memoryview) -> int:
        try:
            return self._wrapped.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def shutdown(self, how: int) -> None:
        self._wrapped.shutdown(how)

    def fileno(self) -> int:
        return self._wrapped.fileno()

    def close(self) -> None:
        self._wrapped.close()

    @property
    def version(self) -> str:
        return self._wrapped.version() or ""

    def certificate(self) -> Mapping[str, Any] | None:
        """The client's certificate, checked against the CA file; None if it showed none.

        Raises ValueError for one whose texts are none.
        """
        return self._wrapped.getpeercert() or None


async def shake_hands(plain: socket.socket, context: ssl.SSLContext) -> TlsSocket:
    """Make a TLS connection of an accepted one, whose socket is used up by it. OSError (ssl.SSLError is one) if the
    peer and we do not agree."""
    wrapped = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
    try:
        while True:
            try:
                wrapped.do_handshake()
                return TlsSocket(wrapped)
            except ssl.SSLWantReadError:
                await trio.lowlevel.wait_readable(wrapped)
            except ssl.SSLWantWriteError:
                await trio.lowlevel.wait_writable(wrapped)
    except BaseException:
        wrapped.close()
        raise


def name_in(certificate: Mapping[str, Any], name_from: NameFrom = NameFrom.SAN_OR_CN) -> str | None:
    """The user's name in a checked certificate; None unless exactly one field has it and it can be nothing else."""
    found: list[str] = []
    if name_from is not NameFrom.CN:
        found = [str(value) for kind, value in certificate.get("subjectAltName", ()) if kind in _SAN_KINDS]
    if not found and name_from is not NameFrom.SAN:
        pairs = (pair for part in certificate.get("subject", ()) for pair in part)
        found = [str(value) for kind, value in pairs if kind == "commonName"]
    if len(found) != 1:
        return None
    name = found[0]
    if not name.isprintable() or _WILDCARDS & set(name) or not 0 < len(name.encode()) <= _NAME_BYTES_MAX:
        return None
    return name
