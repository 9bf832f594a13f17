"""Options that tie a query to a client."""

import pytest

from proxy.spark import client_options

VARIABLE = "KAFKA_QUOTA_PROXY_BOOTSTRAP_SERVERS"


@pytest.mark.parametrize(
    ("argument", "variable", "expected"),
    [
        pytest.param(None, None, "localhost:19092", id="default"),
        pytest.param(None, "", "localhost:19092", id="empty variable is none"),
        pytest.param(None, "proxy:1", "proxy:1", id="variable"),
        pytest.param("a:1,b:2", "proxy:1", "a:1,b:2", id="argument wins"),
        pytest.param("[::1]:9092", None, "[::1]:9092", id="IPv6"),
    ],
)
def test_bootstrap_servers(
    monkeypatch: pytest.MonkeyPatch, argument: str | None, variable: str | None, expected: str
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    options = client_options("orders", argument)
    assert options == {"kafka.bootstrap.servers": expected, "kafka.client.id": "orders"}


def test_by_group() -> None:
    options = client_options("orders", "proxy:1", by_group=True)
    assert options == {"kafka.bootstrap.servers": "proxy:1", "groupIdPrefix": "orders"}


@pytest.mark.parametrize("name", ["", " ", "two words", "a,b", "line\n"])
def test_bad_name(name: str) -> None:
    with pytest.raises(ValueError, match="name is not empty and has no spaces or commas"):
        client_options(name)


@pytest.mark.parametrize("servers", ["", "proxy", "proxy:", ":1", "a:1,", "a:1, b:2", "a:x"])
def test_bad_bootstrap_servers(servers: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        client_options("orders", servers)


def test_bad_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "proxy")
    with pytest.raises(ValueError, match="HOST:PORT"):
        client_options("orders")
