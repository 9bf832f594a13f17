"""Lets the tests import the modules that help them."""

import sys
from pathlib import Path

# Helper modules are no test modules: under import mode importlib they are found by path only.
sys.path.append(str(Path(__file__).parent))
