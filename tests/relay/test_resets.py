"""A reset that comes together with data ends the connection, once the data was handled."""

import ctypes
import os

import pytest
from relaylab import frames
from relaylab.lab import End, open_lab, until

LIBC = ctypes.CDLL(None, use_errno=True)
AF_UNSPEC = bytes(16)
"""An address by which Linux resets a connection, its socket being open still."""
HEARTBEAT = 12
KNOWN_AFTER = 8
"""Requests by which the lane knows those of a connection."""


def send_and_reset(end: End, data: bytes) -> None:
    """Have both there when the relay looks next."""
    fd = end.writer.get_extra_info("socket").fileno()
    if data:
        os.write(fd, data)
    assert not LIBC.connect(fd, AF_UNSPEC, len(AF_UNSPEC)), os.strerror(ctypes.get_errno())


def heartbeat(number: int) -> bytes:
    return frames.request(HEARTBEAT, 2, number, b"anything")


async def known(lab) -> tuple[End, End]:
    """A connection whose requests are known."""
    client, broker = await lab.pair(heartbeat(0))
    for number in range(KNOWN_AFTER):
        if number:
            await client.send(heartbeat(number))
            assert await broker.frame() == heartbeat(number)
        await broker.send(frames.response(HEARTBEAT, 2, number, b"answer"))
        await client.frame()
    return client, broker


@pytest.mark.parametrize("lane", [False, None], ids=["python", "lane"])
async def test_a_broker_that_answers_one_of_two_requests(lane: bool | None):
    async with open_lab(lane=lane) as lab:
        client, broker = await known(lab)
        await client.send(heartbeat(50) + heartbeat(51))
        for number in (50, 51):
            assert await broker.frame() == heartbeat(number)
        answer = frames.response(HEARTBEAT, 2, 50, b"answer")
        send_and_reset(broker, answer)
        assert await client.frame() == answer
        await client.ended()
        assert lab.count("upstream_errors_total", reason="closed") == 1


@pytest.mark.parametrize("lane", [False, None], ids=["python", "lane"])
@pytest.mark.parametrize("cut", [0, 5], ids=["whole", "half"])
async def test_a_client_that_does_not_wait_for_its_answer(lane: bool | None, cut: int):
    async with open_lab(lane=lane) as lab:
        client, broker = await known(lab)
        asked = heartbeat(50)
        send_and_reset(client, asked[: len(asked) - cut])
        if not cut:
            assert await broker.frame() == asked
        await until(lambda: not lab.relay.connected)
