"""Three clients of one library for Python that never end: a process of its own, until stdin ends.

One reads a topic as a member of a group, one without a group, and one writes numbered records to
another topic, idempotently. Each line on stdout is what one of them has just done: `group NUMBER`
or `alone NUMBER` for a record that was read, `written NUMBER` for one that is acknowledged,
`failed NUMBER` for one that the library has given up. All settings are the library's defaults, but
for those that say what to do.
"""

import argparse
import asyncio
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import aiokafka
import confluent_kafka
import kafka

INTERVAL_S = 0.05
"""Between two records of a producer."""

POLL_S = 0.1
PARTITION = 0
AGAIN_S = 1.0
"""After a failure which an application would have to mend."""


@dataclass(frozen=True, slots=True)
class Names:
    """What the three are called, where they begin, what they read and write."""

    bootstrap: str
    group: str
    alone: str
    writer: str
    source: str
    sink: str


Role = Callable[[Names], None]


def main() -> None:
    """Run until stdin ends."""
    parser = argparse.ArgumentParser(prog="bench.lasting_clients", description=__doc__)
    parser.add_argument("--library", required=True, choices=LIBRARIES)
    library = add_names(parser)
    start_all(LIBRARIES[library.library], names_of(library))


def add_names(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the options, with those that `names_of` reads."""
    for name in Names.__dataclass_fields__:
        parser.add_argument(f"--{name}", required=True)
    return parser.parse_args()


def names_of(options: argparse.Namespace) -> Names:
    """Return what the options say."""
    return Names(*(getattr(options, name) for name in Names.__dataclass_fields__))


def start_all(roles: tuple[Role, ...], names: Names) -> None:
    """Run all roles until stdin ends; one that fails begins anew, as an application would."""
    for role in roles:
        threading.Thread(target=_last, args=(role, names), daemon=True).start()
    sys.stdin.read()


def tell(what: str, number: int | bytes | str) -> None:
    """Print a line."""
    sys.stdout.write(f"{what} {int(number)}\n")
    sys.stdout.flush()


def _last(role: Role, names: Names) -> None:
    while True:
        try:
            role(names)
        except Exception as error:
            print(f"{role} failed: {error!r}", file=sys.stderr, flush=True)
            print("again 0", flush=True)
            time.sleep(AGAIN_S)


def _librdkafka_options(names: Names, client_id: str) -> dict[str, Any]:
    return {"bootstrap.servers": names.bootstrap, "client.id": client_id}


def _librdkafka_read(what: str, consumer: Any) -> None:
    while True:
        for message in consumer.consume(100, POLL_S):
            if message.error() is None:
                tell(what, message.value())


def _librdkafka_group(names: Names) -> None:
    options = {"group.id": names.group, "auto.offset.reset": "earliest"}
    consumer = confluent_kafka.Consumer(_librdkafka_options(names, names.group) | options)
    consumer.subscribe([names.source])
    _librdkafka_read("group", consumer)


def _librdkafka_alone(names: Names) -> None:
    # It does not begin without the name of a group, but does not ask for it either.
    options = {"group.id": "none", "enable.auto.commit": False}
    consumer = confluent_kafka.Consumer(_librdkafka_options(names, names.alone) | options)
    start = confluent_kafka.TopicPartition(
        names.source, PARTITION, confluent_kafka.OFFSET_BEGINNING
    )
    consumer.assign([start])
    _librdkafka_read("alone", consumer)


def _librdkafka_writer(names: Names) -> None:
    options = _librdkafka_options(names, names.writer) | {"enable.idempotence": True}
    producer = confluent_kafka.Producer(options)

    def delivered(number: int, error: object, _message: object) -> None:
        tell("written" if error is None else "failed", number)

    for number in count():
        producer.produce(names.sink, b"%d" % number, on_delivery=partial(delivered, number))
        producer.poll(INTERVAL_S)


def _python_options(names: Names, client_id: str) -> dict[str, Any]:
    return {"bootstrap_servers": names.bootstrap, "client_id": client_id}


def _python_read(what: str, consumer: Any) -> None:
    while True:
        for messages in consumer.poll(POLL_S * 1000).values():
            for message in messages:
                tell(what, message.value)


def _python_group(names: Names) -> None:
    options = {"group_id": names.group, "auto_offset_reset": "earliest"}
    consumer = kafka.KafkaConsumer(names.source, **_python_options(names, names.group), **options)
    _python_read("group", consumer)


def _python_alone(names: Names) -> None:
    consumer = kafka.KafkaConsumer(**_python_options(names, names.alone))
    start = kafka.TopicPartition(names.source, PARTITION)
    consumer.assign([start])
    consumer.seek_to_beginning(start)
    _python_read("alone", consumer)


def _python_writer(names: Names) -> None:
    options = _python_options(names, names.writer)
    producer = kafka.KafkaProducer(**options, enable_idempotence=True)
    for number in count():
        sent = producer.send(names.sink, b"%d" % number)
        sent.add_callback(lambda _, number=number: tell("written", number))
        sent.add_errback(lambda _, number=number: tell("failed", number))
        time.sleep(INTERVAL_S)


async def _aiokafka_read(what: str, consumer: Any) -> None:
    async for message in consumer:
        tell(what, message.value)


def _aiokafka_group(names: Names) -> None:
    async def run() -> None:
        options = {"group_id": names.group, "auto_offset_reset": "earliest"}
        options |= _python_options(names, names.group)
        consumer = aiokafka.AIOKafkaConsumer(names.source, **options)
        await consumer.start()
        await _aiokafka_read("group", consumer)

    asyncio.run(run())


def _aiokafka_alone(names: Names) -> None:
    async def run() -> None:
        consumer = aiokafka.AIOKafkaConsumer(**_python_options(names, names.alone))
        await consumer.start()
        start = aiokafka.TopicPartition(names.source, PARTITION)
        consumer.assign([start])
        await consumer.seek_to_beginning(start)
        await _aiokafka_read("alone", consumer)

    asyncio.run(run())


def _aiokafka_writer(names: Names) -> None:
    def delivered(number: int, sent: asyncio.Future[Any]) -> None:
        is_written = not sent.cancelled() and sent.exception() is None
        tell("written" if is_written else "failed", number)

    async def run() -> None:
        options = _python_options(names, names.writer)
        producer = aiokafka.AIOKafkaProducer(**options, enable_idempotence=True)
        await producer.start()
        for number in count():
            sent = await producer.send(names.sink, b"%d" % number)
            sent.add_done_callback(partial(delivered, number))
            await asyncio.sleep(INTERVAL_S)

    asyncio.run(run())


LIBRARIES: dict[str, tuple[Role, ...]] = {
    "librdkafka": (_librdkafka_group, _librdkafka_alone, _librdkafka_writer),
    "kafka-python": (_python_group, _python_alone, _python_writer),
    "aiokafka": (_aiokafka_group, _aiokafka_alone, _aiokafka_writer),
}

if __name__ == "__main__":
    main()
