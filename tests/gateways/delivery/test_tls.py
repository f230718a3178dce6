"""Files that TLS needs are taken or refused with a reason; names in certificates are one thing or nothing."""

import os
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from headrace.gateways.delivery.tls import (
    NameFrom,
    TlsConfig,
    TlsError,
    TlsSocket,
    load_context,
    name_in,
    shake_hands,
)

from .certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def config(authority: Authority) -> TlsConfig:
    return TlsConfig(*authority.server(), client_ca=authority.file)


async def connected(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[TlsSocket, ssl.SSLSocket]:
    """Both ends of a connection; the client's end blocks, in threads."""
    near, far = socket.socketpair()
    near.setblocking(False)
    far.settimeout(30)
    ends: list[Any] = []

    async def there() -> None:
        ends.append(await trio.to_thread.run_sync(lambda: client.wrap_socket(far, server_hostname="localhost")))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(there)
        secured = await shake_hands(near, server)
    return secured, ends[0]


async def test_octets_go_both_ways_and_nothing_blocks(authority: Authority, config: TlsConfig) -> None:
    near, far = await connected(load_context(config), authority.client_context())
    with pytest.raises(BlockingIOError):
        near.recv(100)
    assert near.send(b"hello") == 5
    assert await trio.to_thread.run_sync(far.recv, 100) == b"hello"
    await trio.to_thread.run_sync(far.sendall, b"x" * 50_000)
    got = b""
    while len(got) < 50_000:
        await trio.lowlevel.wait_readable(near)
        try:
            got += near.recv(1 << 20)
        except BlockingIOError:
            continue
    assert got == b"x" * 50_000
    near.close()
    far.close()


async def test_read_takes_what_several_records_brought_up_to_what_was_asked(
    authority: Authority, config: TlsConfig
) -> None:
    near, far = await connected(load_context(config), authority.client_context())
    for _ in range(5):
        await trio.to_thread.run_sync(far.sendall, b"y" * 1000)
    await trio.lowlevel.wait_readable(near)
    assert near.recv(4200) == b"y" * 4200
    assert near.recv(4200) == b"y" * 800
    far.close()
    near.close()


async def test_full_socket_refuses_and_takes_the_same_octets_later(authority: Authority, config: TlsConfig) -> None:
    near, far = await connected(load_context(config), authority.client_context())
    data = os.urandom(8 << 20)
    sent = 0
    refusals = 0
    received = bytearray()

    async def read() -> None:
        while len(received) < len(data):
            received.extend(await trio.to_thread.run_sync(far.recv, 1 << 20))

    async with trio.open_nursery() as nursery:
        while sent < len(data):
            try:
                sent += near.send(data[sent:])
            except BlockingIOError:
                refusals += 1
                if refusals == 1:
                    nursery.start_soon(read)
                await trio.lowlevel.wait_writable(near)
    assert refusals and received == data
    near.close()
    far.close()


async def test_old_tls_is_refused(authority: Authority, config: TlsConfig) -> None:
    context = load_context(config)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        client = authority.client_context()
        client.minimum_version = client.maximum_version = version
        near, far = await connected(context, client)
        assert near.version == version.name.replace("_", ".")
        near.close()
        far.close()


async def test_certificate_of_another_authority_ends_the_handshake(tmp_path: Path, config: TlsConfig) -> None:
    stranger = Authority(tmp_path, "stranger")
    near, far = socket.socketpair()
    near.setblocking(False)
    far.settimeout(30)
    client = Authority(tmp_path, "other").client_context(stranger.issue("eve", common_names=["ann"]))
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE

    def speak() -> None:
        with suppress(OSError), client.wrap_socket(far) as wrapped:
            wrapped.recv(1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, speak)
        with pytest.raises(ssl.SSLError):
            await shake_hands(near, load_context(config))


async def test_certificate_is_asked_for_only_with_a_ca_and_demanded_only_when_told(
    authority: Authority, config: TlsConfig
) -> None:
    ann = authority.issue("ann", common_names=["ann"])
    near, far = await connected(load_context(config), authority.client_context(ann))
    certificate = near.certificate()
    assert certificate is not None and name_in(certificate) == "ann"
    near.close()
    far.close()
    for asked in (config, TlsConfig(config.certificate, config.key)):
        near, far = await connected(load_context(asked), authority.client_context())
        assert near.certificate() is None
        near.close()
        far.close()
    required = TlsConfig(config.certificate, config.key, config.client_ca, client_certificate_required=True)
    assert load_context(required).verify_mode == ssl.CERT_REQUIRED


def test_required_certificates_need_a_ca_to_check_them_by(config: TlsConfig) -> None:
    with pytest.raises(ValueError, match="client_ca"):
        TlsConfig(config.certificate, config.key, client_certificate_required=True)


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o666])
def test_key_that_others_may_read_is_refused(config: TlsConfig, mode: int) -> None:
    config.key.chmod(mode)
    with pytest.raises(TlsError, match=rf"server.key: others may read the key \(mode {mode:04o}\)"):
        load_context(config)


