"""A broker's settings as the file that Kafka reads."""

from pathlib import Path
from typing import Any

import pytest

from examples.devkit.broker_settings import BrokerSettings, Quorum, new_cluster_id

OWN = Quorum("cluster", 1, 20_003)
OTHER = Quorum("cluster", 7, 20_003)
PLAIN = "PLAINTEXT://127.0.0.1:20001"
SASL = "SASL_PLAINTEXT://127.0.0.1:20002"
CONTROLLER = "CONTROLLER://127.0.0.1:20003"


def settings(**parts: Any) -> BrokerSettings:
    values: dict[str, Any] = {
        "node_id": 1,
        "quorum": OWN,
        "port": 20_001,
        "sasl_port": None,
        "sasl_users": {},
        "storage_dir": Path("/data/storage"),
        "properties": {},
    }
    return BrokerSettings(**(values | parts))


def read(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines())


@pytest.mark.parametrize(
    ("parts", "expected", "ports"),
    [
        (
            {},
            {
                "listeners": f"{PLAIN},{CONTROLLER}",
                "advertised.listeners": PLAIN,
                "process.roles": "broker,controller",
                "controller.quorum.voters": "1@127.0.0.1:20003",
                "node.id": "1",
                "log.dirs": "/data/storage",
                "broker.session.timeout.ms": "2000",
            },
            (20_001, 20_003),
        ),
        (
            {"quorum": OTHER},
            {
                "listeners": PLAIN,
                "process.roles": "broker",
                "controller.quorum.voters": "7@127.0.0.1:20003",
            },
            (20_001,),
        ),
        (
            {"sasl_port": 20_002, "sasl_users": {"alice": "secret", "bob": "b.c"}},
            {
                "listeners": f"{PLAIN},{SASL},{CONTROLLER}",
                "advertised.listeners": f"{PLAIN},{SASL}",
                "listener.name.sasl_plaintext.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256",
                "listener.name.sasl_plaintext.plain.sasl.jaas.config": (
                    "org.apache.kafka.common.security.plain.PlainLoginModule required "
                    r"user_alice=\"secret\" user_bob=\"b.c\";"
                ),
            },
            (20_001, 20_002, 20_003),
        ),
        (
            {"properties": {"num.partitions": "9", "broker.session.timeout.ms": "9000"}},
            {"num.partitions": "9", "broker.session.timeout.ms": "9000"},
            (20_001, 20_003),
        ),
        (
            {"storage_dir": Path("/Bücher\\a")},
            {"log.dirs": r"/B\u00fccher\\a"},
            (20_001, 20_003),
        ),
    ],
    ids=["own controller", "other controller", "sasl", "properties win", "escapes"],
)
def test_file(parts: dict[str, Any], expected: dict[str, str], ports: tuple[int, ...]) -> None:
    made = settings(**parts)
    values = read(made.file_text())
    assert {key: values[key] for key in expected} == expected
    assert made.ports == ports


def test_each_storage_has_an_id_of_its_own() -> None:
    first, second = (read(settings(node_id=2).meta_text()) for _ in range(2))
    assert first.pop("directory.id") != second.pop("directory.id")
    assert first == second == {"version": "1", "node.id": "2", "cluster.id": "cluster"}


@pytest.mark.parametrize(
    "users",
    [{"a b": "x"}, {"a": 'x";'}, {"": "x"}, {"a": ""}],
    ids=["space", "quote", "no name", "no password"],
)
def test_odd_sasl_users_are_refused(users: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="SASL"):
        settings(sasl_port=20_002, sasl_users=users)


def test_cluster_ids_are_22_characters_and_no_options() -> None:
    ids = {new_cluster_id() for _ in range(500)}
    assert len(ids) == 500
    assert {len(cluster_id) for cluster_id in ids} == {22}
    assert not any(cluster_id.startswith("-") for cluster_id in ids)
