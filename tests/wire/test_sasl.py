"""Who the client is: only the name that the broker has accepted counts."""

import base64
import json
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.wire.apis import APIS, SASL_AUTHENTICATE, SASL_HANDSHAKE
from proxy.wire.frames import MalformedFrame, MalformedResponse, parse_request_head
from proxy.wire.sasl import SaslExchange

FAILED = 58
VERSIONS = range(3)
SECRET = "open-sesame"


def request_frame(api_key, version, **fields):
    message = APIS[api_key].request(version=version, **fields)
    message.with_header(correlation_id=1, client_id="c")
    return bytes(message.encode(header=True, framed=True))


def send(exchange, api_key, version, **fields):
    frame = request_frame(api_key, version, **fields)
    exchange.request(parse_request_head(frame, max_request_bytes=10**6), frame)


def handshake(exchange, mechanism, version=1):
    send(exchange, SASL_HANDSHAKE, version, mechanism=mechanism)


def answer(exchange, auth_bytes=b"", error=0, version=1):
    message = APIS[SASL_AUTHENTICATE].response(
        version=version, error_code=error, error_message=None, auth_bytes=auth_bytes
    )
    message.with_header(correlation_id=1)
    exchange.response(SASL_AUTHENTICATE, version, bytes(message.encode(header=True, framed=True)))


def bearer(claims, prefix="n,,\1auth=Bearer ", suffix="\1\1"):
    content = claims if isinstance(claims, bytes) else json.dumps(claims).encode()
    payload = base64.urlsafe_b64encode(content).rstrip(b"=").decode()
    return f"{prefix}e30.{payload}.{SECRET}{suffix}".encode()


