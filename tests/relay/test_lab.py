"""The lab itself: what comes to its broker is what its relay sends."""

import asyncio

import pytest
from relaylab.lab import LOCALHOST, open_lab


async def test_a_client_of_another_test_reaches_neither_relay_nor_broker():
    """Java clients connect for ever to where a broker or a proxy has been."""
    async with open_lab() as lab:
        (_, broker_port), *_ = lab.brokers.bootstrap.servers
        for port in (lab.port, broker_port):
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(LOCALHOST, port)
