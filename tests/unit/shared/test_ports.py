"""Ports for servers of tests."""

import socket
from pathlib import Path

import pytest
from tests.fakes import ports
from tests.fakes.ports import free_port


def test_a_port_is_given_once_and_can_be_listened_on() -> None:
    given = [free_port() for _ in range(200)]
    assert len(set(given)) == len(given)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", given[-1]))


def test_no_outgoing_connection_gets_the_port() -> None:
    first_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(free_port() < first_of_connections for _ in range(50))


def test_a_port_with_a_listener_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(ports, "_FIRST", taken.getsockname()[1])
        monkeypatch.setattr(ports, "_COUNT", 1)
        with pytest.raises(OSError, match="is taken"):
            free_port()
