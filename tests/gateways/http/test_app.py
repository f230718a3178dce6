"""The door as its clients meet it: login, rights to come in, problems, limits, health, metrics."""

import base64
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.running_broker import eventually

from headrace.gateways.http.node_app import of_replicas

from .conftest import GUEST, HttpBroker

ROOT = Path(__file__).parents[3]
CONFIG = """
[[users]]
name = "watcher"
password = "watching"
tags = ["monitoring"]

[[users]]
name = "plain"
password = "plainly"
"""
LOGGED_IN = "/api/v1/topics"


def code(answer: httpx.Response) -> str:
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document["status"] == answer.status_code
    assert document["type"] == f"/api/v1/problems#{document['code']}"
    return str(document["code"])


# -- health and metrics ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/api/v1/health", "/api/v1/health/live", "/api/v1/health/ready"])
def test_health_is_told_without_a_login(broker: HttpBroker, path: str) -> None:
    with broker.client(None) as client:
        answer = client.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok", "alarms": []})


def test_node_with_an_alarm_lives_and_is_not_ready(tmp_path: Path) -> None:
    with HttpBroker(tmp_path, config="[alarms]\nmemory_share = 0.0001\n") as broker, broker.client(None) as client:
        assert client.get("/api/v1/health/live").status_code == 200
        ready = client.get("/api/v1/health/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "degraded", "alarms": ["memory"]})
        assert 'headrace_alarm{alarm="memory"} 1.0' in client.get("/metrics").text


def test_metrics_are_in_prometheus_form_and_on_the_page_that_lists_them(http: httpx.Client) -> None:
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    told = set(re.findall(r"^# TYPE (\w+)", answer.text, re.MULTILINE))
    page, _, of_a_cluster = (ROOT / "docs" / "metrics.md").read_text().partition("## A node of a cluster")
    assert told == set(re.findall(r"^\| `(\w+)[`{]", page, re.MULTILINE))
    replicas = {family.name for family in of_replicas(())}
    assert replicas == set(re.findall(r"^\| `(\w+)[`{]", of_a_cluster, re.MULTILINE))


def test_metrics_are_for_this_machine_and_for_those_who_watch(broker: HttpBroker) -> None:
    proxied = {"x-forwarded-for": "203.0.113.7"}
    with broker.client(None) as nobody:
        assert nobody.get("/metrics").status_code == 200
        assert nobody.get("/metrics", headers=proxied).status_code == 401
    with broker.client(("watcher", "watching")) as watcher, broker.client(("plain", "plainly")) as plain:
        assert watcher.get("/metrics", headers=proxied).status_code == 200
        assert code(plain.get("/metrics", headers=proxied)) == "forbidden"


# -- who it is --------------------------------------------------------------------------------------------------------


def test_without_a_login_one_is_asked_for(broker: HttpBroker) -> None:
    with broker.client(None) as client:
        answer = client.get(LOGGED_IN)
        assert (answer.status_code, code(answer)) == (401, "unauthorized")
        assert answer.headers["www-authenticate"].startswith('Basic realm="headrace"')


@pytest.mark.parametrize("auth", [("guest", "wrong"), ("nobody", "guest"), ("guest", "")])
def test_wrong_user_and_wrong_password_are_told_the_same(broker: HttpBroker, auth: tuple[str, str]) -> None:
    with broker.client(auth) as client:
        answer = client.get(LOGGED_IN)
        assert answer.status_code == 401
        assert "detail" not in answer.json()


@pytest.mark.parametrize(
    "given", ["Bearer abc", "Basic", "Basic !!!", "Basic " + base64.b64encode(b"nocolon").decode(), "Basic /w=="]
)
def test_authorization_that_is_none_is_refused(broker: HttpBroker, given: str) -> None:
    with broker.client(None) as client:
        assert code(client.get(LOGGED_IN, headers={"authorization": given})) == "unauthorized"


@pytest.mark.parametrize(
    "headers", [{"x-forwarded-for": "127.0.0.1"}, {"forwarded": "for=127.0.0.1"}, {"host": "evil.example:15672"}]
)
def test_guest_behind_a_proxy_or_a_name_of_elsewhere_is_not_on_this_machine(
    broker: HttpBroker, headers: dict[str, str]
) -> None:
    with broker.client() as guest, broker.client(("plain", "plainly")) as plain:
        assert guest.get(LOGGED_IN, headers=headers).status_code == 401
        assert plain.get(LOGGED_IN, headers=headers).status_code == 200


def test_many_logins_at_once_all_succeed(broker: HttpBroker) -> None:
    def ask(_number: int) -> int:
        with broker.client(("plain", "plainly")) as client:
            return client.get(LOGGED_IN).status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(24))) == {200}


