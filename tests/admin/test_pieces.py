"""Answers that are written piece by piece are those written at once."""

from admin_world import CONSUMER, HOSTILE, MIB, AdminWorld, Ask
from aiohttp.helpers import DEFAULT_CHUNK_SIZE
from parts.quota_world import sensor_collector
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from metrics.member_names import ONLY_MEMBER
from proxy.admin.replies import SAMPLES_AT_ONCE, scrape_pieces
from proxy.quota.entities import ClientIdentity
from proxy.quota.rules import Rule


class Measured(AdminWorld):
    """A world whose sensors are shown, with more clients than fit into one piece."""

    def __init__(self) -> None:
        super().__init__((Rule(client_id="<default>", bounds={CONSUMER: MIB}),))
        self.prometheus.register(sensor_collector(self.quotas, lambda: self.now_ms))
        self.names = [*(f"client-{n}" for n in range(3 * SAMPLES_AT_ONCE)), HOSTILE, 'a"\n\\b']
        for name in self.names:
            self.connect(name)(20 * MIB)
            self.count(name)

    def count(self, name: str) -> None:
        self.instruments.bytes_total.of("default", "", name, "Fetch").inc(len(name))

    def forget(self, name: str) -> None:
        self.instruments.bytes_total.forget("default", "", name)


def exposed(world: AdminWorld, member: str = ONLY_MEMBER) -> list[tuple[str, str, list[Sample]]]:
    """Return what `generate_latest` writes, read and with the label `member`."""
    return [
        (family.name, family.type, [labelled(sample, member) for sample in family.samples])
        for family in text_string_to_metric_families(generate_latest(world.prometheus).decode())
    ]


def labelled(sample: Sample, member: str) -> Sample:
    return sample._replace(labels={**sample.labels, "member": member})


def read(text: str) -> list[tuple[str, str, list[Sample]]]:
    families = text_string_to_metric_families(text)
    return [(family.name, family.type, family.samples) for family in families]


def test_metrics_are_those_of_generate_latest_with_the_member():
    world = Measured()
    found = list(scrape_pieces(world.prometheus, 'a"\n\\/0'))
    assert read(b"".join(found).decode()) == exposed(world, 'a"\n\\/0')
    assert max(piece.count(b"\n") for piece in found) <= SAMPLES_AT_ONCE
    assert b"".join(found).count(b"kafka_quota_proxy_rate_bytes{") == len(world.names)


def test_clients_that_come_and_go_between_two_pieces_do_not_disturb_the_others():
    world = Measured()
    found = []
    for number, piece in enumerate(scrape_pieces(world.prometheus, ONLY_MEMBER)):
        found.append(piece)
        world.forget(f"client-{3 * SAMPLES_AT_ONCE - 1 - number}")
        world.count(f"new-{number}")
        world.quotas.client(ClientIdentity("default", None, f"new-{number}")).charge(
            CONSUMER, 1.0, world.now_ms
        )
    lines = b"".join(found).splitlines()
    series = [line.rpartition(b" ")[0] for line in lines if not line.startswith(b"#")]
    assert len(series) == len(set(series))
    rates = [line for line in series if line.startswith(b"kafka_quota_proxy_rate_bytes{")]
    assert sum(b"new-" not in line for line in rates) == len(world.names)


async def test_the_server_gives_the_same(world: AdminWorld, ask: Ask):
    world.connect("etl-orders")(MIB)
    answer = await ask("GET", "/metrics")
    assert read(answer.text) == exposed(world)
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    answer = await ask("GET", "/v1/status")
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"


async def test_a_long_answer_goes_out_in_pieces(world: AdminWorld, ask: Ask):
    for number in range(6000):
        world.instruments.bytes_total.of("default", "", f"client-{number}", "Fetch").inc()
    answer = await ask("GET", "/metrics")
    assert read(answer.text) == exposed(world)
    length = answer.headers["Content-Length"]
    assert int(length) == len(answer.text.encode()) > 2 * DEFAULT_CHUNK_SIZE
    head = await ask("HEAD", "/metrics")
    assert (head.text, head.headers["Content-Length"]) == ("", length)
