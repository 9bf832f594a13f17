"""Which files a configuration names, and what they say."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme

from proxy.config import load_config
from proxy.config.secrets import Secrets, named_files, read_secrets
from proxy.quota.values import BadValueError

CONFIG = """\
cluster:
  bootstrap_servers: [broker-1:9092]
  tls: {ca_file: ca.pem, cert_file: tls.crt, key_file: tls.key}
  sasl: {mechanism: PLAIN, username: anna, password_file: password}
listeners:
  - name: plain
    bind: 127.0.0.1:19092
    advertised_host: h
    broker_ports: 19100-19199
  - name: tls
    bind: 127.0.0.1:19093
    advertised_host: h
    broker_ports: 19200-19299
    tls: {cert_file: tls.crt, key_file: tls.key, ca_file: ca.pem}
admin: {token_file: token}
"""

END = datetime(2031, 5, 1, 12, tzinfo=UTC)

Read = Callable[[], Secrets]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "password").write_text("first\n")
    (tmp_path / "token").write_text(" a-token\n")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issue(tmp_path, authority)
    config = load_config(tmp_path / "config.yaml")
    return lambda: read_secrets(config)


def issue(folder: Path, authority: trustme.CA) -> None:
    made = authority.issue_cert("localhost", not_after=END)
    made.private_key_pem.write_to_path(folder / "tls.key")
    made.cert_chain_pems[0].write_to_path(folder / "tls.crt")


def test_all_that_is_named_is_found(read: Read, tmp_path: Path) -> None:
    found = {path.name for path in named_files(load_config(tmp_path / "config.yaml"))}
    assert found == {"ca.pem", "tls.crt", "tls.key", "password", "token"}


def test_what_they_say(read: Read, tmp_path: Path) -> None:
    secrets = read()
    assert secrets.listeners.keys() == {"tls"}
    assert secrets.upstream is not None
    assert (secrets.password, secrets.tokens) == ("first", {"admin": "a-token"})
    shown = [(each.section, each.role, Path(each.file).name) for each in secrets.certificates]
    assert shown == [
        ("listeners 'tls'", "server", "tls.crt"),
        ("listeners 'tls'", "client_ca", "ca.pem"),
        ("cluster.tls", "client", "tls.crt"),
        ("cluster.tls", "broker_ca", "ca.pem"),
    ]
    own = {each.not_after_s for each in secrets.certificates if each.role in ("server", "client")}
    assert own == {END.timestamp()}
    assert "a-token" not in repr(secrets)
    assert "first" not in repr(secrets)


def test_the_digest_tells_of_another_certificate_only(read: Read, tmp_path: Path) -> None:
    before = read()
    (tmp_path / "password").write_text("second\n")
    assert read().tls_digest == before.tls_digest
    issue(tmp_path, trustme.CA())
    assert read().tls_digest != before.tls_digest


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tls.crt", "", "holds no certificate in PEM form"),
        ("tls.key", "", "holds no private key in PEM form"),
        ("ca.pem", "garbage", "holds no certificate in PEM form"),
        ("password", "", "is empty"),
        ("token", "\n", "is empty"),
        ("token", b"\xff", "is not UTF-8"),
    ],
)
def test_a_bad_file(read: Read, tmp_path: Path, name: str, content: str | bytes, said: str) -> None:
    data = content.encode() if isinstance(content, str) else content
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadValueError, match=said):
        read()


def test_a_key_of_another_certificate(read: Read, tmp_path: Path) -> None:
    other = trustme.CA().issue_cert("localhost")
    other.private_key_pem.write_to_path(tmp_path / "tls.key")
    with pytest.raises(BadValueError, match="does not belong to the certificate"):
        read()
