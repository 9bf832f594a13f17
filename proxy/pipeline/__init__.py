"""Pipelines of stages joined by topics: who holds back whom, and which source batches are finished.

Time is an argument, in monotonic milliseconds (`now_ms`) unless it is said otherwise. Rates are
records per second. All but `running` and `pipeline_state` do no I/O.

- `graph`: what a pipeline is, and what can be wrong with it.
- `trigger`, `controller`, `coordinator`: a stage that is sent too much asks for less, the node
  before it slows down, and of several requests one is applied; `fair_rates`: how several nodes
  before a stage share what it processes. `flow_control`: these joined for one pipeline.
- `ledger`: when everything made from a source batch is done. `edges`: what was written and not yet
  read. `deferred`: batches reported before those that feed them. `completion`, and
  `completion_records` for its records: these joined for one pipeline.
- `batch_limit`, `planned_batches`: how many records a batch may have so that no bound is passed,
  and what is planned and not reported; `batch_planner` computes it from what is measured.
- `running_pipeline`: one pipeline at work; `enforcer` holds its clients, `recovery` finds what only
  an earlier process saw; `running`: all of them, wired to reports, state and metrics.
"""
