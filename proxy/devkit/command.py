"""The whole of `quota-proxy broker`: one broker until a signal ends it."""

import sys
from pathlib import Path

from proxy.devkit.broker import EmbeddedBroker
from proxy.devkit.signals import stop_signals_interrupt


def serve_broker(port: int, data_dir: Path) -> int:
    """Run one broker until SIGTERM or SIGINT.

    Prints the download's progress to stderr and, once the broker serves, `ready HOST:PORT` on a
    line of its own to stdout. Call it from the main thread.
    Gives 0 after a signal, 1 when the broker ended by itself; raises as `EmbeddedBroker.start`.
    """
    broker = EmbeddedBroker(data_dir, port, progress=_print_progress)
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


def _print_progress(done: int, found: int, name: str) -> None:
    what = f"downloaded {done} of {found}: {name}" if done else f"looking up jars ({found}): {name}"
    sys.stderr.write(f"{what}\n")
    sys.stderr.flush()
