"""Runs the command line: its modules are imported without looking for garbage among them."""

import gc

gc.disable()
try:
    from proxy.cli import main
except KeyboardInterrupt:
    raise SystemExit(128 + 2) from None  # as shells say that SIGINT ended it

gc.freeze()
gc.enable()

if __name__ == "__main__":
    raise SystemExit(main())
