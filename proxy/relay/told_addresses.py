"""Puts into responses where a client is to go for each broker: by its owner, also after a move."""

from functools import partial

from proxy.relay.pair_state import PairState
from proxy.relay.session import Exchange
from proxy.wire.apis import FIND_COORDINATOR, METADATA, Handling
from proxy.wire.layout import Buffer, Steps
from proxy.wire.rewrite import emptied, rewriting

LAST_KEPT_COORDINATOR_VERSION = 2
"""librdkafka, which asks for no later one, keeps the address of its group's coordinator as long as
that has the same number, also when it is of a dead machine. It forgets it when there is none."""


def telling_addresses(pair: PairState, exchange: Exchange, response: Buffer) -> Steps[Buffer]:
    """Return a response with the addresses that its client is told, in steps; see `rewriting`.

    Of what is asked of each broker return what the fallback has, which is nothing.
    """
    api_key, version, session = exchange.api_key, exchange.version, exchange.session
    if exchange.plan.handling is Handling.PER_BROKER:
        return emptied(api_key, version, response)
    is_hidden = (
        api_key == FIND_COORDINATOR
        and version <= LAST_KEPT_COORDINATOR_VERSION
        and session.has_moved
    )
    return rewriting(
        api_key,
        version,
        response,
        _no_address if is_hidden else partial(pair.advertise, session),
        passes_unknown=pair.services.passes_unknown_apis,
        fallback=session.fallback() if api_key == METADATA else None,
    )


def _no_address(_node_id: int, _host: str, _port: int) -> None:
    """Return no address."""
