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
- `ledger`, on `buckets`: when everything made from a source batch is done.
- `lane`, `edges`: what was written and not yet read. `early`: batches told before those that feed
  them. `anchoring`: what a batch does to the edges. `inflight`: how much is not finished.
- `completion`, and `completion_state` for its records: these joined for one pipeline.
"""
