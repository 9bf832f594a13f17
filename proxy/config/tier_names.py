"""Finds names that clients are told of a machine of a tier and that may be those of others too."""

import socket
from collections.abc import Iterator
from ipaddress import ip_address

from proxy.config.endpoints import MACHINE_PLACEHOLDER
from proxy.config.models import Config


def find_name_hints(config: Config) -> Iterator[str]:
    """Yield a line for each name that a file which is the same on all machines gives to all."""
    tier = config.tier
    if tier is None:
        return
    for listener in config.listeners:
        names = {"advertised_host": listener.advertised_host}
        if listener.tls is not None and listener.tls.sni is not None:
            names["tls.sni"] = listener.tls.sni
        for key, name in names.items():
            if MACHINE_PLACEHOLDER not in name and not _is_own(name, tier.machine):
                yield (
                    f"tier: {tier.name}, listener {listener.name}: {key} {name} does not say which "
                    f"machine it is, and must lead to {tier.machine} alone; fix, if other machines "
                    f"have it too: write {MACHINE_PLACEHOLDER} in it"
                )


def _is_own(name: str, machine: str) -> bool:
    """Return whether a name has the machine's in it, or is an address of this computer."""
    try:
        address = ip_address(name)
    except ValueError:
        return machine.lower() in name.lower().split(".")
    if address.is_loopback:  # all machines are on this computer, as in a trial
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6  # noqa: PLR2004
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((name, 0))
    except OSError:
        return False
    return True