@pytest.mark.parametrize("content", [b"", b"# nothing\n", b"not PEM at all", b"\0" * 100])
def test_empty_or_invalid_ca_file_is_fatal(config: TlsConfig, content: bytes) -> None:
    assert config.client_ca is not None
    config.client_ca.write_bytes(content)
    with pytest.raises(TlsError, match=r"ca\.pem: "):
        load_context(config)


def test_ca_file_without_a_ca_is_fatal(config: TlsConfig) -> None:
    assert config.client_ca is not None
    config.client_ca.write_bytes(config.certificate.read_bytes())
    with pytest.raises(TlsError, match="there is no CA certificate in it"):
        load_context(config)


@pytest.mark.parametrize("field", ["certificate", "key", "client_ca"])
def test_missing_file_is_named(config: TlsConfig, field: str) -> None:
    path: Path = getattr(config, field)
    path.unlink()
    with pytest.raises(TlsError, match=f"{path.name}: No such file"):
        load_context(config)


def test_certificate_that_is_none_is_named(config: TlsConfig) -> None:
    config.certificate.write_text("garbage")
    with pytest.raises(TlsError, match=r"server\.pem: "):
        load_context(config)


def test_key_that_is_none_is_named(config: TlsConfig) -> None:
    config.key.write_text("garbage")
    with pytest.raises(TlsError, match=r"server\.key: "):
        load_context(config)


def test_key_of_another_certificate_is_named(authority: Authority, config: TlsConfig) -> None:
    _other, key = authority.issue("other", common_names=["other"])
    with pytest.raises(TlsError, match=r"other\.key: key values mismatch"):
        load_context(TlsConfig(config.certificate, key))


def test_encrypted_key_is_refused_and_nobody_is_asked(config: TlsConfig) -> None:
    key = serialization.load_pem_private_key(config.key.read_bytes(), None)
    config.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(TlsError, match=r"server\.key: the key is encrypted"):
        load_context(config)


# -- names ------------------------------------------------------------------------------------------------------------


def subject(*names: str) -> tuple[tuple[tuple[str, str], ...], ...]:
    return ((("organizationName", "Mill"),), *((("commonName", name),) for name in names))


@pytest.mark.parametrize(
    ("certificate", "name"),
    [
        ({"subject": subject("ann")}, "ann"),
        ({"subject": subject("ann"), "subjectAltName": (("DNS", "device-7"),)}, "device-7"),
        ({"subject": subject("ann"), "subjectAltName": (("email", "a@b.example"),)}, "a@b.example"),
        ({"subject": subject("ann"), "subjectAltName": (("IP Address", "192.0.2.1"),)}, "ann"),
        ({"subject": subject("ann"), "subjectAltName": (("DNS", "one"), ("DNS", "two"))}, None),
        ({"subject": subject("ann", "bob")}, None),
        ({"subject": subject()}, None),
        ({}, None),
        ({"subject": subject("")}, None),
        ({"subject": subject("ann\0.evil")}, None),
        ({"subject": subject("*.example")}, None),
        ({"subject": subject("a#")}, None),
        ({"subject": subject("a+b")}, None),
        ({"subject": subject("line\nbreak")}, None),
        ({"subject": subject("é" * 200)}, None),
        ({"subject": subject("Zoë")}, "Zoë"),
    ],
)
def test_name_is_one_field_and_can_mean_nothing_else(certificate: dict[str, Any], name: str | None) -> None:
    assert name_in(certificate) == name


def test_field_can_be_chosen() -> None:
    both = {"subject": subject("ann"), "subjectAltName": (("DNS", "device-7"),)}
    assert name_in(both, NameFrom.CN) == "ann"
    assert name_in(both, NameFrom.SAN) == "device-7"
    assert name_in({"subject": subject("ann")}, NameFrom.SAN) is None


async def test_name_comes_out_of_a_real_certificate_whole(authority: Authority, config: TlsConfig) -> None:
    cases = [
        (authority.issue("a", common_names=["ann"], names=[x509.DNSName("device-7")]), "device-7"),
        (authority.issue("b", common_names=["ann\0evil"]), None),
        (authority.issue("c", common_names=["ann"], names=[x509.RFC822Name("a@b.example")]), "a@b.example"),
        (authority.issue("d", common_names=["ann"], names=[x509.DNSName("*.example")]), None),
    ]
    for files, name in cases:
        near, far = await connected(load_context(config), authority.client_context(files))
        certificate = near.certificate()
        assert certificate is not None and name_in(certificate) == name
        near.close()
        far.close()
