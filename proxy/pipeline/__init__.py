"""Pipelines of stages joined by topics: who holds back whom, and which source batches are finished.

Sans-I/O and of one thread: time is an argument, in monotonic milliseconds (`now_ms`) unless it is
said otherwise. Rates are records per second.

- `graph`: what a pipeline is, and what can be wrong with it.
- `trigger`, `controller`, `coordinator`: a stage that is sent too much asks for less, the node
  before it slows down, and of several requests one is applied.
- `shares`: how several nodes before a stage share what it processes.
- `flow`: these joined for one pipeline.
- the completion ledger: which batches of the source are still being worked on, and where.
"""
