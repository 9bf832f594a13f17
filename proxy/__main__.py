"""Runs the command line: its modules are imported without looking for garbage among them."""

import gc

gc.disable()
from proxy.cli import main  # noqa: E402

gc.freeze()
gc.enable()

if __name__ == "__main__":
    raise SystemExit(main())
