"""Helper modules are no test modules: under import mode importlib they are found by path only."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
