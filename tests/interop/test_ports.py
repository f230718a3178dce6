"""Ports that stay free while a broker is down, whoever connects meanwhile."""

import socket
from pathlib import Path

import pytest
from interop import ports


def test_ports_are_distinct_and_can_be_listened_on() -> None:
    found = ports.free_ports(3)
    assert len(set(found)) == 3
    for port in found:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_no_client_is_given_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = tmp_path / "range"
    told.write_text("12000\t65000\n")
    monkeypatch.setattr(ports, "_RANGE", told)
    assert all(port < 12000 or port > 65000 for port in ports.free_ports(50))


def test_range_that_leaves_nothing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = tmp_path / "range"
    told.write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "_RANGE", told)
    with pytest.raises(OSError, match="1024-65535"):
        ports.free_ports(1)


def test_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = ports.free_ports(2)
    with socket.create_server(("127.0.0.1", taken)):
        monkeypatch.setattr(ports.random, "sample", lambda *_: [taken, free, 1])
        assert ports.free_ports(1) == [free]
