"""When certificates expire, read from the files that a configuration names."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from proxy.config.certificates import certificate_expiries, not_after_s
from proxy.config.load import load_config

SOON = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)
PAST_2050 = datetime(2061, 2, 3, tzinfo=UTC)
CONFIG = """
cluster:
  bootstrap_servers: [localhost:9092]
  tls: {ca_file: cas.pem, cert_file: soon.pem, key_file: soon.key}
listeners:
  - name: plain
    bind: 127.0.0.1:19092
    advertised_host: localhost
    broker_ports: 19100-19109
  - name: secret
    bind: 127.0.0.1:19093
    advertised_host: localhost
    broker_ports: 19200-19209
    tls: {cert_file: late.pem, key_file: late.key, ca_file: ca.pem}
state: {kind: memory}
"""


def issue(authority: trustme.CA, folder: Path, name: str, expiry: datetime) -> bytes:
    """Write a certificate with its chain, and its key; return it in DER form."""
    issued = authority.issue_cert("localhost", not_after=expiry)
    issued.private_key_pem.write_to_path(folder / f"{name}.key")
    for pem in issued.cert_chain_pems:
        pem.write_to_path(folder / f"{name}.pem", append=True)
    return x509.load_pem_x509_certificate(issued.cert_chain_pems[0].bytes()).public_bytes(
        Encoding.DER
    )


@pytest.mark.parametrize("expiry", [SOON, PAST_2050], ids=["two digits", "four digits"])
def test_the_end_of_a_certificate(tmp_path, expiry):
    assert not_after_s(issue(trustme.CA(), tmp_path, "a", expiry)) == expiry.timestamp()


@pytest.mark.parametrize("length", [0, 1, 5, 40, 100])
def test_what_is_no_certificate_is_refused(tmp_path, length):
    with pytest.raises((ValueError, IndexError)):
        not_after_s(issue(trustme.CA(), tmp_path, "a", SOON)[:length])


def test_all_files_of_a_configuration(tmp_path):
    authority, other = trustme.CA(), trustme.CA()
    issue(authority, tmp_path, "soon", SOON)
    issue(authority, tmp_path, "late", SOON + timedelta(days=30))
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for each in (authority, other):
        each.cert_pem.write_to_path(tmp_path / "cas.pem", append=True)
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    expiries = {
        (role, listener): at_s for role, listener, at_s in certificate_expiries(load_config(path))
    }
    of_authority = x509.load_pem_x509_certificate(authority.cert_pem.bytes()).not_valid_after_utc
    assert expiries == {
        ("client", ""): SOON.timestamp(),
        ("broker_ca", ""): of_authority.timestamp(),
        ("server", "secret"): (SOON + timedelta(days=30)).timestamp(),
        ("client_ca", "secret"): of_authority.timestamp(),
    }
