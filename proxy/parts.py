"""Makes from a configuration what the parts of the program take of it."""

from collections.abc import Callable
from dataclasses import replace

from proxy.admin.port.admin_port import PortLimits
from proxy.admin.port.guard import Access, AdminToken, Right
from proxy.cluster.kafka_client import Bootstrap
from proxy.cluster.login import Credentials, Login
from proxy.config import Config
from proxy.config.descriptors import share_files
from proxy.config.secrets import ALL_RIGHTS, Secrets
from proxy.progress.report import QueryScope
from proxy.relay.listener import ListenerSettings
from proxy.relay.services import Limits


def bootstrap_of(config: Config, secrets: Secrets, on_refused: Callable[[], None]) -> Bootstrap:
    """Make the way into the cluster; `on_refused` is called when it does not let the proxy in."""
    servers = [(server.host, server.port) for server in config.cluster.bootstrap_servers]
    sasl, login = config.cluster.sasl, None
    if sasl is not None and secrets.password is not None:
        credentials = Credentials(sasl.mechanism, sasl.username, secrets.password)
        login = Login(credentials, on_refused)
    return Bootstrap(servers, secrets.upstream, config.limits.connect_timeout_s, login)


def access_of(config: Config, secrets: Secrets) -> Access:
    """Return who may do what on the admin port."""
    admin = config.admin
    tokens = [
        AdminToken(
            each.name,
            secrets.tokens[each.name],
            tuple(map(Right, each.rights)),
            QueryScope(each.queries),
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
    return Access(tokens, admin.read_needs_token, admin.open_paths, {*map(str.lower, hosts)})


def port_limits_of(config: Config) -> PortLimits:
    """Return how many connections the admin port has, and for how long."""
    admin = config.admin
    return PortLimits(
        share_files(config).admin,
        admin.max_connections_per_ip,
        admin.head_timeout,
        admin.idle_timeout,
    )


def limits_of(config: Config) -> Limits:
    """Return the relay's limits, with as many connections as there are files for."""
    return replace(config.limits, max_connections=share_files(config).clients)


def listeners_of(config: Config, secrets: Secrets, number: int) -> list[ListenerSettings]:
    """Return where a member's listeners are and what they tell clients.

    `number` is the member's among those of its host, from 0: each has its part of the ports.
    """
    found = []
    for listener in config.listeners:
        ports = listener.broker_ports
        share = None if ports is None else ports.share(config.worker_count, number)
        found.append(
            ListenerSettings(
                name=listener.name,
                host=listener.bind.host,
                port=listener.bind.port,
                advertised_host=config.named(listener.advertised_host),
                broker_ports=None if share is None else (share.first, share.last),
                tls=secrets.listeners.get(listener.name),
                sni=config.named(listener.sni) if listener.sni else None,
            )
        )
    return found
