"""`quota-proxy doctor`: what is wrong between a query, its rule, its listener and the proxy.

It looks at a running proxy from outside: its admin port, its listeners, the addresses it tells.
"""

import argparse
import asyncio
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Final

from proxy.admin.commands.operator_commands import (
    AdminClientError,
    AdminPortClient,
    admin_port_client,
    asking_options,
    reply_error_and_fix,
)
from proxy.admin.document_models import MISREAD, printable
from proxy.admin.port.guard import REPORT_PATH
from proxy.cluster.dial import connect_to_first
from proxy.cluster.kafka_client import Bootstrap, KafkaClient
from proxy.cluster.resolver import Resolver
from proxy.cluster.upstream import Address, UpstreamError
from proxy.config import Config, load_config
from proxy.config.endpoints import HostPort, ip_address
from proxy.config.files import read_token
from proxy.onboarding.checkup import (
    AdminSnapshot,
    CheckVerdict,
    Finding,
    ListenerCheckResult,
    check_query,
    progress_of,
    query_or_unlisted,
)
from proxy.onboarding.init_command import parse_topic_name
from proxy.quota.rules import RuleTable
from proxy.quota.scheduled_rules import ScheduledSettings

EXIT_DONE, EXIT_WRONG = 0, 1

LIMIT_S = 5.0
"""For each answer, and each connection."""

_REFUSED = re.compile(r'^kafka_quota_proxy_spark_reports_total\{.*\bresult="(\w+)"\} (\S+)$', re.M)
_TAKEN = frozenset({"accepted", "repeated"})

_UNSPECIFIED: Final = {4: "127.0.0.1", 6: "::1"}
_VERDICT_WIDTH = max(len(verdict) for verdict in CheckVerdict)


