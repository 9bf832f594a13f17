"""How workers share the ports of brokers."""

from proxy.config.endpoints import PortRange


def share_of(ports: PortRange, workers: int, number: int) -> PortRange:
    """Return the part of the ports that a worker has, the `number`th from 0: all have as many.

    There must be a port for each. Of any free ports all may have any.
    """
    if ports.any_free:
        return ports
    size = len(ports) // workers
    first = ports.first + number * size
    return PortRange(first, first + size - 1)
