"""The proxy's own logins: what is said, by the RFCs' examples, and what a refusal leads to."""

import hashlib
import subprocess
import sys
import traceback
from collections.abc import Callable, Generator
from typing import Any

import pytest
from aiokafka.conn import ScramAuthenticator
from kafka.protocol.sasl import SaslAuthenticateResponse, SaslHandshakeResponse

from proxy.cluster.login import LOGIN_RETRY_S, MAX_SCRAM_ITERATIONS, Credentials, Login
from proxy.cluster.upstream import LOGIN_REFUSED, UpstreamError

Exchange = Generator[Any, Any, None]

BROKER, OTHER = ("broker-1", 9092), ("broker-2", 9092)
PASSWORD = "pencil"

RFC_5802 = (
    "SCRAM-SHA-1",
    "fyko+d2lbbFgONRv9qkxdawL",
    [
        "n,,n=user,r=fyko+d2lbbFgONRv9qkxdawL",
        "r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,s=QSXCR+Q6sek8bf92,i=4096",
        "c=biws,r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,p=v0X8v3Bz2T0CJGbJQyF0X+HI4Ts=",
        "v=rmF9pqV8S7suAoZWja4dJRkFsKQ=",
    ],
)
"""Section 5. Kafka does not offer it: what is shown is that the messages are those of SCRAM."""

RFC_7677 = (
    "SCRAM-SHA-256",
    "rOprNGfwEbeRWgbNEkqO",
    [
        "n,,n=user,r=rOprNGfwEbeRWgbNEkqO",
        "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
        "c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
        "p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=",
        "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=",
    ],
)
"""Section 3."""


class Refusals:
    """A login whose clock is set by hand."""

    def __init__(self, mechanism: str = "PLAIN") -> None:
        self.now_s = 0.0
        self.count = 0
        credentials = Credentials(mechanism, "user", PASSWORD)
        self.login = Login(credentials, self._refused, lambda: self.now_s)

    def _refused(self) -> None:
        self.count += 1


@pytest.fixture
def refusals() -> Refusals:
    return Refusals()


def offered(*mechanisms: str, error_code: int = 0) -> SaslHandshakeResponse:
    return SaslHandshakeResponse(version=1, error_code=error_code, mechanisms=mechanisms)


def said(token: bytes = b"", error_code: int = 0, message: str | None = None) -> object:
    return SaslAuthenticateResponse(
        version=0, error_code=error_code, error_message=message, auth_bytes=token
    )


def opened(login: Login) -> Exchange:
    """Get as far as the handshake."""
    exchange = login.exchange(BROKER)
    next(exchange)
    return exchange


def begun(login: Login) -> Exchange:
    """Get as far as the first token."""
    exchange = opened(login)
    exchange.send(offered(login.credentials.mechanism))
    return exchange


def test_plain_is_name_and_password_once() -> None:
    exchange = Refusals().login.exchange(BROKER)
    handshake = next(exchange)
    assert (handshake.mechanism, handshake.API_VERSION) == ("PLAIN", 1)
    assert exchange.send(offered("PLAIN")).auth_bytes == b"user\0user\0pencil"
    assert exchange.send(said()) is None


