"""What the files say that a configuration names: certificates with their keys, passwords, tokens.

A name that ends in `_file` marks such a key of the configuration, in whatever section it is.
"""

import hashlib
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from proxy.cluster.dial import upstream_context
from proxy.config import files
from proxy.config.fields import Section
from proxy.config.models import ClusterTls, Config, ServerTls
from proxy.relay.tls import not_after, server_context

NAME_ENDING = "_file"


NO_LISTENER = ""
"""In the place of a listener's name, of what is for brokers, or for operators."""

ALL_RIGHTS = "admin"
"""Name of the token in `admin.token_file`."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A file of certificates that is in use."""

    role: str
    """`server`: shown to clients; `client`: shown to brokers; `admin`: shown to operators;
    `client_ca`, `broker_ca`, `admin_ca`: by which those are checked."""
    listener: str
    """Its name, or NO_LISTENER."""
    section: str
    """Where the configuration names it, such as `cluster.tls`."""
    file: str
    not_after_s: float
    """When the first of a chain expires, or the last of the authorities; seconds of the epoch."""


@dataclass(frozen=True, slots=True)
class Secrets:
    """All of them as they were at one moment; each fits its key."""

    listeners: Mapping[str, ssl.SSLContext] = field(repr=False)
    """The TLS of the listeners that have it, by name."""
    upstream: ssl.SSLContext | None = field(repr=False)
    """That towards the brokers."""
    password: str | None = field(repr=False)
    """With which the proxy itself logs in to them."""
    tokens: Mapping[str, str] = field(repr=False)
    """Those of the admin server, by name."""
    admin: ssl.SSLContext | None = field(repr=False)
    """The TLS of the admin server."""
    certificates: tuple[Certificate, ...]
    tls_digest: bytes = field(repr=False)
    """Of the files behind the TLS contexts: with the same content these need not be replaced."""


def named_files(section: Section) -> Iterator[Path]:
    """Yield the files that a section, or one within it, names."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Path) and name.endswith(NAME_ENDING):
            yield value
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Section):
                yield from named_files(each)


def read_secrets(config: Config) -> Secrets:
    """Read the files as they are now. Raises BadValueError: one is bad, or a key does not fit."""
    sasl, upstream, admin = config.cluster.sasl, config.cluster.tls, config.admin
    of_listeners = {each.name: each.tls for each in config.listeners if each.tls is not None}
    uses = [_Use("server", name, f"listeners {name!r}", tls) for name, tls in of_listeners.items()]
    if upstream:
        uses.append(_Use("client", NO_LISTENER, "cluster.tls", upstream))
    if admin.tls:
        uses.append(_Use("admin", NO_LISTENER, "admin.tls", admin.tls))
    digest = hashlib.sha256()
    for path in (path for use in uses for path in named_files(use.tls)):
        digest.update(files.read_bytes(path))
    tokens = {each.name: files.read_token(each.token_file) for each in admin.tokens}
    if admin.token_file is not None:
        tokens[ALL_RIGHTS] = files.read_token(admin.token_file)
    return Secrets(
        listeners={name: _server_context(section) for name, section in of_listeners.items()},
        upstream=_upstream_context(upstream) if upstream else None,
        password=sasl.password() if sasl else None,
        tokens=tokens,
        admin=_server_context(admin.tls) if admin.tls else None,
        certificates=tuple(each for use in uses for each in use.certificates()),
        tls_digest=digest.digest(),
    )


@dataclass(frozen=True, slots=True)
class _Use:
    """What a section of TLS is for."""

    role: str
    listener: str
    section: str
    tls: ClusterTls | ServerTls

    def certificates(self) -> Iterator[Certificate]:
        authorities = {"server": "client_ca", "client": "broker_ca", "admin": "admin_ca"}[self.role]
        for role, path, choose in (
            (self.role, self.tls.cert_file, min),
            (authorities, self.tls.ca_file, max),
        ):
            if path is not None:
                end_s = not_after(path, choose)
                yield Certificate(role, self.listener, self.section, str(path), end_s)


def _server_context(tls: ServerTls) -> ssl.SSLContext:
    files.check_pair(tls.cert_file, tls.key_file)
    if tls.ca_file is not None:
        files.check_certificates(tls.ca_file)
    return server_context(tls.cert_file, tls.key_file, tls.ca_file)


def _upstream_context(tls: ClusterTls) -> ssl.SSLContext:
    if tls.ca_file is not None:
        files.check_certificates(tls.ca_file)
    if tls.cert_file is not None and tls.key_file is not None:
        files.check_pair(tls.cert_file, tls.key_file)
    return upstream_context(tls.ca_file, tls.cert_file, tls.key_file)
