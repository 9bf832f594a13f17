"""Opens connections to brokers, with a time limit and errors that name their kind."""

import asyncio
import socket
import ssl

from proxy.relay.buffers import bound_send_buffer
from proxy.relay.channel import Channel, PlainChannel
from proxy.relay.tls import handshake

LOGIN_REFUSED = "login_refused"
"""The reason when a broker does not let the proxy itself in."""


class UpstreamError(Exception):
    """A broker could not be reached. `reason` is from a small set, fit for a metric label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def tune(sock: socket.socket) -> None:
    """Set what every connection wants: no delay, dead peers noticed, little kept unsent."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    bound_send_buffer(sock)


async def connect(
    host: str, port: int, *, tls: ssl.SSLContext | None, timeout_s: float, splice: bool = True
) -> Channel:
    """Connect to a broker, trying each of its addresses, within `timeout_s` seconds in all.

    Raises UpstreamError: dns, timeout, tls or refused.
    """
    where = f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout_s):
            sock = await _connect_any(host, port)
            if tls is None:
                return PlainChannel(sock, spliceable=splice)
            return await handshake(sock, tls, server_side=False, server_hostname=host)
    except TimeoutError:
        raise UpstreamError("timeout", f"{where}: no connection in {timeout_s:g} s") from None
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: not a host name at all
        raise UpstreamError("dns", f"{where}: {error}") from None
    except ssl.SSLError as error:
        raise UpstreamError("tls", f"{where}: {error}") from None
    except OSError as error:
        raise UpstreamError("refused", f"{where}: {error}") from None


async def _connect_any(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure: OSError = OSError("no address")
    for family, kind, protocol, _, address in addresses:
        sock = socket.socket(family, kind, protocol)
        try:
            tune(sock)
            await loop.sock_connect(sock, address)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure
