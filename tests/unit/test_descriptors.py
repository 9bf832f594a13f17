"""However few files the system allows, one is left for an operator, and people are told."""

from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from proxy.config import Config, load_config
from proxy.config.descriptors import (
    FILES_PER_CLIENT,
    OTHER_FILES,
    DescriptorShares,
    share_descriptors,
)
from proxy.relay.abandoned import MAX_ABANDONED
from proxy.relay.pump import MAX_PIPES

PORTS = 101
"""Of the listener below."""

DOCUMENT = """\
cluster: {bootstrap_servers: [broker-1:9092]}
listeners:
  - {name: a, bind: 127.0.0.1:19092, advertised_host: h, broker_ports: 19100-19199}
limits: {max_connections: 1000}
admin: {max_connections: 40}
"""
NEEDED = PORTS + OTHER_FILES + 40 + 1000 * FILES_PER_CLIENT


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path: Path = tmp_path_factory.mktemp("descriptors") / "proxy.yaml"
    path.write_text(DOCUMENT)
    return load_config(path)


def shares_of(config: Config, allowed: int) -> DescriptorShares:
    """Return how so many files are shared."""
    with patch("resource.getrlimit", return_value=(allowed, allowed)):
        return share_descriptors(config)


def test_enough_is_enough(config: Config) -> None:
    for allowed in (NEEDED, 10 * NEEDED, -1):
        shares = shares_of(config, allowed)
        assert (shares.clients, shares.admin, shares.needed) == (1000, 40, NEEDED)
        assert shares.hint is None


def test_too_few_are_told_of_with_what_is_needed(config: Config) -> None:
    shares = shares_of(config, NEEDED - 1)
    assert (shares.clients, shares.admin) == (999, 40)
    assert shares.hint is not None
    assert f"raise the hard limit (ulimit -Hn, LimitNOFILE=) to {NEEDED}" in shares.hint


def test_the_systems_own_limit_is_asked_for(config: Config) -> None:
    assert share_descriptors(config).allowed > 1


@given(st.integers(1, 5000))
def test_clients_never_take_what_is_for_others(config: Config, allowed: int) -> None:
    shares = shares_of(config, allowed)
    assert shares.clients >= 1
    assert shares.admin >= 1
    if shares.clients > 1:
        used = shares.clients * FILES_PER_CLIENT + shares.admin + PORTS + OTHER_FILES
        assert used <= allowed


def test_pipes_are_among_the_other_files() -> None:
    assert OTHER_FILES > 2 * MAX_PIPES + MAX_ABANDONED


def test_the_document_is_what_is_counted() -> None:
    listener = yaml.safe_load(DOCUMENT)["listeners"][0]
    first, last = map(int, listener["broker_ports"].split("-"))
    assert 1 + last - first + 1 == PORTS
