"""What the parts of a member take of the configuration: only this module knows both."""

import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from proxy.admin.port.guard import AccessRight, AccessRules, AdminToken
from proxy.cluster.kafka_client import Bootstrap
from proxy.cluster.login import Credentials, Login
from proxy.config import Config
from proxy.config.descriptors import share_descriptors
from proxy.config.secrets import ALL_RIGHTS, Secrets
from proxy.progress.report import ReportableQueries
from proxy.relay.listener import ListenerSettings
from proxy.relay.services import Limits

THREAD_TURN_S = 0.001
"""For how long a thread that computes keeps the event loop from going on; Python's own 5 ms would
come on top of each of its rounds during a reload."""


def bootstrap_of(config: Config, secrets: Secrets, on_refused: Callable[[], None]) -> Bootstrap:
    """Make the way into the cluster; `on_refused` is called when it does not let the proxy in."""
    servers = [(server.host, server.port) for server in config.cluster.bootstrap_servers]
    sasl, login = config.cluster.sasl, None
    if sasl is not None and secrets.password is not None:
        credentials = Credentials(sasl.mechanism, sasl.username, secrets.password)
        login = Login(credentials, on_refused)
    return Bootstrap(servers, secrets.upstream, config.limits.connect_timeout_s, login)


def access_of(config: Config, secrets: Secrets) -> AccessRules:
    """Return who may do what on the admin port."""
    admin = config.admin
    tokens = [
        AdminToken(
            each.name,
            secrets.tokens[each.name],
            tuple(map(AccessRight, each.rights)),
            ReportableQueries(each.queries),
        )
        for each in admin.tokens
    ]
    if admin.token_file is not None:
        tokens.append(AdminToken(ALL_RIGHTS, secrets.tokens[ALL_RIGHTS]))
    hosts = (
        admin.bind.host,
        *map(config.named, admin.hosts),
        *(config.named(each.advertised_host) for each in config.listeners),
    )
    return AccessRules(tokens, admin.read_needs_token, admin.open_paths, {*map(str.lower, hosts)})


def limits_of(config: Config) -> Limits:
    """Return the relay's limits, with as many connections as there are files for."""
    return replace(config.limits, max_connections=share_descriptors(config).clients)


def listener_settings_of(config: Config, secrets: Secrets) -> Iterator[ListenerSettings]:
    """Yield where a member's listeners are and what they tell clients."""
    for listener in config.listeners:
        ports = listener.broker_ports
        yield ListenerSettings(
            name=listener.name,
            host=listener.bind.host,
            advertised_host=config.named(listener.advertised_host),
            takes_free_ports=ports is not None and ports.any_free,
            tls=secrets.listeners.get(listener.name),
            sni=config.named(listener.sni) if listener.sni else None,
        )


def prepare_process() -> None:
    """Give threads short turns, and open as many files as the system allows."""
    sys.setswitchinterval(THREAD_TURN_S)
    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
