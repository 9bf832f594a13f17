"""Looks at a running proxy from outside: its admin port, its listeners, the addresses it tells."""

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from http.client import HTTPException
from urllib.error import HTTPError

from proxy.admin.commands.admin_client import (
    AdminAddress,
    AdminRefusal,
    fetch_document,
    read_answer,
    reason_of,
)
from proxy.admin.port.guard import REPORT_PATH
from proxy.cluster.dial import reach
from proxy.cluster.kafka_client import Bootstrap, KafkaClient
from proxy.cluster.resolver import Resolver
from proxy.cluster.upstream import Address, UpstreamError
from proxy.config.endpoints import HostPort
from proxy.onboarding.checkup import AdminSight, ListenerSight
from proxy.state import Document

LIMIT_S = 5.0
"""For each answer, and each connection."""

MOST_CONNECTIONS = 1000
MOST_PARTITIONS = 100

_REFUSED = re.compile(r'^kafka_quota_proxy_spark_reports_total\{.*\bresult="(\w+)"\} (\S+)$', re.M)
_TAKEN = frozenset({"accepted", "repeated"})


def see_admin(address: AdminAddress, report_tokens: Sequence[tuple[str, str]]) -> AdminSight:
    """Return what the admin port says. `report_tokens`: file and text of those for reports."""
    tokens: Sequence[tuple[str | None, str | None]] = report_tokens or [(None, None)]
    try:
        quotas = _document(address, "/v1/quotas")["quotas"]
        for file, text in tokens:
            refused = _refusal(replace(address, token=text))
            if refused is not None:
                refused = f"{file}: {refused}" if file is not None else refused
                break
        connections = _document(address, f"/v1/connections?limit={MOST_CONNECTIONS}")
        return AdminSight(
            address.url,
            refused_token=refused,
            token_file=file,
            status=_document(address, "/v1/status?limit=1"),
            file_rules=frozenset(each["selector"] for each in quotas if each["source"] == "file"),
            connections=connections["connections"],
            queries=_document(address, f"/v1/progress?limit={MOST_PARTITIONS}")["queries"],
            refused_reports=_refused_reports(address),
        )
    except AdminRefusal as error:
        failure = error.problem
    except KeyError as error:
        failure = f"{address.url} is not a quota proxy of this version: it does not say {error}"
    return AdminSight(address.url, failure=failure)


def _document(address: AdminAddress, path: str) -> Document:
    return fetch_document(address, path, set(), timeout_s=LIMIT_S)


def _refused_reports(address: AdminAddress) -> dict[str, int]:
    text = read_answer(address, "/metrics", timeout_s=LIMIT_S).decode("utf-8", "replace")
    counts: Counter[str] = Counter()
    for match in _REFUSED.finditer(text):
        counts[match[1]] += int(float(match[2]))
    return {why: count for why, count in counts.items() if count and why not in _TAKEN}


def _refusal(address: AdminAddress) -> str | None:
    """Return why a report with the address's token would be refused, None if it would be taken.

    A body that does not say that it is JSON is refused after the token was looked at, and counts as
    no report.
    """
    try:
        with address.open(REPORT_PATH, {}, LIMIT_S, "text/plain"):
            return None
    except HTTPError as error:
        allowed = error.code == HTTPStatus.UNSUPPORTED_MEDIA_TYPE
        return None if allowed else reason_of(error)[0]
    except (OSError, HTTPException, ValueError) as error:
        raise AdminRefusal(f"{address.url} does not answer: {error}", "start the proxy") from None


async def see_listener(
    name: str, address: HostPort, topics: Sequence[str], unasked: str | None
) -> ListenerSight:
    """Return how far a connection gets; `unasked` says why the cluster is not to be asked."""
    sight = ListenerSight(name, str(address), unasked=unasked)
    server = (address.host, address.port)
    if (failure := await _failure(server)) is not None:
        return replace(sight, failure=failure)
    if unasked is not None:
        return sight
    client = KafkaClient(Bootstrap([server], connect_timeout_s=LIMIT_S), limit_s=LIMIT_S)
    try:
        answer = await client.metadata(topics)
    except UpstreamError as error:
        return replace(sight, failure=f"no broker answers through it: {error}")
    finally:
        client.close()
    addresses = [(broker.host, broker.port) for broker in answer.brokers]
    failures = await asyncio.gather(*map(_failure, addresses))
    told = (str(HostPort(*each)) for each in addresses)
    return replace(
        sight,
        brokers=dict(zip(told, failures, strict=True)),
        topics={topic.name: topic.error_code for topic in answer.topics},
    )


async def _failure(server: Address) -> str | None:
    """Return why a connection can't be made, None if it can."""
    try:
        _, sock = await reach([server], LIMIT_S, Resolver())
    except UpstreamError as error:
        return str(error)
    sock.close()
    return None
