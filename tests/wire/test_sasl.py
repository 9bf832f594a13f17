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


def tls_handshake(exchange, mechanism, version=1):
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


SCRAM = "SCRAM-SHA-256"
SCRAM_DONE = b"v=xyz"

NAMES = {  # mechanism, the client's first message, the broker's last answer, the name
    "PLAIN": ("PLAIN", b"\0alice\0" + SECRET.encode(), b"", "alice"),
    "PLAIN with authzid": ("PLAIN", b"alice\0alice\0secret", b"", "alice"),
    "PLAIN in UTF-8": ("PLAIN", "\0zoë\0secret".encode(), b"", "zoë"),
    "PLAIN in small letters": ("plain", b"\0alice\0secret", b"", "alice"),
    "PLAIN, password in Latin-1": ("PLAIN", b"\0alice\0s\xe9cret", b"", "alice"),
    "SCRAM": (SCRAM, b"n,,n=alice,r=abc", SCRAM_DONE, "alice"),
    "SCRAM 512": ("SCRAM-SHA-512", b"n,,n=alice,r=abc", SCRAM_DONE, "alice"),
    "SCRAM with authzid": (SCRAM, b"n,a=alice,n=alice,r=abc", SCRAM_DONE, "alice"),
    "SCRAM, reserved extension": (SCRAM, b"n,,m=n=bob,n=alice,r=abc", SCRAM_DONE, "alice"),
    "SCRAM, escaped": (SCRAM, b"n,,n=a=2Cb=3Dc=3D2C,r=abc", SCRAM_DONE, "a,b=c=2C"),
    "SCRAM, in between": (SCRAM, b"n,,n=alice,r=abc", b"r=abcd,s=x,i=4096", None),
    "SCRAM, broker's error": (SCRAM, b"n,,n=alice,r=abc", b"e=other-error", None),
    "SCRAM, delegation token": (SCRAM, b"n,,n=id,r=abc,tokenauth=true", SCRAM_DONE, None),
    "SCRAM, token in capitals": (SCRAM, b"n,,n=id,r=abc,tokenauth=TRUE", SCRAM_DONE, None),
    "SCRAM, no token": (SCRAM, b"n,,n=alice,r=abc,tokenauth=false", SCRAM_DONE, "alice"),
    "SCRAM, another extension": (SCRAM, b"n,,n=alice,r=abc,TOKENAUTH=true", SCRAM_DONE, "alice"),
    "SCRAM, token before": (SCRAM, b"n,,m=tokenauth=true,n=alice,r=abc", SCRAM_DONE, "alice"),
    "SCRAM, name behind": (SCRAM, b"n,,n=alice,r=abc,n=bob", SCRAM_DONE, "alice"),
    "OAUTHBEARER": ("OAUTHBEARER", bearer({"sub": "alice", "exp": 1}), b"", "alice"),
    "OAUTHBEARER with authzid": (
        "OAUTHBEARER",
        bearer({"sub": "alice"}, prefix="n,a=alice,\1host=h\1auth=bearer  "),
        b"",
        "alice",
    ),
    "OAUTHBEARER with extensions": (
        "OAUTHBEARER",
        bearer({"sub": "zoë"}, suffix="\1logicalCluster=lkc-1\1Auth=Bearer x\1\1"),
        b"",
        "zoë",
    ),
    "OAUTHBEARER, token refused": (
        "OAUTHBEARER",
        bearer({"sub": "alice"}),
        b'{"status":"invalid_token"}',
        None,
    ),
    "OAUTHBEARER, reason read": ("OAUTHBEARER", b"\1", b"", None),
    "GSSAPI": ("GSSAPI", b"\x60\x82alice", b"", None),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_principal(name, version):
    mechanism, first, last, expected = NAMES[name]
    exchange = SaslExchange()
    tls_handshake(exchange, mechanism)
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
    tls_handshake(exchange, mechanism)
    send(exchange, SASL_AUTHENTICATE, version, auth_bytes=first)
    answer(exchange, last, error=FAILED, version=version)
    assert exchange.principal is None


def doubled(*tokens):
    """Make an OAUTHBEARER message with several `auth` keys."""
    messages = [bearer({"sub": name}, prefix="auth=Bearer ", suffix="\1") for name in tokens]
    return b"n,,\1" + b"".join(messages) + b"\1"


UNCERTAIN = {  # mechanism, a first message that Kafka refuses or another reader reads otherwise
    "PLAIN without password": ("PLAIN", b"\0alice"),
    "PLAIN, empty password": ("PLAIN", b"\0alice\0"),
    "PLAIN without name": ("PLAIN", b"\0\0secret"),
    "PLAIN with too many parts": ("PLAIN", b"\0a\0b\0c"),
    "PLAIN with another authzid": ("PLAIN", b"bob\0alice\0secret"),
    "PLAIN, not UTF-8": ("PLAIN", b"\0\xff\xfe\0secret"),
    "PLAIN, authzid not UTF-8": ("PLAIN", b"\xff\0\xfe\0secret"),
    "PLAIN, half a surrogate pair": ("PLAIN", b"\0\xed\xa0\x80\0secret"),
    "PLAIN, empty": ("PLAIN", b""),
    "SCRAM without name": (SCRAM, b"n,,r=abc"),
    "SCRAM, empty name": (SCRAM, b"n,,n=,r=abc"),
    "SCRAM with two names": (SCRAM, b"n,,n=alice,n=bob,r=abc"),
    "SCRAM with another authzid": (SCRAM, b"n,a=bob,n=alice,r=abc"),
    "SCRAM, extension twice": (SCRAM, b"n,,n=alice,r=a,tokenauth=true,tokenauth=false"),
    "SCRAM, extension twice and apart": (SCRAM, b"n,,n=a,r=a,tokenauth=true,x=y,tokenauth=false"),
    "SCRAM, extension before the nonce": (SCRAM, b"n,,n=alice,tokenauth=true,r=abc"),
    "SCRAM, extension without value": (SCRAM, b"n,,n=alice,r=abc,tokenauth="),
    "SCRAM, bare comma": (SCRAM, b"n,,n=alice,r=abc,"),
    "SCRAM, another escape": (SCRAM, b"n,,n=a=41,r=abc"),
    "SCRAM, small escape": (SCRAM, b"n,,n=a=2c,r=abc"),
    "SCRAM, not ASCII": (SCRAM, "n,,n=zoë,r=abc".encode()),
    "SCRAM, not UTF-8": (SCRAM, b"n,,n=\xff,r=abc"),
    "SCRAM with channel binding": (SCRAM, b"p=tls-unique,,n=alice,r=abc"),
    "SCRAM, line after": (SCRAM, b"n,,n=alice,r=abc\n"),
    "OAUTHBEARER, two tokens": ("OAUTHBEARER", doubled("alice", "bob")),
    "OAUTHBEARER, one token twice": ("OAUTHBEARER", doubled("alice", "alice")),
    "OAUTHBEARER, extension twice": (
        "OAUTHBEARER",
        bearer({"sub": "alice"}, suffix="\1host=a\1host=b\1\1"),
    ),
    "OAUTHBEARER, another authzid": (
        "OAUTHBEARER",
        bearer({"sub": "alice"}, prefix="n,a=bob,\1auth=Bearer "),
    ),
    "OAUTHBEARER, another scheme": (
        "OAUTHBEARER",
        bearer({"sub": "alice"}, prefix="n,,\1auth=Basic "),
    ),
    "OAUTHBEARER, space behind": ("OAUTHBEARER", bearer({"sub": "alice"}, suffix=" \1\1")),
    "OAUTHBEARER, more behind": ("OAUTHBEARER", bearer({"sub": "alice"}, suffix="\1\1x")),
    "OAUTHBEARER without end": ("OAUTHBEARER", bearer({"sub": "alice"}, suffix="\1")),
    "OAUTHBEARER, two subs": ("OAUTHBEARER", bearer(b'{"sub":"alice","sub":"bob"}')),
    "OAUTHBEARER, two subs, escaped": ("OAUTHBEARER", bearer(b'{"sub":"a","s\\u0075b":"b"}')),
    "OAUTHBEARER, two claims": ("OAUTHBEARER", bearer(b'{"sub":"a"}{"sub":"b"}')),
    "OAUTHBEARER, sub is a number": ("OAUTHBEARER", bearer({"sub": 5})),
    "OAUTHBEARER, sub is true": ("OAUTHBEARER", bearer({"sub": True})),
    "OAUTHBEARER, sub is null": ("OAUTHBEARER", bearer({"sub": None})),
    "OAUTHBEARER, blank sub": ("OAUTHBEARER", bearer({"sub": " "})),
    "OAUTHBEARER, space around sub": ("OAUTHBEARER", bearer({"sub": "alice\n"})),
    "OAUTHBEARER, half a pair": ("OAUTHBEARER", bearer(b'{"sub":"\\ud800"}')),
    "OAUTHBEARER, claims are a list": ("OAUTHBEARER", bearer(["sub"])),
    "OAUTHBEARER, UTF-16": ("OAUTHBEARER", bearer('{"sub":"alice"}'.encode("utf-16"))),
    "OAUTHBEARER, not JSON": ("OAUTHBEARER", bearer(b"sub=alice")),
    "OAUTHBEARER, deep JSON": ("OAUTHBEARER", bearer(b"[" * 100000)),
    "OAUTHBEARER, bad base64": ("OAUTHBEARER", b"n,,\1auth=Bearer a.b.c\1\1"),
    "OAUTHBEARER, base64 with holes": (
        "OAUTHBEARER",
        b"n,,\1auth=Bearer e30.~eyJzdWIiOiJhbGljZSJ9.x\1\1",
    ),
    "OAUTHBEARER, no token": ("OAUTHBEARER", b"n,,\1\1"),
    "OAUTHBEARER, empty": ("OAUTHBEARER", b""),
}


@pytest.mark.parametrize("name", UNCERTAIN)
def test_a_login_without_a_certain_name_is_refused(name):
    mechanism, first = UNCERTAIN[name]
    exchange = SaslExchange()
    tls_handshake(exchange, mechanism)
    with pytest.raises(MalformedFrame) as raised:
        send(exchange, SASL_AUTHENTICATE, 2, auth_bytes=first)
    assert raised.value.reason == "bad_body"
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("version", "body"),
    [
        (1, pack(">i", 14) + b"\0alice\0secretX" + b"more"),
        (2, b"\x8e\0" + b"\0alice\0secret" + b"\0"),
        (2, b"\x8e\x80\x80\x80\x10" + b"\0alice\0secret" + b"\0"),
        (2, b"\x0e" + b"\0alice\0secret" + b"\1\0\1x"),
    ],
    ids=["bytes behind", "long length", "length of more than 32 bits", "tagged field"],
)
def test_a_login_that_no_codec_writes_is_refused(version, body):
    exchange = SaslExchange()
    tls_handshake(exchange, "PLAIN")
    tags = b"\0" if version == max(VERSIONS) else b""
    head = pack(">hhih", SASL_AUTHENTICATE, version, 1, -1) + tags
    frame = pack(">i", len(head + body)) + head + body
    with pytest.raises(MalformedFrame):
        exchange.request(parse_request_head(frame, max_request_bytes=100), frame)