def test_passwords_are_in_no_log(broker: HttpBroker) -> None:
    secret = "canary-7f3a91"
    with broker.client(("guest", secret)) as client:
        client.get(LOGGED_IN)
        client.post("/api/v1/topics", content=b"{", headers={"content-type": "application/json"})
    eventually(lambda: "login of user 'guest' from 127.0.0.1 refused" in broker.log_path.read_text())
    told = broker.log_path.read_text()
    assert secret not in told
    assert base64.b64encode(f"guest:{secret}".encode()).decode() not in told


# -- what is not lawful -----------------------------------------------------------------------------------------------


def test_path_that_nobody_knows_is_404(http: httpx.Client) -> None:
    assert code(http.get("/api/v1/nothing")) == "not_found"
    assert code(http.get("/api/v1/health/")) == "not_found"


def test_method_that_a_path_does_not_know_is_405_and_says_which_it_does(http: httpx.Client) -> None:
    answer = http.delete("/api/v1/health")
    assert code(answer) == "method_not_allowed"
    assert answer.headers["allow"] == "GET, HEAD"
    assert code(http.request("BREW", "/api/v1/health")) == "method_not_allowed"


def test_parameter_that_nobody_knows_or_that_comes_twice_is_400(http: httpx.Client) -> None:
    assert code(http.get("/api/v1/health?x=1")) == "invalid_parameter"
    assert code(http.get(f"{LOGGED_IN}?vhost=a&vhost=b")) == "invalid_parameter"


def test_page_of_another_site_may_change_nothing(http: httpx.Client) -> None:
    body = {"name": "x"}
    assert code(http.post("/api/v1/topics", json=body, headers={"origin": "https://evil.example"})) == "cross_origin"
    assert code(http.post("/api/v1/topics", json=body, headers={"origin": "null"})) == "cross_origin"


def test_answers_tell_browsers_what_not_to_do(http: httpx.Client) -> None:
    for answer in (http.get("/api/v1/health"), http.get("/nothing")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cache-control"] == "no-store"
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["server"].startswith("headrace/")


def test_every_code_is_explained(http: httpx.Client) -> None:
    known = {one["code"] for one in http.get("/api/v1/problems").json()["problems"]}
    assert {"not_found", "unauthorized", "disk_full"} <= known


# -- limits -----------------------------------------------------------------------------------------------------------


def test_one_connection_serves_many_requests(broker: HttpBroker) -> None:
    with socket.create_connection(("127.0.0.1", broker.ports["http"])) as raw, raw.makefile("rb") as answers:
        for _ in range(3):
            raw.sendall(b"GET /api/v1/health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
            length = 0
            while (line := answers.readline()) != b"\r\n":
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            answers.read(length)


def test_body_beyond_the_limit_is_refused_before_it_is_sent(http: httpx.Client) -> None:
    large = b"[" + b" " * (1024 * 1024) + b"]"
    answer = http.post("/api/v1/topics", content=large, headers={"content-type": "application/json"})
    assert (answer.status_code, code(answer)) == (413, "body_too_large")


def test_body_beyond_the_limit_is_refused_though_it_does_not_say_its_length(http: httpx.Client) -> None:
    def parts() -> list[bytes]:
        return [b" " * 65_536] * 17

    answer = http.post("/api/v1/topics", content=iter(parts()), headers={"content-type": "application/json"})
    assert code(answer) == "body_too_large"


def test_a_thousand_connections_that_say_nothing_keep_nobody_out(broker: HttpBroker) -> None:
    silent = []
    try:
        for _ in range(300):
            one = socket.create_connection(("127.0.0.1", broker.ports["http"]))
            one.sendall(b"GET /api/v1/he")
            silent.append(one)
        with broker.client() as client:
            assert client.get("/api/v1/health").status_code == 200
    finally:
        for one in silent:
            one.close()


def test_stop_does_not_wait_for_those_who_say_nothing(own_broker: HttpBroker) -> None:
    with socket.create_connection(("127.0.0.1", own_broker.ports["http"])), own_broker.client(GUEST) as client:
        client.get("/api/v1/health")
        own_broker.stop()
