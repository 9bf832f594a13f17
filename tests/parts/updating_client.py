"""A TLS client that updates its keys when it is told to (RFC 8446, 4.6.3), by OpenSSL itself."""

import _ssl
import asyncio
import ctypes
import socket

BUFFER_BYTES = 1 << 20
NOT_REQUESTED, REQUESTED = 0, 1
"""Whether the peer is asked to update its keys as well."""

_SET_GROUPS_LIST = 92

_openssl = ctypes.CDLL(_ssl.__file__)
for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new", "BIO_new", "BIO_s_mem"):
    getattr(_openssl, name).restype = ctypes.c_void_p
_pointer = ctypes.c_void_p


class UpdatingClient:
    """Shows a server key updates, which Python's own client cannot."""

    def __init__(self, sock: socket.socket, groups: bytes = b"") -> None:
        self.sock = sock
        self._context = _pointer(_openssl.SSL_CTX_new(_pointer(_openssl.TLS_client_method())))
        self.ssl = _pointer(_openssl.SSL_new(self._context))
        memory = _pointer(_openssl.BIO_s_mem())
        self._come, self._to_send = (_pointer(_openssl.BIO_new(memory)) for _ in range(2))
        _openssl.SSL_set_bio(self.ssl, self._come, self._to_send)
        _openssl.SSL_set_connect_state(self.ssl)
        if groups:
            _openssl.SSL_ctrl(self.ssl, _SET_GROUPS_LIST, 0, groups)

    def hello(self) -> bytes:
        _openssl.SSL_do_handshake(self.ssl)
        return self.made()

    async def greet(self) -> None:
        loop = asyncio.get_running_loop()
        while _openssl.SSL_do_handshake(self.ssl) != 1:
            await loop.sock_sendall(self.sock, self.made())
            came = await loop.sock_recv(self.sock, BUFFER_BYTES)
            _openssl.BIO_write(self._come, came, len(came))
        await loop.sock_sendall(self.sock, self.made())

    def made(self) -> bytes:
        """Return what is to be sent."""
        made, buffer = b"", ctypes.create_string_buffer(BUFFER_BYTES)
        while (count := _openssl.BIO_read(self._to_send, buffer, BUFFER_BYTES)) > 0:
            made += buffer.raw[:count]
        return made

    def updates(self, count: int, answer: int = NOT_REQUESTED) -> bytes:
        for _ in range(count):
            _openssl.SSL_key_update(self.ssl, answer)
            _openssl.SSL_do_handshake(self.ssl)
        return self.made()

    def data(self, data: bytes) -> bytes:
        _openssl.SSL_write(self.ssl, data, len(data))
        return self.made()

    def close(self) -> None:
        _openssl.SSL_free(self.ssl)
        _openssl.SSL_CTX_free(self._context)
        self.sock.close()