@pytest.mark.parametrize(
    "first",
    [
        bearer({"name": "alice"}),
        b"n,,\1auth=Bearer abc\1\1",
        b"n,,\1auth=Bearer a.b.c.d.e\1\1",
    ],
    ids=["without sub", "opaque", "encrypted"],
)
def test_tokens_that_only_their_broker_can_read_pass_without_a_name(first):
    exchange = SaslExchange()
    tls_handshake(exchange, "OAUTHBEARER")
    send(exchange, SASL_AUTHENTICATE, 2, auth_bytes=first)
    answer(exchange)
    assert exchange.principal is None


def test_a_token_after_a_refused_one():
    exchange = SaslExchange()
    tls_handshake(exchange, "OAUTHBEARER")
    send(exchange, SASL_AUTHENTICATE, 1, auth_bytes=bearer({"sub": "alice"}))
    answer(exchange, b'{"status":"invalid_token"}')
    send(exchange, SASL_AUTHENTICATE, 1, auth_bytes=bearer({"sub": "carol"}))
    answer(exchange)
    assert exchange.principal == "carol"


@pytest.mark.parametrize(("extension", "name"), [("", "alice"), (",tokenauth=true", None)])
def test_scram_in_full(extension, name):
    exchange = SaslExchange()
    tls_handshake(exchange, "SCRAM-SHA-256")
    send(exchange, SASL_AUTHENTICATE, 2, auth_bytes=b"n,,n=alice,r=abc" + extension.encode())
    answer(exchange, b"r=abcdef,s=c2FsdA==,i=4096", version=2)
    assert exchange.principal is None
    send(exchange, SASL_AUTHENTICATE, 2, auth_bytes=b"c=biws,r=abcdef,p=cHJvb2Y=")
    answer(exchange, b"v=c2ln", version=2)
    assert exchange.principal == name


