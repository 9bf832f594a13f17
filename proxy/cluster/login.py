"""How the proxy itself logs in to brokers, without I/O: what is said, and what a refusal means.

What SASL says inside of the requests (RFC 4616, RFC 5802, RFC 7677) is aiokafka's work.
"""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

from aiokafka.conn import SaslPlainAuthenticator, ScramAuthenticator
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from .upstream import LOGIN_REFUSED, Address, UpstreamError, error_name

PLAIN = "PLAIN"

LOGIN_RETRY_S = 10.0
"""A broker that refused is not asked again for so long: some lock out who fails often."""

HANDSHAKE_VERSION = 1
"""After it, logins go in messages of Kafka's, which can say what is wrong. Since Kafka 1.0."""

AUTHENTICATE_VERSION = 0

MAX_SCRAM_ITERATIONS = 1 << 20
"""So many take a second, and the 2^31 that a broker may name an hour. Kafka has 16,384 at most."""

UNSUPPORTED_MECHANISM = 33
NO_LOGIN_HERE = 34
"""ILLEGAL_SASL_STATE: in answer to a first request, a listener that is none of SASL's."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who the proxy is to the brokers."""

    mechanism: str
    """PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512."""
    username: str
    password: str = field(repr=False)


@dataclass(slots=True, eq=False)
class Login:
    """Who the proxy is, and who refused it; for all of its own connections, in any thread."""

    credentials: Credentials
    _on_refused: Callable[[], None] = lambda: None
    _clock_s: Callable[[], float] = time.monotonic
    _refusals: dict[Address, tuple[str, float]] = field(default_factory=dict)
    """What each broker said to these credentials, and when."""

    def renew(self, password: str) -> None:
        """Use another password from now on; who refused the one before is asked at once."""
        if password != self.credentials.password:
            self.credentials = replace(self.credentials, password=password)
            self._refusals.clear()

    def check(self, broker: Address) -> None:
        """Raise UpstreamError, as the broker did, when it refused only a moment ago."""
        text, at_s = self._refusals.get(broker, ("", 0.0))
        if text and self._clock_s() - at_s < LOGIN_RETRY_S:
            raise UpstreamError(LOGIN_REFUSED, text)

    def refused(
        self, who: Credentials, broker: Address, error_code: int, said: str | None = None
    ) -> UpstreamError:
        """Record that the broker refused; return what to raise: whom, why, and how to mend it.

        `error_code` is 0 where what answers does not know the user. `said`: its own words, or with
        UNSUPPORTED_MECHANISM what it offers instead.
        """
        reason = said or error_name(error_code)
        fix = "correct cluster.sasl.username, or the password in cluster.sasl.password_file"
        if error_code == UNSUPPORTED_MECHANISM:
            reason = f"the broker offers {said or 'other mechanisms'}"
            fix = "correct cluster.sasl.mechanism"
        elif not error_code:
            fix = "see that cluster.bootstrap_servers are brokers of yours"
        elif error_code == NO_LOGIN_HERE:
            reason = "this port takes no logins"
            fix = "name a SASL listener's port in cluster.bootstrap_servers, or remove cluster.sasl"
        host, port = broker
        user, mechanism = who.username, who.mechanism
        text = f'{host}:{port}: login of user "{user}" by {mechanism} refused: {reason}; {fix}'
        if who.password == self.credentials.password:  # else it was renewed meanwhile
            self._refusals[broker] = text, self._clock_s()
        self._on_refused()
        return UpstreamError(LOGIN_REFUSED, text)

    def exchange(self, broker: Address) -> Generator[Any, Any, None]:
        """Yield the requests of a login, without header, and then None; take their responses.

        With SCRAM it computes for some milliseconds, or up to a second where the broker wants that:
        not for an event loop. Raises UpstreamError: login_refused.
        """
        credentials = self.credentials
        answer = yield SaslHandshakeRequest[HANDSHAKE_VERSION](mechanism=credentials.mechanism)
        if answer.error_code:
            offered = ", ".join(answer.mechanisms)
            raise self.refused(credentials, broker, answer.error_code, offered)
        tokens = _tokens(credentials)
        received: bytes | None = None
        while True:
            try:
                token, _ = tokens.send(received)
            except StopIteration:
                break
            except Exception as error:  # who knows what answers at that address
                said = f"the broker does not prove that it knows the password ({error!r})"
                raise self.refused(credentials, broker, 0, said) from error
            answer = yield SaslAuthenticateRequest[AUTHENTICATE_VERSION](auth_bytes=token)
            if answer.error_code:
                raise self.refused(credentials, broker, answer.error_code, answer.error_message)
            received = bytes(answer.auth_bytes)
        self._refusals.pop(broker, None)
        yield None


class _BoundedScram(ScramAuthenticator):  # type: ignore[misc]
    """Refuses to compute for as long as a broker wants."""

    def create_salted_password(self, salt: bytes, iterations: int) -> None:
        if iterations > MAX_SCRAM_ITERATIONS:
            raise ValueError(f"{iterations} iterations, more than {MAX_SCRAM_ITERATIONS}")
        super().create_salted_password(salt, iterations)


def _tokens(credentials: Credentials) -> Generator[tuple[bytes, bool], bytes | None, None]:
    arguments = {
        "loop": None,  # for I/O, which is left out here
        "sasl_plain_username": credentials.username,
        "sasl_plain_password": credentials.password,
    }
    if credentials.mechanism == PLAIN:
        return SaslPlainAuthenticator(**arguments).authenticator_plain()  # type: ignore[no-any-return]
    scram = _BoundedScram(**arguments, sasl_mechanism=credentials.mechanism)
    return scram.authenticator_scram()  # type: ignore[no-any-return]
