"""Bounds the time that it takes to read the logins of one address: nobody knows yet who sends them.

An ordinary login takes a twentieth of a millisecond, the longest token a few. Without a bound, who
logs in again and again with such tokens has all the CPU time that there is.
"""

SHARE = 0.1
"""Of a CPU, for the logins of one address."""

BURST_MS = 200.0
"""So much CPU time may be taken at once: thousands of ordinary logins, as after a restart."""

MAX_ADDRESSES = 10_000
"""With logins that are not paid for yet; further ones are not bounded."""


class LoginPace:
    """Records what the logins of each address took. Call `sweep` every second or so."""

    def __init__(self) -> None:
        self._paid_ms: dict[str, float] = {}
        """When an address has waited for all that it took."""

    def wait_ms(self, address: str, now_ms: float) -> float:
        """Return for how long the next login of an address is to wait."""
        return max(self._paid_ms.get(address, now_ms) - now_ms - BURST_MS / SHARE, 0.0)

    def took(self, address: str, cpu_ms: float, now_ms: float) -> None:
        """Record what it took to read a login."""
        if address in self._paid_ms or len(self._paid_ms) < MAX_ADDRESSES:
            from_ms = max(self._paid_ms.get(address, now_ms), now_ms)
            self._paid_ms[address] = from_ms + cpu_ms / SHARE

    def sweep(self, now_ms: float) -> None:
        """Forget the addresses that have waited for all that they took."""
        self._paid_ms = {each: paid for each, paid in self._paid_ms.items() if paid > now_ms}