def test_a_name_sent_later_is_not_taken_for_the_one_accepted():
    exchange = SaslExchange()
    tls_handshake(exchange, "PLAIN")
    send(exchange, SASL_AUTHENTICATE, 1, auth_bytes=b"\0alice\0right")
    tls_handshake(exchange, "PLAIN")
    send(exchange, SASL_AUTHENTICATE, 1, auth_bytes=b"\0bob\0wrong")
    answer(exchange)
    assert exchange.principal == "alice"
    answer(exchange, error=FAILED)
    assert exchange.principal == "alice"


def test_authenticating_again():
    exchange = SaslExchange()
    for name in (b"alice", b"carol"):
        tls_handshake(exchange, "SCRAM-SHA-256")
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
    tls_handshake(exchange, "PLAIN", version=1)
    assert exchange.is_raw is False
    tls_handshake(exchange, "PLAIN", version=0)
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
    tls_handshake(exchange, "PLAIN")
    for version in (1, 9):
        frame = pack(">ihhih", 11, SASL_AUTHENTICATE, version, 1, -1) + b"\0"
        with pytest.raises(MalformedFrame):
            exchange.request(parse_request_head(frame, max_request_bytes=100), frame)
    send(exchange, SASL_AUTHENTICATE, 1, auth_bytes=b"\0alice\0secret")
    with pytest.raises(MalformedResponse):
        exchange.response(SASL_AUTHENTICATE, 1, pack(">ii", 5, 1) + b"\0")