NAMES = {  # mechanism, the client's first message, the broker's last answer, the name
    "PLAIN": ("PLAIN", b"\0alice\0" + SECRET.encode(), b"", "alice"),
    "PLAIN with authzid": ("PLAIN", b"alice\0alice\0secret", b"", "alice"),
    "PLAIN in UTF-8": ("PLAIN", "\0zoë\0secret".encode(), b"", "zoë"),
    "PLAIN in small letters": ("plain", b"\0alice\0secret", b"", "alice"),
    "PLAIN without password": ("PLAIN", b"\0alice", b"", None),
    "PLAIN without name": ("PLAIN", b"\0\0secret", b"", None),
    "PLAIN with too many parts": ("PLAIN", b"\0a\0b\0c", b"", None),
    "PLAIN, not UTF-8": ("PLAIN", b"\0\xff\xfe\0secret", b"", None),
    "PLAIN, empty": ("PLAIN", b"", b"", None),
    "SCRAM": ("SCRAM-SHA-256", b"n,,n=alice,r=abc", b"v=xyz", "alice"),
    "SCRAM 512": ("SCRAM-SHA-512", b"n,,n=alice,r=abc", b"v=xyz", "alice"),
    "SCRAM with authzid": ("SCRAM-SHA-256", b"n,a=bob,n=alice,r=abc", b"v=xyz", "alice"),
    "SCRAM, escaped": ("SCRAM-SHA-256", b"n,,n=a=2Cb=3Dc=3D2C,r=abc", b"v=xyz", "a,b=c=2C"),
    "SCRAM, in between": ("SCRAM-SHA-256", b"n,,n=alice,r=abc", b"r=abcd,s=x,i=4096", None),
    "SCRAM, broker's error": ("SCRAM-SHA-256", b"n,,n=alice,r=abc", b"e=other-error", None),
    "SCRAM, delegation token": (
        "SCRAM-SHA-256",
        b"n,,n=tokenid,r=abc,tokenauth=true",
        b"v=xyz",
        None,
    ),
    "SCRAM without name": ("SCRAM-SHA-256", b"n,,r=abc", b"v=xyz", None),
    "OAUTHBEARER": ("OAUTHBEARER", bearer({"sub": "alice", "exp": 1}), b"", "alice"),
    "OAUTHBEARER with authzid": (
        "OAUTHBEARER",
        bearer({"sub": "alice"}, prefix="n,a=alice,\1host=h\1auth=bearer "),
        b"",
        "alice",
    ),
    "OAUTHBEARER, token refused": (
        "OAUTHBEARER",
        bearer({"sub": "alice"}),
        b'{"status":"invalid_token"}',
        None,
    ),
    "OAUTHBEARER without sub": ("OAUTHBEARER", bearer({"name": "alice"}), b"", None),
    "OAUTHBEARER, sub is a number": ("OAUTHBEARER", bearer({"sub": 5}), b"", None),
    "OAUTHBEARER, claims are a list": ("OAUTHBEARER", bearer(["sub"]), b"", None),
    "OAUTHBEARER, not JSON": ("OAUTHBEARER", bearer(b"sub=alice"), b"", None),
    "OAUTHBEARER, deep JSON": ("OAUTHBEARER", bearer(b"[" * 100000), b"", None),
    "OAUTHBEARER, opaque token": ("OAUTHBEARER", b"n,,\1auth=Bearer abc\1\1", b"", None),
    "OAUTHBEARER, bad base64": ("OAUTHBEARER", b"n,,\1auth=Bearer a.b.c\1\1", b"", None),
    "OAUTHBEARER, no token": ("OAUTHBEARER", b"n,,\1\1", b"", None),
    "GSSAPI": ("GSSAPI", b"\x60\x82alice", b"", None),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_principal(name, version):
    mechanism, first, last, expected = NAMES[name]
    exchange = SaslExchange()
    handshake(exchange, mechanism)
    assert exchange.mechanism == mechanism.upper()
    send(exchange, SASL_AUTHENTICATE, version, auth_bytes=first)
    assert exchange.principal is None
    assert SECRET not in repr(exchange)
    answer(exchange, last, version=version)
    assert exchange.principal == expected


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_refused_client_has_no_name(name, version):
    mechanism, first, last, _ = NAMES[name]
    exchange = SaslExchange()
    handshake(exchange, mechanism)
    send(exchange, SASL_AUTHENTICATE, version, auth_bytes=first)
    answer(exchange, last, error=FAILED, version=version)
    assert exchange.principal is None


def test_scram_in_full():
    exchange = SaslExchange()
    handshake(exchange, "SCRAM-SHA-256")
    send(exchange, SASL_AUTHENTICATE, 2, auth_bytes=b"n,,n=alice,r=abc")
    answer(exchange, b"r=abcdef,s=c2FsdA==,i=4096", version=2)
    assert exchange.principal is None
    send(exchange, SASL_AUTHENTICATE, 2, auth_bytes=b"c=biws,r=abcdef,p=cHJvb2Y=")
    answer(exchange, b"v=c2ln", version=2)
    assert exchange.principal == "alice"


def test_a_name_sent_later_is_not_taken_for_the_one_accepted():
    exchange = SaslExchange()
    handshake(exchange, "PLAIN")
    send(exchange, SASL_AUTHENTICATE, 1, auth_bytes=b"\0alice\0right")
    handshake(exchange, "PLAIN")
    send(exchange, SASL_AUTHENTICATE, 1, auth_bytes=b"\0bob\0wrong")
    answer(exchange)
    assert exchange.principal == "alice"
    answer(exchange, error=FAILED)
    assert exchange.principal == "alice"


def test_authenticating_again():
    exchange = SaslExchange()
    for name in (b"alice", b"carol"):
        handshake(exchange, "SCRAM-SHA-256")
        send(exchange, SASL_AUTHENTICATE, 1, auth_bytes=b"n,,n=" + name + b",r=abc")
        answer(exchange, b"v=x")
        assert exchange.principal == name.decode()


def test_without_handshake_there_is_no_name():
    exchange = SaslExchange()
    send(exchange, SASL_AUTHENTICATE, 1, auth_bytes=b"\0alice\0secret")
    answer(exchange)
    assert exchange.principal is None


def test_a_raw_exchange_is_seen():
    exchange = SaslExchange()
    handshake(exchange, "PLAIN", version=1)
    assert exchange.is_raw is False
    handshake(exchange, "PLAIN", version=0)
    assert exchange.is_raw is True


def test_other_apis_are_ignored():
    exchange = SaslExchange()
    frame = pack(">ihhih", 10, 3, 1, 1, -1)
    exchange.request(parse_request_head(frame, max_request_bytes=100), frame)
    exchange.response(3, 1, b"")
    exchange.response(SASL_AUTHENTICATE, 1, b"")
    assert repr(exchange) == "SaslExchange(mechanism=None, principal=None)"


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("body", [b"", b"\0", b"\0\2\xff\xfe"])
def test_malformed_handshake(version, body):
    frame = pack(">ihhih", 10 + len(body), SASL_HANDSHAKE, version, 1, -1) + body
    with pytest.raises(MalformedFrame) as raised:
        SaslExchange().request(parse_request_head(frame, max_request_bytes=100), frame)
    assert raised.value.reason == "bad_body"


def test_malformed_authenticate():
    exchange = SaslExchange()
    handshake(exchange, "PLAIN")
    for version in (1, 9):
        frame = pack(">ihhih", 11, SASL_AUTHENTICATE, version, 1, -1) + b"\0"
        with pytest.raises(MalformedFrame):
            exchange.request(parse_request_head(frame, max_request_bytes=100), frame)
    send(exchange, SASL_AUTHENTICATE, 1, auth_bytes=b"\0alice\0secret")
    with pytest.raises(MalformedResponse):
        exchange.response(SASL_AUTHENTICATE, 1, pack(">ii", 5, 1) + b"\0")


@given(mechanism=st.sampled_from(["PLAIN", "SCRAM-SHA-256", "OAUTHBEARER"]), data=st.binary())
def test_any_message_is_a_name_or_none(mechanism, data):
    exchange = SaslExchange()
    handshake(exchange, mechanism)
    send(exchange, SASL_AUTHENTICATE, 2, auth_bytes=data)
    answer(exchange, b"v=x" if mechanism.startswith("SCRAM") else b"", version=2)
    assert exchange.principal is None or exchange.principal
