"""What members answered comes out of a bundle as it went in, and nothing else is taken for one."""

import pytest

from proxy.admin.gateway.bundles import pack_bundle, unpack_bundle
from proxy.admin.gateway.member_client import NoReply, Reply
from proxy.admin.port.member_headers import CHANGES

TOLD = [
    Reply("a/0", 200, {"Content-Type": "application/json"}, b'{"x": "\xc3\xa4"}\n\n'),
    NoReply("a/1", "its process does not run", was_sent=False, alive=False),
    Reply("a/2", 404, {CHANGES: "%5B%5D"}, b""),
    Reply("a/3", 200, {}, bytes(range(256)) * 1000),
    NoReply("a/9", "there is no such member", was_sent=False, alive=None, is_known=False),
]


def test_each_answer_comes_out_as_it_is():
    assert unpack_bundle(bytes(pack_bundle(TOLD))) == TOLD


def test_headers_that_are_of_one_connection_only_stay_behind():
    (reply,) = unpack_bundle(
        bytes(pack_bundle([Reply("a/0", 200, {"Connection": "close", "Allow": "GET"}, b"")]))
    )
    assert isinstance(reply, Reply)
    assert reply.headers == {"Allow": "GET"}


@pytest.mark.parametrize(
    "bundle",
    [
        *(b"", b"\n", b"[]", b"{}", b"[7]\n", b'[{"name": "a"}]\n', b"\xff\n", b"[" * 99_999),
        b'[{"name": "a", "status": 999, "headers": {}, "length": 0}]\n',
        b'[{"name": "a", "status": 200, "headers": [], "length": 0}]\n',
        b'[{"name": "a", "status": 200, "headers": {}, "length": 2}]\n1',
        b'[{"name": "a", "status": 200, "headers": {}, "length": -1}]\n',
        b'[{"name": "a", "status": 200, "headers": {}, "length": 1}]\n12',
    ],
)
def test_what_is_no_bundle_is_refused(bundle: bytes):
    with pytest.raises(ValueError):  # noqa: PT011 - whatever is wrong with it
        unpack_bundle(bundle)
