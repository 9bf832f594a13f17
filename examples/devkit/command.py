"""The whole of `quota-proxy broker`: one broker until a signal ends it."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from examples.devkit.broker import EmbeddedBroker

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve_broker(port: int, data_dir: Path) -> int:
    """Run one broker until SIGTERM or SIGINT.

    Prints the download's progress to stderr and, once the broker serves, `ready HOST:PORT` on a
    line of its own to stdout. For the main thread.
    Returns 0 after a signal, 1 when the broker ended by itself; raises as `EmbeddedBroker.start`.
    """
    broker = EmbeddedBroker(data_dir, port, on_download=_print_download)
    with stop_signals_interrupt():
        try:
            broker.start()
            sys.stdout.write(f"ready {broker.bootstrap}\n")
            sys.stdout.flush()
            broker.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            broker.stop()
    sys.stderr.write(f"the broker ended by itself; its log ends with:\n{broker.log_tail()}\n")
    return 1


@contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt in the main thread at the first Ctrl-C or SIGTERM, not at others."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_download(done: int, found: int, name: str) -> None:
    what = f"downloaded {done} of {found}: {name}" if done else f"looking up jars ({found}): {name}"
    sys.stderr.write(f"{what}\n")