def add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `doctor`."""
    token_help = "the token that the query's listener shows (default: those of the configuration)"
    asked = asking_options(None, token_help)
    what = "say what is wrong between a Spark query, its rule, its listener and the proxy"
    doctor = commands.add_parser("doctor", parents=[asked], help=what)
    doctor.add_argument("name", metavar="NAME", help="the query's name, or its client id")
    config_help = "the YAML file that the proxy runs with"
    doctor.add_argument("-c", "--config", type=Path, required=True, help=config_help)
    topic_help = "a topic that it reads (default: those that the proxy knows of it)"
    doctor.add_argument("--topic", type=parse_topic_name, help=topic_help)
    doctor.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    config = load_config(options.config)
    settings = ScheduledSettings.at(config.quota_settings, time.time()).settings
    table = RuleTable(settings.rules, enforce=settings.enforce)
    subject = query_or_unlisted(config, options.name)
    options.url = options.url or _url(config)
    client = replace(admin_port_client(options), timeout_s=LIMIT_S)
    admin = _see_admin(config, client, options.token_file)
    try:
        progress = progress_of(admin, subject)
        known = {each["topic"] for each in progress["partitions"]} if progress is not None else ()
        topics = [options.topic] if options.topic else sorted(known)
        listeners = asyncio.run(_see_listeners(config, admin, topics))
        findings = list(check_query(config, table, subject, admin, listeners))
    except MISREAD as error:
        raise client.no_proxy() from error
    for line in _lines(subject.name, findings):
        sys.stdout.write(f"{line}\n")
    is_wrong = any(each.verdict is CheckVerdict.WRONG for each in findings)
    return EXIT_WRONG if is_wrong else EXIT_DONE


def _url(config: Config) -> str:
    """Return where the configuration has the admin port. Raises AdminClientError if it is any."""
    bind = config.admin.bind
    if bind.port == 0:
        problem = "admin.bind has port 0, which is any free one"
        raise AdminClientError(problem, "give the address as --url", is_bad_input=True)
    address = ip_address(bind.host)
    is_everywhere = address is not None and address.is_unspecified
    host = _UNSPECIFIED[address.version] if address and is_everywhere else bind.host
    if config.admin.tls is not None:  # what its certificate is for
        host = config.named(config.listeners[0].advertised_host)
    return f"{'http' if config.admin.tls is None else 'https'}://{HostPort(host, bind.port)}"


def _see_admin(config: Config, client: AdminPortClient, given: Path | None) -> AdminSnapshot:
    """Return what the admin port says, asked with the tokens that the configuration names."""
    admin = config.admin
    all_rights = [] if admin.token_file is None else [admin.token_file]
    readers = [*all_rights, *(each.token_file for each in admin.tokens if "read" in each.rights)]
    reporters = [each.token_file for each in admin.tokens if "report" in each.rights] or all_rights
    shown = {str(given): client.token} if given else {str(at): read_token(at) for at in reporters}
    if readers:
        client = replace(client, token=read_token(readers[0]))
    try:
        quotas = client.rows("/v1/quotas", "quotas")
        for file, text in shown.items() or ((None, None),):
            refused = _refusal(replace(client, token=text))
            if refused is not None:
                refused = f"{file}: {refused}" if file is not None else refused
                break
        return AdminSnapshot(
            client.url,
            refused_token=refused,
            token_file=file,
            status=client.document("/v1/status?limit=1"),
            file_rules=frozenset(each["selector"] for each in quotas if each["source"] == "file"),
            connections=client.rows("/v1/connections", "connections"),
            queries=client.rows("/v1/progress", "queries"),
            refused_reports=_refused_reports(client),
        )
    except AdminClientError as error:
        failure = error.what
    except MISREAD:
        failure = client.no_proxy().what
    return AdminSnapshot(client.url, failure=failure)


def _refused_reports(client: AdminPortClient) -> dict[str, int]:
    text = client.read("/metrics").decode("utf-8", "replace")
    counts: Counter[str] = Counter()
    for match in _REFUSED.finditer(text):
        counts[match[1]] += int(float(match[2]))
    return {why: count for why, count in counts.items() if count and why not in _TAKEN}


def _refusal(client: AdminPortClient) -> str | None:
    """Return why a report with the client's token would be refused, None if it would be taken.

    A body that does not say that it is JSON is refused after the token was looked at, and counts as
    no report.
    """
    reply = client.ask(REPORT_PATH, {}, "text/plain")
    is_taken = reply.status in (HTTPStatus.OK, HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
    return None if is_taken else reply_error_and_fix(reply)[0]


async def _see_listeners(
    config: Config, admin: AdminSnapshot, topics: list[str]
) -> list[ListenerCheckResult]:
    open_now = () if admin.status is None else admin.status["listeners"]
    ports = {each["name"]: each["port"] for each in open_now}
    unasked = "clients log in there" if config.cluster.sasl is not None else None
    sights = []
    for each in config.listeners:
        port = each.bind.port or ports.get(each.name)
        if port is None:  # any free one, which only the running proxy knows
            continue
        address = HostPort(config.named(each.advertised_host), port)
        why = "it speaks TLS" if each.tls is not None else unasked
        sights.append(_see_listener(each.name, address, topics, why))
    return list(await asyncio.gather(*sights))


async def _see_listener(
    name: str, address: HostPort, topics: Sequence[str], unasked: str | None
) -> ListenerCheckResult:
    """Return how far a connection gets; `unasked` says why the cluster is not to be asked."""
    sight = ListenerCheckResult(name, str(address), unasked=unasked)
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
        _, sock = await connect_to_first([server], LIMIT_S, Resolver())
    except UpstreamError as error:
        return str(error)
    sock.close()
    return None


def _lines(name: str, findings: list[Finding]) -> Iterator[str]:
    width = max(len(each.check) for each in findings)
    for each in findings:
        yield f"{each.verdict:{_VERDICT_WIDTH}}  {each.check:{width}}  {printable(each.text)}"
        if each.fix:
            yield f"{'':{_VERDICT_WIDTH}}  {'':{width}}  fix: {printable(each.fix)}"
    wrong = sum(each.verdict is CheckVerdict.WRONG for each in findings)
    yield ""
    yield f"{name}: {f'{wrong} to mend' if wrong else 'nothing is wrong'}"
