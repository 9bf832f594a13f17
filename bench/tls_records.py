"""TLS 1.3 as the load uses it: content is counted by its records' headers and not decrypted.

Decrypting would cost the client as much as encrypting costs what it measures, on fewer cores.
"""

import ssl

HEADER_BYTES = 5
LENGTH_AT = 3
# Behind the content of a record: its type and the tag of the cipher.
OVERHEAD_BYTES = 17
APPLICATION_DATA = 23


def tls_context(ca_file: str) -> ssl.SSLContext:
    """Trust one authority, whatever the host is named; nothing older than TLS 1.3."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.load_verify_locations(ca_file)
    return context


class TlsRecords:
    """Counts the content of a stream of records, from the first of a response on.

    After the handshake and its tickets all records are content, and whole writes end with one.
    """

    def __init__(self) -> None:
        self.content_bytes = 0
        """Of all records that are whole."""
        self._head = bytearray()
        self._left_bytes = 0

    @property
    def begun_bytes(self) -> int:
        """How much was taken of the record that is not whole, without its header."""
        length = int.from_bytes(self._head[LENGTH_AT:], "big")
        return length - self._left_bytes if self._left_bytes else 0

    def take(self, data: memoryview) -> None:
        """Take the next bytes; raises ConnectionError for a record that is no content."""
        at, end = 0, len(data)
        while at < end:
            if not self._left_bytes:
                head = data[at : at + HEADER_BYTES - len(self._head)]
                self._head += head
                at += len(head)
                if len(self._head) < HEADER_BYTES:
                    return
                if self._head[0] != APPLICATION_DATA:
                    raise ConnectionError(f"a TLS record of type {self._head[0]}")
                self._left_bytes = int.from_bytes(self._head[LENGTH_AT:], "big")
            taken = min(self._left_bytes, end - at)
            at += taken
            self._left_bytes -= taken
            if not self._left_bytes:
                self.content_bytes += int.from_bytes(self._head[LENGTH_AT:], "big") - OVERHEAD_BYTES
                self._head.clear()
