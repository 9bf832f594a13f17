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
from proxy.config.models import ClusterTls, Config, ListenerTls
from proxy.relay.tls import not_after, server_context

NAME_ENDING = "_file"


CLUSTER = ""
"""In the place of a listener's name, of what is for brokers."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A file of certificates that is in use."""

    role: str
    """`server`: shown to clients; `client`: shown to brokers; `client_ca`, `broker_ca`: by which
    those are checked."""
    listener: str
    """Its name, or CLUSTER."""
    file: str
    not_after_s: float
    """When the first of a chain expires, or the last of the authorities; seconds of the epoch."""

    @property
    def section(self) -> str:
        """Where the configuration names it."""
        return f"listeners {self.listener!r}" if self.listener else "cluster.tls"


@dataclass(frozen=True, slots=True)
class Secrets:
    """All of them as they were at one moment; each fits its key."""

    listeners: Mapping[str, ssl.SSLContext] = field(repr=False)
    """The TLS of the listeners that have it, by name."""
    upstream: ssl.SSLContext | None = field(repr=False)
    """That towards the brokers."""
    password: str | None = field(repr=False)
    """With which the proxy itself logs in to them."""
    token: str | None = field(repr=False)
    """Of the admin server."""
    certificates: tuple[Certificate, ...]
    tls_digest: bytes = field(repr=False)
    """Of the files behind the TLS contexts: with the same content these need not be replaced."""


def secret_files(section: Section) -> Iterator[Path]:
    """Yield the files that a section, or one within it, names."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Path) and name.endswith(NAME_ENDING):
            yield value
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Section):
                yield from secret_files(each)


def read_secrets(config: Config) -> Secrets:
    """Read the files as they are now. Raises BadValueError: one is bad, or a key does not fit."""
    sasl, token_file = config.cluster.sasl, config.admin.token_file
    upstream = config.cluster.tls
    of_listeners = {each.name: each.tls for each in config.listeners if each.tls is not None}
    sections: dict[str, ClusterTls | ListenerTls] = {**of_listeners}
    if upstream:
        sections[CLUSTER] = upstream
    digest = hashlib.sha256()
    for path in (path for section in sections.values() for path in secret_files(section)):
        digest.update(files.read_bytes(path))
    return Secrets(
        listeners={name: _server_context(section) for name, section in of_listeners.items()},
        upstream=_upstream_context(upstream) if upstream else None,
        password=sasl.password() if sasl else None,
        token=files.read_token(token_file) if token_file else None,
        certificates=tuple(
            each for name, section in sections.items() for each in _certificates(name, section)
        ),
        tls_digest=digest.digest(),
    )


def _certificates(listener: str, tls: ClusterTls | ListenerTls) -> Iterator[Certificate]:
    own, authorities = ("server", "client_ca") if listener else ("client", "broker_ca")
    if tls.cert_file is not None:
        yield Certificate(own, listener, str(tls.cert_file), not_after(tls.cert_file))
    if tls.ca_file is not None:
        yield Certificate(authorities, listener, str(tls.ca_file), not_after(tls.ca_file, max))


def _server_context(tls: ListenerTls) -> ssl.SSLContext:
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
