"""Who may come in over HTTP from elsewhere and by TLS: passwords, guessing, certificates, rights that change."""

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.gateways.delivery.certificates import Authority

from .conftest import PATIENCE_S, HttpBroker
from .test_app import code

TOPICS = "/api/v1/topics"
USERS = """
[[users]]
name = "ann"
password = "annie"

[[permissions]]
user = "ann"
configure = ".*"
write = ".*"
read = ".*"
"""


def other_address() -> str:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


class Open(HttpBroker):
    """Its HTTP door can be reached from other machines."""

    def __init__(self, folder: Path, *, config: str = "") -> None:
        super().__init__(folder, config=USERS + config)
        self._arguments = ["--http", "0.0.0.0:0", *self._arguments[len(self._arguments) - 2 :]]

    def from_elsewhere(self, auth: tuple[str, str] | None) -> httpx.Client:
        return httpx.Client(base_url=f"http://{other_address()}:{self.ports['http']}", auth=auth, timeout=PATIENCE_S)


def test_from_other_machines_nobody_sends_a_password_in_clear_text(tmp_path: Path) -> None:
    with Open(tmp_path) as broker:
        with broker.from_elsewhere(("ann", "annie")) as client:
            answer = client.get(TOPICS)
            assert (answer.status_code, code(answer)) == (403, "plaintext_refused")
        with broker.from_elsewhere(None) as nobody:
            assert nobody.get("/api/v1/health").status_code == 200
            assert code(nobody.get("/metrics")) == "unauthorized"


def test_clear_text_can_be_allowed_but_guest_stays_home_and_guessing_becomes_slow(tmp_path: Path) -> None:
    with Open(tmp_path, config="[http]\nallow_plaintext_auth = true\n") as broker:
        with broker.from_elsewhere(("ann", "annie")) as ann:
            assert ann.get(TOPICS).status_code == 200
        with broker.from_elsewhere(("guest", "guest")) as guest:
            assert code(guest.get(TOPICS)) == "unauthorized"
        with broker.from_elsewhere(("ann", "guess")) as guessing:
            codes = [code(guessing.get(TOPICS)) for _ in range(6)]
            assert codes == ["unauthorized"] * 5 + ["too_many_failures"]
            assert int(guessing.get(TOPICS).headers["retry-after"]) > 0
        with broker.client(("ann", "annie")) as elsewhere:
            assert elsewhere.get(TOPICS).status_code == 200


def test_right_taken_away_counts_at_once(tmp_path: Path) -> None:
    with HttpBroker(tmp_path, config=USERS) as broker, broker.client(("ann", "annie")) as ann:
        assert ann.post(TOPICS, json={"name": "t"}).status_code == 201
        broker.reload(USERS.replace('write = ".*"', 'write = ""'))
        assert code(ann.post(f"{TOPICS}/t/messages", json={"value": "x"})) == "forbidden"
        broker.reload(USERS.replace('password = "annie"', 'password = "changed"'))
        assert code(ann.get(TOPICS)) == "unauthorized"


class Secured(HttpBroker):
    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        certificate, key = self.authority.server()
        tls = f'[tls]\ncertificate = "{certificate}"\nkey = "{key}"\nclient_ca = "{self.authority.file}"\n'
        super().__init__(folder, config=USERS + tls)
        self._arguments += ["--https", "127.0.0.1:0"]

    def secure_client(
        self, auth: tuple[str, str] | None = None, certificate: tuple[Path, Path] | None = None
    ) -> httpx.Client:
        context = ssl.create_default_context(cafile=str(self.authority.file))
        if certificate is not None:
            context.load_cert_chain(*certificate)
        url = f"https://localhost:{self.ports['https']}"
        return httpx.Client(base_url=url, auth=auth, verify=context, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with Secured(tmp_path_factory.mktemp("secured")) as broker:
        yield broker
        broker.stop()
        assert "Traceback" not in broker.log_path.read_text()


def test_messages_go_in_and_out_over_tls_whatever_their_size(secured: Secured, name: str) -> None:
    with secured.secure_client(("ann", "annie")) as client:
        client.post(TOPICS, json={"name": name})
        for size in (0, 1, 16_384, 65_536, 5_000_000):
            value = "x" * size
            (result,) = client.post(f"{TOPICS}/{name}/messages", json={"value": value}).json()["results"]
            page = client.get(
                f"{TOPICS}/{name}/partitions/0/messages", params={"offset": result["offset"], "limit": 1}
            ).json()
            assert page["messages"][0]["value"] == value


def test_certificate_needs_no_password(secured: Secured) -> None:
    mine = secured.authority.issue("ann", common_names=["ann"])
    with secured.secure_client(certificate=mine) as client:
        assert client.get(TOPICS).status_code == 200
    stranger = secured.authority.issue("stranger", common_names=["nobody"])
    with secured.secure_client(certificate=stranger) as client:
        assert code(client.get(TOPICS)) == "unauthorized"
        assert client.get("/api/v1/health").status_code == 200
    with secured.secure_client() as client:
        assert code(client.get(TOPICS)) == "unauthorized"


def test_certificate_of_another_authority_does_not_get_in(secured: Secured, tmp_path: Path) -> None:
    foreign = Authority(tmp_path, "foreign").issue("ann", common_names=["ann"])
    with secured.secure_client(certificate=foreign) as client, pytest.raises(httpx.TransportError):
        client.get(TOPICS)


def test_long_poll_over_tls_is_answered_when_something_comes(secured: Secured, name: str) -> None:
    with secured.secure_client(("ann", "annie")) as one, secured.client(("ann", "annie")) as other:
        one.post(TOPICS, json={"name": name})
        assert one.get(f"{TOPICS}/{name}/partitions/0/messages", params={"wait_ms": 100}).json()["messages"] == []
        other.post(f"{TOPICS}/{name}/messages", json={"value": "x"})
        page = one.get(f"{TOPICS}/{name}/partitions/0/messages", params={"wait_ms": PATIENCE_S * 1000}).json()
        assert [message["value"] for message in page["messages"]] == ["x"]
