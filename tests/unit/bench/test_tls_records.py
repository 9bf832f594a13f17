"""Counting what is in TLS records, without decrypting them."""

import ssl

import pytest
import trustme

from bench.tls_records import TlsRecords, tls_context

CONTENT_BYTES = 100_000


@pytest.fixture(scope="module")
def stream(tmp_path_factory) -> bytes:
    """What a server sends with one response, after the handshake and its tickets."""
    authority = trustme.CA()
    ca_file = tmp_path_factory.mktemp("tls") / "ca.pem"
    authority.cert_pem.write_to_path(str(ca_file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = tls_context(str(ca_file)).wrap_bio(to_client, to_server)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    server.write(b"first")
    assert client.read() == b"first"
    server.write(bytes(CONTENT_BYTES))
    return to_client.read()


@pytest.mark.parametrize("piece_bytes", [1, 7, 16_384, 1_000_000])
def test_content_is_counted_from_pieces_of_any_size(stream, piece_bytes):
    records, view = TlsRecords(), memoryview(stream)
    for at in range(0, len(stream), piece_bytes):
        to_come = CONTENT_BYTES - records.content_bytes - records.begun_bytes
        assert to_come <= len(stream) - at  # a client that waits for so much does not wait in vain
        assert records.content_bytes < CONTENT_BYTES
        records.take(view[at : at + piece_bytes])
    assert records.content_bytes == CONTENT_BYTES


def test_what_is_no_content_is_refused(stream):
    alert = b"\x15" + stream[1:]
    with pytest.raises(ConnectionError, match="type 21"):
        TlsRecords().take(memoryview(alert))
