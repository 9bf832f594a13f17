"""Pipelines at work: what is measured goes to `proxy.pipeline`, what it decides to the clients.

`line` is one pipeline and what it waits for, `members` who its clients are, `rooms` how many
records they may plan, `holds` how they are held, `keeping` the state; `pipelines` has them all and
is who the others talk to.
"""

from .pipelines import Pipelines

__all__ = ["Pipelines"]
