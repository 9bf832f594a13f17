"""Whom a login is charged to: the user that the broker takes from it, or nobody gets in."""

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.proxy_process import ProxyProcess
from support.raw import RawClient, message

from examples.devkit.broker import EmbeddedBroker
from proxy.wire.apis import METADATA, SASL_AUTHENTICATE, SASL_HANDSHAKE

USERS = {"alice": "alice-secret", "bob": "bob.secret"}
FAR_FUTURE_S = 4_102_444_800
"""The year 2100. For Kafka, a session of more than 292 years is over at once."""
MODULES = "org.apache.kafka.common.security"
PREFIX = "listener.name.sasl_plaintext"
MECHANISMS = {
    f"{PREFIX}.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,OAUTHBEARER",
    f"{PREFIX}.oauthbearer.sasl.jaas.config": (
        f"{MODULES}.oauthbearer.OAuthBearerLoginModule required "
        'unsecuredLoginStringClaim_sub="broker";'
    ),
}


@pytest.fixture(scope="module")
def logins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A broker that takes tokens as well."""
    folder = tmp_path_factory.mktemp("logins")
    with EmbeddedBroker(folder, sasl_users=USERS, properties=MECHANISMS) as broker:
        yield broker


def part(content: dict[str, Any]) -> str:
    return base64.b64encode(json.dumps(content).encode()).rstrip(b"=").decode()


def token(name: str) -> str:
    """Make a token as Kafka's own unsecured tokens are."""
    claims = {"sub": name, "iat": 1, "exp": FAR_FUTURE_S}
    return f"{part({'alg': 'none'})}.{part(claims)}."


def authenticate(client: RawClient, auth_bytes: bytes) -> Any:
    return client.ask(message(SASL_AUTHENTICATE, 2, auth_bytes=auth_bytes))


def log_in(client: RawClient, mechanism: str, first: bytes) -> Any:
    """Begin a login; return the broker's answer."""
    assert client.ask(message(SASL_HANDSHAKE, 1, mechanism=mechanism)).error_code == 0
    return authenticate(client, first)


def scram(client: RawClient, name: str, extensions: str = "") -> Any:
    """Log in by SCRAM-SHA-256, whatever the extensions."""
    bare = f"n={name},r=nonce{extensions}"
    answer = log_in(client, "SCRAM-SHA-256", f"n,,{bare}".encode())
    assert answer.error_code == 0, answer
    said = answer.auth_bytes.decode()
    nonce, salt, rounds = (word[2:] for word in said.split(","))
    final = f"c=biws,r={nonce}"
    key = hashlib.pbkdf2_hmac("sha256", USERS[name].encode(), base64.b64decode(salt), int(rounds))
    client_key = hmac.digest(key, b"Client Key", "sha256")
    stored = hashlib.sha256(client_key).digest()
    signed = hmac.digest(stored, f"{bare},{said},{final}".encode(), "sha256")
    proof = bytes(a ^ b for a, b in zip(client_key, signed, strict=True))
    return authenticate(client, f"{final},p={base64.b64encode(proof).decode()}".encode())


def expect_user(running: ProxyProcess, client: RawClient, user: str) -> None:
    client.ask(message(METADATA, 1, topics=[]))
    users = running.metrics().labels("bytes_total", "user")
    assert users <= {"", user}
    assert running.metrics().value("bytes_total", user=user, api="Metadata") > 0


def test_scram(logins: EmbeddedBroker, proxy: Callable[..., ProxyProcess]) -> None:
    running = proxy(bootstrap_servers=logins.sasl_bootstrap)
    with RawClient(running.bootstrap) as client:
        assert scram(client, "alice", ",tokenauth=false").error_code == 0
        expect_user(running, client, "alice")


def test_token(logins: EmbeddedBroker, proxy: Callable[..., ProxyProcess]) -> None:
    running = proxy(bootstrap_servers=logins.sasl_bootstrap)
    first = f"n,a=alice,\1host=h\1auth=bearer  {token('alice')}\1\1".encode()
    with RawClient(running.bootstrap) as client:
        assert log_in(client, "OAUTHBEARER", first).error_code == 0
        expect_user(running, client, "alice")


def test_a_token_that_the_broker_refuses(
    logins: EmbeddedBroker, proxy: Callable[..., ProxyProcess]
) -> None:
    """The client hears why: what it says to that is no login."""
    running = proxy(bootstrap_servers=logins.sasl_bootstrap)
    claims = part({"sub": "alice", "exp": 1})
    first = f"n,,\1auth=Bearer {part({'alg': 'none'})}.{claims}.\1\1".encode()
    with RawClient(running.bootstrap) as client:
        answer = log_in(client, "OAUTHBEARER", first)
        assert (answer.error_code, b"invalid_token" in answer.auth_bytes) == (0, True)
        assert "invalid_token" in authenticate(client, b"\1").error_message
    assert running.metrics().value("connections_rejected_total") == 0


TWO_TOKENS = f"n,,\1auth=Bearer {token('bob')}\1auth=Bearer {token('alice')}\1\1".encode()

UNCERTAIN = {  # mechanism, first message, whether this broker would take it
    "two tokens": ("OAUTHBEARER", TWO_TOKENS, True),
    "a delegation token and then not": (
        "SCRAM-SHA-256",
        b"n,,n=alice,r=nonce,tokenauth=true,tokenauth=false",
        True,
    ),
    "two SCRAM names": ("SCRAM-SHA-256", b"n,,n=bob,n=alice,r=nonce", False),
    "another authorization id": ("PLAIN", b"bob\0alice\0alice-secret", False),
    "a name that is not UTF-8": ("PLAIN", b"\0\xff\0alice-secret", False),
}


@pytest.mark.parametrize("name", UNCERTAIN)
def test_an_uncertain_user_does_not_get_to_the_broker(
    logins: EmbeddedBroker, proxy: Callable[..., ProxyProcess], name: str
) -> None:
    mechanism, first, is_taken = UNCERTAIN[name]
    with RawClient(logins.sasl_bootstrap) as client:
        assert (log_in(client, mechanism, first).error_code == 0) is is_taken
    running = proxy(bootstrap_servers=logins.sasl_bootstrap)
    with RawClient(running.bootstrap) as client, pytest.raises(ConnectionError):
        log_in(client, mechanism, first)
    running.until_counts("connections_rejected_total", 1, reason="bad_body")
    (line,) = running.logged("client rejected")
    assert "secret" not in json.dumps(line)


def test_a_client_id_that_is_not_utf8_is_served(proxy: Callable[..., ProxyProcess]) -> None:
    running = proxy()
    with RawClient(running.bootstrap) as client:
        frame = bytearray(client.encode(message(METADATA, 1, topics=[])))
        frame = frame.replace(b"raw", b"\xffaw")
        client.sock.sendall(frame)
        assert client.receive().brokers
    assert running.metrics().value("bytes_total", client_id="\ufffdaw") > 0
    assert json.loads(running.get("/v1/clients")[1])
