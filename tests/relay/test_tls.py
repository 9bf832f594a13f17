"""What a certificate says: who a client is, and until when."""

from datetime import UTC, datetime, timedelta

import pytest
import trustme

from proxy.relay.tls import distinguished_name, not_after

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
