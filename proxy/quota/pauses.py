"""A pause: for some clients, or for all, no quota is enforced until a time."""

from collections.abc import Mapping
from dataclasses import dataclass

from proxy.state import Record

from .entities import DEFAULT, ClientIdentity
from .selector import parse_selector, selector
from .validation import finite

PAUSES = "pauses/"
"""Where they are in the state; the rest of a record's key is the pause's name."""

PAUSES_SCHEMA = 1
"""Version of what is written there."""

ALL_CLIENTS = "all"
"""The name of the pause that is for every client."""

PAUSED = ",paused"
"""Ends the entity of clients that are paused while others of their entity are held: their traffic
must not count for those."""


@dataclass(frozen=True, slots=True)
class QuotaPause:
    """Clients that have all of its keys are measured, and held for nothing."""

    keys: Mapping[str, str]
    """As those of a rule; none: every client."""
    until_s: float
    """In seconds of the Unix epoch, as all times here."""
    by: str | None = None
    """Who made it; None when not known."""
    at_s: float | None = None
    """When; None when not known."""

    @property
    def name(self) -> str:
        """Its selector, or `ALL_CLIENTS`. Raises ValueError for keys that are not of a rule."""
        return pause_name(self.keys)

    def fits(self, identity: ClientIdentity) -> bool:
        """Return whether the client has all of its keys, as `Rule.mismatch` compares them."""
        keys, client_id, user = self.keys, identity.client_id or "", identity.user
        return (
            keys.get("listener", identity.listener) == identity.listener
            and ("user" not in keys or (user is not None and keys["user"] in (DEFAULT, user)))
            and keys.get("client-id", DEFAULT) in (DEFAULT, client_id)
            and client_id.startswith(keys.get("client-id-prefix", ""))
        )

    def record(self) -> Record:
        """Return what is kept of it."""
        value = {"until_s": self.until_s, "by": self.by, "at_s": self.at_s}
        return Record.of(PAUSES + self.name, value, PAUSES_SCHEMA)


def pause_name(keys: Mapping[str, str]) -> str:
    """Return the name of the pause with these keys. Raises ValueError as `selector`."""
    return selector(keys) if keys else ALL_CLIENTS


def read_pause(record: Record) -> QuotaPause:
    """Return the pause of a record. Raises ValueError with what is wrong with it."""
    name = record.key.removeprefix(PAUSES)
    record.check_form(PAUSES_SCHEMA)
    match record.value:
        case {"until_s": until_s, "by": by, "at_s": at_s}:
            end_s = finite(until_s)
            if end_s is None:
                raise ValueError(f"when it ends is {until_s!r}, not a time")
            keys = {} if name == ALL_CLIENTS else parse_selector(name)
            if pause_name(keys) != name:
                raise ValueError("its name is not written as quota-proxy writes it")
            return QuotaPause(keys, end_s, *parse_origin(by, at_s))
    raise ValueError("it lacks until_s, by or at_s")


def parse_origin(by: object, at_s: object) -> tuple[str | None, float | None]:
    """Return who made something and when, of which either may not be known. Raises ValueError."""
    if not (by is None or isinstance(by, str)):
        raise ValueError(f"who made it is {by!r}, not a name")
    made_s = finite(at_s)
    if made_s is None and at_s is not None:
        raise ValueError(f"when it was made is {at_s!r}, not a time")
    return by, made_s