@pytest.mark.parametrize(("mechanism", "nonce", "messages"), [RFC_5802, RFC_7677])
def test_scram_is_as_in_the_rfcs(
    mechanism: str, nonce: str, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiokafka.conn.uuid.uuid4", lambda: nonce)
    monkeypatch.setitem(ScramAuthenticator.MECHANISMS, "SCRAM-SHA-1", hashlib.sha1)
    first, challenge, proof, verdict = messages
    exchange = Refusals(mechanism).login.exchange(BROKER)
    next(exchange)
    assert exchange.send(offered(mechanism)).auth_bytes == first.encode()
    assert exchange.send(said(challenge.encode())).auth_bytes == proof.encode()
    assert exchange.send(said(verdict.encode())) is None


CORRECT = "correct cluster.sasl.username, or the password in cluster.sasl.password_file"


@pytest.mark.parametrize(
    ("begin", "response", "reason"),
    [
        (
            begun,
            said(error_code=58, message="Invalid username or password"),
            f"Invalid username or password; {CORRECT}",
        ),
        (begun, said(error_code=58), f"SASL_AUTHENTICATION_FAILED; {CORRECT}"),
        (
            opened,
            offered("GSSAPI", "OAUTHBEARER", error_code=33),
            "the broker offers GSSAPI, OAUTHBEARER; correct cluster.sasl.mechanism",
        ),
        (
            opened,
            offered(error_code=34),
            "this port takes no logins; name a SASL listener's port in "
            "cluster.bootstrap_servers, or remove cluster.sasl",
        ),
    ],
    ids=["wrong password", "no words", "other mechanisms", "no SASL"],
)
def test_a_refusal_says_whom_why_and_how_to_mend_it(
    begin: Callable[[Login], Exchange], response: object, reason: str, refusals: Refusals
) -> None:
    exchange = begin(refusals.login)
    with pytest.raises(UpstreamError) as caught:
        exchange.send(response)
    assert str(caught.value) == f'broker-1:9092: login of user "user" by PLAIN refused: {reason}'
    assert caught.value.reason == LOGIN_REFUSED
    assert refusals.count == 1


@pytest.mark.parametrize(
    "challenge",
    [b"", b"\xff", b"r=stranger,s=AAAA,i=4096", b"e=other-error"],
    ids=["nothing", "no text", "a nonce of its own", "an error"],
)
def test_who_does_not_know_the_password_is_no_broker(challenge: bytes) -> None:
    refusals = Refusals("SCRAM-SHA-512")
    exchange = begun(refusals.login)
    with pytest.raises(UpstreamError, match="does not prove that it knows the password"):
        exchange.send(said(challenge))
    assert refusals.count == 1


def test_a_broker_does_not_say_for_how_long_the_proxy_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mechanism, nonce, (_, challenge, _, _) = RFC_7677
    monkeypatch.setattr("aiokafka.conn.uuid.uuid4", lambda: nonce)
    exchange = begun(Refusals(mechanism).login)
    longer = challenge.replace("4096", str(MAX_SCRAM_ITERATIONS + 1))
    with pytest.raises(UpstreamError, match="1048577 iterations, more than 1048576"):
        exchange.send(said(longer.encode()))


def test_a_wrong_signature_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism, nonce, (_, challenge, _, _) = RFC_7677
    monkeypatch.setattr("aiokafka.conn.uuid.uuid4", lambda: nonce)
    exchange = begun(Refusals(mechanism).login)
    exchange.send(said(challenge.encode()))
    with pytest.raises(UpstreamError, match="does not prove that it knows the password"):
        exchange.send(said(b"v=AAAA"))


def test_who_refused_is_left_alone_for_a_while(refusals: Refusals) -> None:
    refused = refusals.login.refused(refusals.login.credentials, BROKER, 58, "no")
    refusals.login.check(OTHER)
    refusals.now_s = LOGIN_RETRY_S - 0.1
    with pytest.raises(UpstreamError) as caught:
        refusals.login.check(BROKER)
    assert str(caught.value) == str(refused)
    refusals.now_s = LOGIN_RETRY_S
    refusals.login.check(BROKER)
    assert refusals.count == 1


def test_another_password_is_tried_at_once(refusals: Refusals) -> None:
    refusals.login.refused(refusals.login.credentials, BROKER, 58, "no")
    refusals.login.renew(PASSWORD)
    with pytest.raises(UpstreamError):
        refusals.login.check(BROKER)
    refusals.login.renew("crayon")
    refusals.login.check(BROKER)
    exchange = refusals.login.exchange(BROKER)
    next(exchange)
    assert exchange.send(offered("PLAIN")).auth_bytes == b"user\0user\0crayon"


def test_a_refusal_of_the_password_before_does_not_count_for_the_next_one(
    refusals: Refusals,
) -> None:
    """A login takes a while: the file with the password may change meanwhile."""
    exchange = begun(refusals.login)
    refusals.login.renew("crayon")
    with pytest.raises(UpstreamError):
        exchange.send(said(error_code=58, message="no"))
    refusals.login.check(BROKER)


def test_the_password_is_not_shown(refusals: Refusals) -> None:
    login = refusals.login
    exchange = begun(login)
    with pytest.raises(UpstreamError) as caught:
        exchange.send(said(error_code=58, message="no"))
    shown = "".join(traceback.format_exception(caught.value))
    assert PASSWORD not in f"{login.credentials!r} {login!r} {exchange!r} {shown}"


FAILING = """
import structlog
from proxy.cli import configure_logging

def log_in(password):
    raise ValueError("of ours")

configure_logging("console")
try:
    log_in("pen" + "cil")
except ValueError as error:
    structlog.get_logger().error("unexpected error", exc_info=error)
"""


def test_a_traceback_for_people_shows_no_variables() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILING], capture_output=True, text=True, check=True
    )
    assert "ValueError: of ours" in done.stderr
    assert PASSWORD not in done.stderr
