"""Lets the tests of progress find what they share."""

import sys
from pathlib import Path

# Helper modules are no test modules: under import mode importlib they are found by path only.
sys.path.append(str(Path(__file__).parent))
