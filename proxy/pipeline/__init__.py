"""Pipelines of stages joined by topics: who holds back whom, and which source batches are finished.

Time is an argument, in monotonic milliseconds (`now_ms`) unless it is said otherwise. Rates are
records per second. All but `running` do no I/O.

- `graph`: what a pipeline is, and what can be wrong with it.
- `trigger`, `controller`, `coordinator`: a stage that is sent too much asks for less, the node
  before it slows down, and of several requests one is applied; `fair_rates`: how several nodes
  before a stage share what it processes. `flow_control`: these joined for one pipeline.
- `ledger`: when everything made from a source batch is done. `edges`: what was written and not yet
  read. `deferred`: batches reported before those that feed them. `completion`, and
  `completion_records` for its records: these joined for one pipeline.
- `batch_limit`: how many records a batch may have so that no bound is passed; `batch_planner`
  computes it from what is measured, and from what is planned and not reported.
- `running_pipeline`: one pipeline at work; `enforcer` holds its clients; `running`: all of them,
  wired to reports, state and metrics.
"""
