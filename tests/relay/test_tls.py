"""What a certificate says: who a client is, and until when."""

import asyncio
import socket
from datetime import UTC, datetime, timedelta

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtensionOID, NameOID
from relaylab.lab import LIMIT_S

from proxy.cluster.dial import tls_handshake
from proxy.relay.tls import distinguished_name, not_after, principal_of

NAMES = {"CN": "commonName", "OU": "organizationalUnitName", "O": "organizationName"}


def subject(*relative_names: str | tuple[str, ...]) -> tuple[tuple[tuple[str, str], ...], ...]:
    """A name as OpenSSL gives it: from the root of the tree."""
    return tuple(
        tuple((NAMES.get(name, name), value) for name, value in (p.split("=", 1) for p in rdn))
        for rdn in ([part] if isinstance(part, str) else part for part in relative_names)
    )


@pytest.mark.parametrize(
    ("names", "principal"),
    [
        pytest.param(["O=acme", "OU=etl", "CN=alice"], "CN=alice,OU=etl,O=acme", id="reversed"),
        pytest.param(["CN=a, b"], r"CN=a\, b", id="a comma"),
        pytest.param(["CN=alice,OU=admin"], r"CN=alice\,OU=admin", id="posing as a unit"),
        pytest.param([r"CN=a+b\c"], r"CN=a\+b\\c", id="plus and backslash"),
        pytest.param(["CN= a "], r"CN=\ a\ ", id="spaces at the ends"),
        pytest.param(["CN=#1"], r"CN=\#1", id="a number sign first"),
        pytest.param([("CN=a", "OU=b")], "CN=a+OU=b", id="two values in one"),
        pytest.param(["domainComponent=example", "userId=7"], "UID=7,DC=example", id="others"),
        pytest.param(["emailAddress=a@b"], "emailAddress=a@b", id="not in the RFC"),
        pytest.param([], None, id="none"),
    ],
)
def test_the_principal_is_written_as_kafka_does(names, principal):
    assert distinguished_name(subject(*names)) == principal


@pytest.mark.parametrize("mail", [b"mail@x.y", b"m\xfcl@x.yz"], ids=["ASCII", "Latin-1"])
async def test_a_client_is_known_whatever_else_its_certificate_says(certificates, tmp_path, mail):
    """Python's `getpeercert` cannot read another name that is not UTF-8, and so nothing."""
    authority, now = x509.load_pem_x509_certificate(certificates.ca.read_bytes()), datetime.now(UTC)
    key = load_pem_private_key(certificates.key.read_bytes(), None)
    oids = NameOID.ORGANIZATION_NAME, NameOID.EMAIL_ADDRESS, NameOID.COMMON_NAME
    names = zip(oids, ("a, b", "a@b", "é"), strict=True)
    other_names = bytes((0x30, len(mail) + 2, 0x81, len(mail))) + mail
    cert = (
        x509.CertificateBuilder()
        .issuer_name(authority.subject)
        .subject_name(x509.Name([x509.NameAttribute(*each) for each in names]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, other_names), False
        )
        .sign(
            load_pem_private_key(certificates.authority.private_key_pem.bytes(), None),
            hashes.SHA256(),
        )
    )
    path = tmp_path / "client.pem"
    path.write_bytes(cert.public_bytes(Encoding.PEM))
    context = certificates.client()
    context.load_cert_chain(path, certificates.key)
    client, near = socket.socketpair()
    for each in (client, near):
        each.setblocking(False)
    both = await asyncio.wait_for(
        asyncio.gather(
            tls_handshake(client, context, server_side=False, server_hostname="localhost"),
            tls_handshake(near, certificates.server(wants_certificate=True), server_side=True),
        ),
        LIMIT_S,
    )
    assert principal_of(both[1].tls) == r"CN=é,emailAddress=a@b,O=a\, b"
    for each in both:
        each.close()


@pytest.mark.parametrize("year", [1955, 1999, 2031, 2049, 2050, 2120])
def test_when_a_certificate_expires(tmp_path, year):
    """In either form of time, behind comments, and of several the first."""
    authority, end = trustme.CA(), datetime(year, 5, 1, 12, 13, 14, tzinfo=UTC)
    begin = datetime(1950, 1, 1, tzinfo=UTC)
    ends = (end + timedelta(days=1), end)
    made = [
        authority.issue_cert("localhost", not_before=begin, not_after=each)
        .cert_chain_pems[0]
        .bytes()
        for each in ends
    ]
    path = tmp_path / "tls.crt"
    path.write_bytes(b"of M\xfcller\n" + b"and\n".join(made))
    assert not_after(path) == end.timestamp()


def test_what_is_no_certificate_does_not_expire(tmp_path):
    path = tmp_path / "tls.crt"
    path.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    with pytest.raises(ValueError, match="PEM"):
        not_after(path)
