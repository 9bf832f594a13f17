"""The names in logins, against Kafka's own readers of the same bytes."""

import base64
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from py4j.java_gateway import JavaGateway
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from examples.devkit.ivy import pyspark_jars_dir
from examples.devkit.jars import kafka_jars
from examples.devkit.java import find_java
from proxy.wire.sasl import bearer_name, scram_name

EXAMPLES = 300
JVM_END_TIMEOUT_S = 30

REFUSALS = (Py4JError, PySparkException)
"""How Kafka's exceptions arrive. Once there is a session, Spark turns those of all JVMs into its
own, and may fail over what is not of its own JVM."""


@pytest.fixture(scope="module")
def security() -> Iterator[Any]:
    """Kafka's package `common.security`, in a Java process of its own."""
    (py4j,) = pyspark_jars_dir().glob("py4j-*.jar")
    gateway = JavaGateway.launch_gateway(
        jarpath=str(py4j),
        classpath=os.pathsep.join(map(str, kafka_jars())),
        java_path=str(find_java()),
        die_on_exit=True,
    )
    yield gateway.jvm.org.apache.kafka.common.security
    gateway.shutdown()
    gateway.java_process.stdin.close()
    gateway.java_process.wait(JVM_END_TIMEOUT_S)


def kafkas_scram_name(security: Any, message: bytes) -> str | None:
    """Do as ScramSaslServer does with a first message; ValueError when it refuses it."""
    scram = security.scram.internals
    try:
        first = scram.ScramMessages.ClientFirstMessage(message)
        name = str(scram.ScramFormatter.username(first.saslName()))
    except REFUSALS as error:
        raise ValueError from error
    if first.authorizationId() not in ("", name):
        raise ValueError
    return None if first.extensions().tokenAuthenticated() else name


def kafkas_bearer_name(security: Any, message: bytes) -> str:
    """Do as OAuthBearerSaslServer does with an unsecured token; ValueError when it refuses it."""
    bearer = security.oauthbearer.internals
    try:
        first = bearer.OAuthBearerClientInitialResponse(message)
        token = bearer.unsecured.OAuthBearerUnsecuredJws(first.tokenValue(), "sub", "scope")
    except REFUSALS as error:
        raise ValueError from error
    name = str(token.principalName())
    if first.authorizationId() not in ("", name):
        raise ValueError
    return name


def encoded(content: str) -> bytes:
    return base64.b64encode(content.encode()).rstrip(b"=")


def token(claims: str) -> bytes:
    return b".".join([encoded('{"alg":"none"}'), encoded(claims), b""])


SCRAM_PARTS = (
    b"n", b"", b"a=alice", b"a=bob", b"n=alice", b"n=alice", b"n=bob", b"n=a=2Cb=3D2C", b"n=a=2cb",
    b"n=", b"n=zo\xc3\xab", b"n=\xff", b"n=\n", b"r=abc", b"r=abc", b"r=a b", b"m=n=bob", b"m=",
    b"tokenauth=true", b"tokenauth=false", b"tokenauth=TRUE", b"TOKENAUTH=true", b"tokenauth=",
    b"tokenauth", b"x=y=z", b"n=carol", b"x1=y", b"=",
)  # fmt: skip
SCRAM_STARTS = (
    b"n,,n=alice,r=abc", b"n,a=alice,n=alice,r=abc", b"n,,m=x,n=bob,r=abc", b"n,", b"y,",
)  # fmt: skip

CLAIMS = (
    '{"sub":"alice","exp":9}', '{"sub":"bob","exp":9}', '{"sub":"alice","sub":"bob","exp":9}',
    '{"exp":9}', '{"sub":7,"exp":9}', '{"sub":true,"exp":9}', '{"sub":null,"exp":9}',
    '{"sub":" alice","exp":9}', '{"sub":"","exp":9}', '{"sub":["alice"],"exp":9}', '[]', '7', '',
    '{"sub":"alice","exp":9}{"sub":"bob"}', '{"sub":"alice","exp":9,"s\\u0075b":"bob"}',
    '{"sub":"zo\\u00eb","exp":9}', '{"sub":"zo\\ud800","exp":9}', '{"SUB":"bob","sub":"a","exp":9}',
)  # fmt: skip
BEARER_STARTS = (b"n,,\1", b"n,a=alice,\1", b"n,a=bob,\1", b"y,,\1", b"n,,", b"")
BEARER_KEYS = (b"auth=Bearer ", b"auth=bearer  ", b"auth=", b"auth=Basic ", b"Auth=Bearer ", b"x=")
BEARER_ENDS = (b"\1", b"\1", b"", b" \1", b"=\1")


def same_or_refused(ours: Any, kafkas: Any) -> None:
    """Require that what is not refused here is not read otherwise by Kafka."""
    try:
        name = ours()
    except ValueError:
        return
    assert name is None or name == kafkas()


@settings(max_examples=EXAMPLES)
@given(st.sampled_from(SCRAM_STARTS), st.lists(st.sampled_from(SCRAM_PARTS), max_size=5))
def test_scram(security: Any, start: bytes, parts: list[bytes]) -> None:
    message = b",".join([start, *parts])
    same_or_refused(lambda: scram_name(message), lambda: kafkas_scram_name(security, message))


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_bearer(security: Any, data: st.DataObject) -> None:
    message = data.draw(st.sampled_from(BEARER_STARTS))
    for _ in range(data.draw(st.integers(0, 3))):
        message += data.draw(st.sampled_from(BEARER_KEYS))
        message += token(data.draw(st.sampled_from(CLAIMS)))
        message += data.draw(st.sampled_from(BEARER_ENDS))
    message += data.draw(st.sampled_from((b"\1", b"\1", b"", b"\1x")))
    same_or_refused(lambda: bearer_name(message), lambda: kafkas_bearer_name(security, message))


TAKEN_LAST = {  # what is refused here, and whom Kafka would take
    "extension": (b"n,,n=alice,r=abc,tokenauth=true,tokenauth=false", "alice"),
    "token": (
        b"n,,\1auth=Bearer " + token(CLAIMS[0]) + b"\1auth=Bearer " + token(CLAIMS[1]) + b"\1\1",
        "bob",
    ),
    "claim": (b"n,,\1auth=Bearer " + token(CLAIMS[2]) + b"\1\1", "bob"),
}


@pytest.mark.parametrize("name", TAKEN_LAST)
def test_kafka_takes_the_last_of_two(security: Any, name: str) -> None:
    message, user = TAKEN_LAST[name]
    ours, kafkas = scram_name, kafkas_scram_name
    if name != "extension":
        ours, kafkas = bearer_name, kafkas_bearer_name
    assert kafkas(security, message) == user
    with pytest.raises(ValueError, match=r"twice|can't be read"):
        ours(message)


def test_a_padded_signature_is_refused_as_kafka_does(security: Any) -> None:
    message = b"n,,\1auth=Bearer " + token(CLAIMS[0]) + b"=\1\1"
    for name in (bearer_name, lambda told: kafkas_bearer_name(security, told)):
        with pytest.raises(ValueError, match=r"padded|^$"):
            name(message)