@given(mechanism=st.sampled_from(["PLAIN", SCRAM, "OAUTHBEARER"]), data=st.binary())
def test_any_message_is_refused_or_has_a_name(mechanism, data):
    exchange = SaslExchange()
    tls_handshake(exchange, mechanism)
    try:
        send(exchange, SASL_AUTHENTICATE, 2, auth_bytes=data)
    except MalformedFrame:
        return
    answer(exchange, b"v=x" if mechanism == SCRAM else b"", version=2)
    assert exchange.principal or data == b"\1"


LONGEST = {  # by mechanism, of a SaslAuthenticate request
    "PLAIN": 16 << 10,
    "plain": 16 << 10,
    SCRAM: 16 << 10,
    "OAUTHBEARER": 64 << 10,
    "GSSAPI": 512 << 10,
    "ANOTHER": 512 << 10,
}


@pytest.mark.parametrize("mechanism", LONGEST)
def test_what_is_read_has_a_length_by_its_mechanism(mechanism):
    exchange = SaslExchange()
    assert exchange.max_bytes(SASL_AUTHENTICATE) == 512 << 10
    tls_handshake(exchange, mechanism)
    assert exchange.max_bytes(SASL_AUTHENTICATE) == LONGEST[mechanism]
    assert exchange.max_bytes(SASL_HANDSHAKE) == 512 << 10


COSTLY = {  # more parts than anybody needs; to take them apart would take the time of many logins
    "SCRAM, extensions": (SCRAM, b"n,,n=a,r=b" + b",x=y" * 65),
    "SCRAM, escapes": (SCRAM, b"n,,n=" + b"=2C" * 65 + b",r=b"),
    "OAUTHBEARER, extensions": ("OAUTHBEARER", bearer({"sub": "a"}, suffix="\1x=y" * 65 + "\1\1")),
    "OAUTHBEARER, objects": ("OAUTHBEARER", bearer({"sub": "a", "x": [{}] * 4000})),
    "OAUTHBEARER, arrays": ("OAUTHBEARER", bearer({"sub": "a", "x": [[]] * 4000})),
    "OAUTHBEARER, numbers": ("OAUTHBEARER", bearer({"sub": "a", "x": [0] * 7000})),
}


@pytest.mark.parametrize("name", COSTLY)
def test_parts_are_counted_before_they_are_taken_apart(name, monkeypatch):
    def reads(*_, **__):
        raise AssertionError("taken apart")

    is_in_token = name in ("OAUTHBEARER, objects", "OAUTHBEARER, arrays", "OAUTHBEARER, numbers")
    monkeypatch.setattr("json.loads" if is_in_token else "proxy.wire.sasl._pairs", reads)
    mechanism, first = COSTLY[name]
    exchange = SaslExchange()
    tls_handshake(exchange, mechanism)
    with pytest.raises(MalformedFrame) as refusal:
        send(exchange, SASL_AUTHENTICATE, 1, auth_bytes=first)
    assert refusal.value.reason == "bad_body"


GROUPS = {
    "named": [f"team-{number:05}" for number in range(3000)],
    "of LDAP": [f"CN={n},OU=groups,OU=it,DC=corp,DC=example,DC=com" for n in range(900)],
}


@pytest.mark.parametrize("groups", GROUPS)
def test_a_user_may_be_in_many_groups(groups):
    message = bearer({"sub": "alice", "groups": GROUPS[groups]})
    exchange = SaslExchange()
    tls_handshake(exchange, "OAUTHBEARER")
    assert 50_000 < len(message) < exchange.max_bytes(SASL_AUTHENTICATE)
    send(exchange, SASL_AUTHENTICATE, 1, auth_bytes=message)
    answer(exchange)
    assert exchange.principal == "alice"
