"""What becomes of the proxy's own login when a broker refuses, hangs up, or talks nonsense."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from kafka.protocol.sasl import SaslAuthenticateResponse, SaslHandshakeResponse
from relaylab.lab import until
from structlog.testing import capture_logs

from proxy.cluster.kafka_client import Bootstrap
from proxy.cluster.login import Credentials, Login
from proxy.cluster.upstream import UpstreamError
from proxy.relay.brokers import BrokerConnector

HOST = "127.0.0.1"
PATIENT_S, IMPATIENT_S = 5.0, 0.1
DEAD = (HOST, 1)

OFFER = SaslHandshakeResponse(version=1, error_code=0, mechanisms=["PLAIN"]).encode()
REFUSAL = SaslAuthenticateResponse(
    version=0, error_code=58, error_message="not you", auth_bytes=b""
).encode()
GARBAGE = b"\x7f\xff\xff\xff"


class Broker:
    """Gives these answers, one to each request; then it hangs up, or says nothing more."""

    def __init__(self, *answers: bytes, silent: bool = False) -> None:
        self.answers = answers
        self.silent = silent
        self.visits = 0
        self.gone = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.visits += 1
        for answer in self.answers:
            length = int.from_bytes(await reader.readexactly(4), "big")
            request = await reader.readexactly(length)
            correlation_id = request[4:8]  # behind key and version
            writer.write(struct.pack(">i", 4 + len(answer)) + correlation_id + answer)
        if self.silent:
            while await reader.read(1024):
                pass
        writer.close()
        self.gone += 1


@asynccontextmanager
async def serving(broker: Broker) -> AsyncIterator[tuple[str, int]]:
    async with await asyncio.start_server(broker.serve, HOST, 0) as server:
        yield server.sockets[0].getsockname()[:2]


def login(on_refused: Callable[[], None] = lambda: None) -> Login:
    return Login(Credentials("PLAIN", "proxy", "secret"), on_refused)


@pytest.mark.parametrize(
    ("answers", "limit_s", "reason", "message"),
    [
        ([OFFER, REFUSAL], PATIENT_S, "login_refused", 'user "proxy" by PLAIN refused: not'),
        ([OFFER], PATIENT_S, "closed", "closed the connection"),
        ([], PATIENT_S, "closed", ""),
        ([GARBAGE], PATIENT_S, "bad_response", "no SaslHandshakeResponse"),
        ([OFFER, GARBAGE], PATIENT_S, "bad_response", "no SaslAuthenticateResponse"),
        ([OFFER], IMPATIENT_S, "timeout", "not logged in after 0.1 s"),
        ([bytes(1 << 20)], PATIENT_S, "bad_response", "a response of 1048580 bytes"),
    ],
    ids=["refused", "hangs up", "hangs up at once", "garbage", "garbage later", "silent", "long"],
)
async def test_a_login_that_fails(
    answers: list[bytes], limit_s: float, reason: str, message: str
) -> None:
    broker = Broker(*answers, silent=reason == "timeout")
    async with serving(broker) as address:
        with pytest.raises(UpstreamError) as caught:
            await Bootstrap([address], None, limit_s, login()).connect()
        assert caught.value.reason == reason
        assert f"{HOST}:{address[1]}: " in str(caught.value)
        assert message in str(caught.value)
        await until(lambda: broker.gone == 1)


@pytest.mark.parametrize("refuses_first", [True, False])
async def test_a_refusal_is_said_also_when_other_servers_are_down(refuses_first: bool) -> None:
    async with serving(Broker(OFFER, REFUSAL)) as address:
        servers = (address, DEAD) if refuses_first else (DEAD, address)
        with pytest.raises(UpstreamError) as caught:
            await Bootstrap(servers, None, PATIENT_S, login()).connect()
        assert caught.value.reason == "login_refused"


async def test_a_refusal_is_logged_once_and_the_broker_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.relay.brokers.RETRY_INTERVAL_S", 0.0)
    broker, probes, refusals = Broker(OFFER, REFUSAL), 0, []

    class Probed(Bootstrap):
        async def connect(self, *args, **options):
            nonlocal probes
            probes += 1
            return await super().connect(*args, **options)

    async with serving(broker) as address:
        own = login(lambda: refusals.append(1))
        brokers = BrokerConnector(Probed((DEAD, address), None, PATIENT_S, own))
        with capture_logs() as logs:
            monitor = asyncio.create_task(brokers.monitor())
            await until(lambda: probes > 10)
            monitor.cancel()
            await asyncio.gather(monitor, return_exceptions=True)
    assert not brokers.reachable
    assert f"{HOST}:{address[1]}: " in (brokers.refusal or "")
    assert (broker.visits, len(refusals)) == (1, 1)
    assert [line["event"] for line in logs] == ["cluster not reachable"]
