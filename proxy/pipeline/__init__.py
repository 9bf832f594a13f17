"""Pipelines of stages joined by topics: who holds back whom, and which source batches are finished.

Sans-I/O and of one thread: time is an argument, in monotonic milliseconds (`now_ms`) unless it is
said otherwise. Rates are records per second.

- `graph`: what a pipeline is, and what can be wrong with it.
- `trigger`, `controller`, `coordinator`: a stage that is sent too much asks for less, the node
  before it slows down, and of several requests one is applied.
- `room`, `planned`: how many records a batch may have so that no bound is passed, and what is
  planned and not reported.
- `shares`: how several nodes before a stage share what it processes.
- `flow`: these joined for one pipeline.
- `ledger`: when everything made from a source batch is done.
- `edges`: what was written and not yet read. `deferred`: batches reported before those that feed
  them. `completion`, and `completion_records` for its records: these joined for one pipeline.
- `running`: all pipelines of the proxy, wired to what is measured, to clients, state and metrics.
"""
