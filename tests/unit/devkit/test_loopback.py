"""Ports for brokers: free ones are found, a taken one is told."""

import socket

import pytest

from examples.devkit import BrokerError
from examples.devkit.loopback import HOST, free_ports, require_free


def test_free_ports_differ_and_are_free() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    require_free(ports)


def test_more_ports_than_are_tried_are_not_had() -> None:
    with pytest.raises(BrokerError, match=r"No free port was found from [23]\d{4} to"):
        free_ports(1000)


def test_a_taken_port_is_told() -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(BrokerError, match=f"can't listen on 127.0.0.1:{port}"):
            require_free([port])


def test_what_is_no_port_is_told() -> None:
    with pytest.raises(BrokerError, match=r"can't listen on 127\.0\.0\.1:70000"):
        require_free([70_000])
