"""A reserved port is its server's alone, and a server listens beside the reservation."""

from __future__ import annotations

import socket

import pytest

from kestrl._app.ports import LOOPBACK, reserved_port


def test_a_reserved_port_is_its_servers_alone() -> None:
    with reserved_port() as port:
        for _ in range(2):  # a server, and the same server started again
            with socket.create_server((LOOPBACK, port)) as server:  # with SO_REUSEADDR, as all servers
                server.listen()
        with socket.socket() as other, pytest.raises(OSError, match="already in use"):
            other.bind((LOOPBACK, port))
        with pytest.raises(OSError, match="already in use"), reserved_port(port=port):
            pass


def test_a_wanted_port_may_be_one_that_others_have_just_left() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match="already in use"), reserved_port(port=port, reuse=True):
            pass  # somebody listens
        with socket.create_connection((LOOPBACK, port)) as connection:
            server.accept()[0].close()  # who closes first keeps the port of the connection for a minute
            assert connection.recv(1) == b""
    with pytest.raises(OSError, match="already in use"), reserved_port(port=port):
        pass
    with reserved_port(port=port, reuse=True) as wanted, socket.create_server((LOOPBACK, port)):
        assert wanted == port


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="assign requested address"), reserved_port("192.0.2.1"):
        pass
