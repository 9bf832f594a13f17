"""`quota-proxy doctor`: what is wrong between a query, its rule, its listener and the proxy."""

import argparse
import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from proxy.admin.commands.admin_client import AdminAddress, AdminRefusal
from proxy.admin.commands.operator_commands import admin_address, asking_options
from proxy.admin.commands.top_tables import printable
from proxy.config import Config, load_config
from proxy.config.endpoints import HostPort, ip_address
from proxy.config.files import read_token
from proxy.onboarding.checkup import (
    AdminSight,
    Finding,
    Judgement,
    ListenerSight,
    check_query,
    find_query,
    progress_of,
)
from proxy.onboarding.probes import see_admin, see_listener
from proxy.progress.query import QuerySettings
from proxy.quota.rules import RuleTable

EXIT_DONE, EXIT_WRONG = 0, 1

_UNSPECIFIED: Final = {4: "127.0.0.1", 6: "::1"}
_VERDICT_WIDTH = max(len(verdict) for verdict in Judgement)


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
    doctor.add_argument("--topic", help=topic_help)
    doctor.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    config = load_config(options.config)
    settings = config.quota_settings
    table = RuleTable(settings.rules, enforce=settings.enforce)
    subject = find_query(config, options.name)
    options.url = options.url or _url(config)
    address = admin_address(options)
    admin = _see_admin(config, address, options.token_file)
    topics = {options.topic} if options.topic else _topics(admin, subject)
    listeners = asyncio.run(_see_listeners(config, admin, sorted(topics)))
    findings = list(check_query(config, table, subject, admin, listeners))
    for line in _lines(subject, findings):
        sys.stdout.write(f"{line}\n")
    is_wrong = any(each.verdict is Judgement.WRONG for each in findings)
    return EXIT_WRONG if is_wrong else EXIT_DONE


def _url(config: Config) -> str:
    """Return where the configuration has the admin port. Raises AdminRefusal for any free port."""
    bind = config.admin.bind
    if bind.port == 0:
        problem = "admin.bind has port 0, which is any free one"
        raise AdminRefusal(problem, "give the address as --url", is_bad_input=True)
    address = ip_address(bind.host)
    is_everywhere = address is not None and address.is_unspecified
    host = _UNSPECIFIED[address.version] if address and is_everywhere else bind.host
    if config.admin.tls is not None:  # what its certificate is for
        host = config.named(config.listeners[0].advertised_host)
    return f"{'http' if config.admin.tls is None else 'https'}://{HostPort(host, bind.port)}"


def _see_admin(config: Config, address: AdminAddress, given: Path | None) -> AdminSight:
    """Return what the admin port says, asked with the tokens that the configuration names."""
    admin = config.admin
    all_rights = [] if admin.token_file is None else [admin.token_file]
    readers = [*all_rights, *(each.token_file for each in admin.tokens if "read" in each.rights)]
    reporters = [each.token_file for each in admin.tokens if "report" in each.rights] or all_rights
    if given is not None and address.token is not None:
        report_tokens = [(str(given), address.token)]
    else:
        report_tokens = [(str(path), read_token(path)) for path in reporters]
    if readers:
        address = replace(address, token=read_token(readers[0]))
    return see_admin(address, report_tokens)


def _topics(admin: AdminSight, subject: QuerySettings) -> set[str]:
    progress = progress_of(admin, subject)
    return set() if progress is None else {each["topic"] for each in progress["partitions"]}


async def _see_listeners(
    config: Config, admin: AdminSight, topics: list[str]
) -> list[ListenerSight]:
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
        sights.append(see_listener(each.name, address, topics, why))
    return list(await asyncio.gather(*sights))


def _lines(subject: QuerySettings, findings: list[Finding]) -> Iterator[str]:
    width = max(len(each.check) for each in findings)
    for each in findings:
        yield f"{each.verdict:{_VERDICT_WIDTH}}  {each.check:{width}}  {printable(each.text)}"
        if each.fix:
            yield f"{'':{_VERDICT_WIDTH}}  {'':{width}}  fix: {printable(each.fix)}"
    wrong = sum(each.verdict is Judgement.WRONG for each in findings)
    yield ""
    yield f"{subject.name}: {f'{wrong} to mend' if wrong else 'nothing is wrong'}"
