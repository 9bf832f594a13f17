"""Asks a broker one thing: a request of the proxy's own goes out, its response comes back."""

import asyncio
from struct import Struct
from typing import Any

from proxy.login import Broker, Login, LoginRefusedError
from proxy.relay.channel import BLOCKED, Channel
from proxy.relay.tls import ready
from proxy.relay.upstream import LOGIN_REFUSED, UpstreamError
from proxy.wire.layout import read_tags

CLIENT_ID = "kafka-quota-proxy"
"""As which the brokers know the proxy itself."""

MAX_RESPONSE_BYTES = 16 << 20

_LENGTH = Struct(">i")
_CORRELATION_ID_BYTES = 4


async def ask(
    channel: Channel, request: Any, correlation_id: int = 0, *, tagged: bool = False
) -> bytes:
    """Send one request and return the body of its response. The caller sets the time limit.

    Args:
        channel: to a broker, with nothing unanswered on it.
        request: of kafka-python's codec.
        correlation_id: goes with the request.
        tagged: whether the response header of this version has tags.

    Raises UpstreamError (bad_response, closed) or OSError.
    """
    request.with_header(correlation_id=correlation_id, client_id=CLIENT_ID)
    frame = memoryview(request.encode(framed=True, header=True))
    while frame:
        sent = channel.send(frame)
        if sent == BLOCKED:
            await ready(channel.fd, write=True)
        else:
            frame = frame[sent:]
    (length,) = _LENGTH.unpack(await _receive(channel, _LENGTH.size))
    if not _CORRELATION_ID_BYTES <= length <= MAX_RESPONSE_BYTES:
        raise UpstreamError("bad_response", f"a response of {length} bytes")
    response = await _receive(channel, length)
    try:
        start = read_tags(response, _CORRELATION_ID_BYTES)[1] if tagged else _CORRELATION_ID_BYTES
    except (IndexError, ValueError) as error:
        raise UpstreamError("bad_response", f"no tags in the header: {error}") from error
    return response[start:]


async def log_in(channel: Channel, login: Login, broker: Broker) -> None:
    """Log the proxy in on a connection on which nothing was said yet. The caller limits the time.

    Raises UpstreamError (login_refused, bad_response, closed) or OSError.
    """
    exchange = login.exchange(broker)
    answer: Any = None
    try:
        while (request := await asyncio.to_thread(exchange.step, answer)) is not None:
            answer = _decoded(request, await ask(channel, request))
    except LoginRefusedError as error:
        raise UpstreamError(LOGIN_REFUSED, str(error)) from None


def _decoded(request: Any, body: bytes) -> Any:
    try:
        return request.header.get_response_class().decode(body)
    except Exception as error:  # who knows what answers at that address
        raise UpstreamError("bad_response", f"no answer to a login: {error}") from error


async def _receive(channel: Channel, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = channel.recv_into(view)
        if got == BLOCKED:
            await ready(channel.fd, write=False)
        elif got:
            view = view[got:]
        else:
            raise UpstreamError("closed", "the broker closed the connection")
    return bytes(data)
