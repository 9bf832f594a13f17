"""Makes `python -m proxy` the same as `quota-proxy`."""

import sys

from proxy.cli import main

sys.exit(main())
