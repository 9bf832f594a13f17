"""Packs what the members of a machine answered into one answer, each as it is. Sans-I/O.

A line of JSON says whose each body is and how long; the bodies follow, one behind the other.
"""

import json
from collections.abc import Sequence
from http import HTTPStatus

from proxy.admin.gateway.member_client import NoReply, Reply
from proxy.admin.port.member_headers import CHANGES

BUNDLE_TYPE = "application/x-quota-proxy-bundle"

_MISSING_KEYS = ("why", "was_sent", "alive", "is_known")


def pack_bundle(told: Sequence[Reply | NoReply]) -> bytearray:
    """Return the bundle."""
    index, bodies = [], []
    for each in told:
        if isinstance(each, Reply):
            headers = each.passed_headers()
            if CHANGES in each.headers:
                headers[CHANGES] = each.headers[CHANGES]
            row = {"status": each.status, "headers": headers, "length": len(each.body)}
            bodies.append(each.body)
        else:
            row = {key: getattr(each, key) for key in _MISSING_KEYS}
        index.append({"name": each.member, **row})
    bundle = bytearray(json.dumps(index).encode())
    bundle += b"\n"
    for body in bodies:
        bundle += body
    return bundle


def unpack_bundle(bundle: bytes) -> list[Reply | NoReply]:
    """Read what `pack_bundle` has made. Raises ValueError for anything else."""
    head, newline, _ = bundle.partition(b"\n")
    start = len(head) + len(newline)
    told: list[Reply | NoReply] = []
    try:
        index = json.loads(head)
        if not isinstance(index, list) or not index:
            raise ValueError("nobody is in it")
        for row in index:
            name = str(row["name"])
            if "length" not in row:
                told.append(NoReply(name, **{key: row[key] for key in _MISSING_KEYS}))
                continue
            headers = {str(key): str(value) for key, value in row["headers"].items()}
            end = start + int(row["length"])
            if not start <= end <= len(bundle):
                raise ValueError("a body is cut off")
            status = HTTPStatus(row["status"]).value
            told.append(Reply(name, status, headers, bundle[start:end]))
            start = end
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"this is no bundle: {error!r}") from None
    if start != len(bundle):
        raise ValueError("there is more behind the last body")
    return told
