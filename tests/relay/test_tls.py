"""What a client's certificate says of who it is."""

import pytest

from proxy.relay.tls import distinguished_name

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
