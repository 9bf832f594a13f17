"""Requests of real clients take the quick path in the proxy as its users run it, with a rule."""

import json
from collections.abc import Callable
from pathlib import Path

from confluent_kafka import Consumer, Producer, TopicPartition
from support.operating import running
from support.proxy_process import ProxyProcess, config, until

from proxy.devkit.broker import EmbeddedBroker

COUNTED = """
import atexit, collections, json
from proxy.relay.requests import RequestFlow
calls = collections.Counter()
def count(name):
    called = getattr(RequestFlow, name)
    def counted(*arguments):
        calls[name] += 1
        return called(*arguments)
    setattr(RequestFlow, name, counted)
count("_pass_on")
count("_take")
def write():
    with open({path!r}, "w") as file:
        json.dump(calls, file)
atexit.register(write)
"""
"""How often the quick path is tried, and how often a request is read whole."""

REQUESTS = 100
"""Of each kind."""
OTHERS = 150
"""Requests at the most that are read whole, of more than 3 x REQUESTS: the first ones, what clients
find out, and those that came together with another one."""
BOUND = "10MiB"
"""Far above what is read and written, and far below what 50 MiB, a consumer's limit for a Fetch,
would need to be granted whole."""


def test_requests_of_real_clients_take_the_quick_path(
    kafka: EmbeddedBroker, topic: Callable[..., str], tmp_path: Path
) -> None:
    rule = {"client-id": "c", "consumer_byte_rate": BOUND, "producer_byte_rate": BOUND}
    counted = tmp_path / "calls.json"
    process = ProxyProcess(
        config(kafka.bootstrap, rules=[rule]),
        tmp_path / "proxy",
        changes=COUNTED.format(path=str(counted)),
    )
    partition = TopicPartition(topic(1), 0, 0)
    with running(process) as proxy:
        _write(proxy, partition.topic)
        _read(proxy, partition)
    calls = json.loads(counted.read_text())
    assert calls["_pass_on"] >= 2 * REQUESTS
    assert calls["_take"] <= OTHERS


def _write(proxy: ProxyProcess, topic: str) -> None:
    producer = Producer({"bootstrap.servers": proxy.bootstrap, "client.id": "c", "linger.ms": 0})
    for _ in range(REQUESTS):
        producer.produce(topic, b"record", partition=0)
        assert producer.flush(30) == 0


def _read(proxy: ProxyProcess, partition: TopicPartition) -> None:
    consumer = Consumer(
        {
            "bootstrap.servers": proxy.bootstrap,
            "client.id": "c",
            "group.id": "g",
            "fetch.wait.max.ms": 5,
            "enable.auto.commit": False,
        }
    )
    consumer.assign([partition])
    for _ in range(REQUESTS):
        (found,) = consumer.offsets_for_times([partition], timeout=30)
        assert found.offset == 0
    assert until(lambda: consumer.poll(1), "a record")
    until(
        lambda: proxy.metrics().value("requests_total", api="Fetch") >= REQUESTS,
        "fetches at the end of the log",
    )
    consumer.close()
