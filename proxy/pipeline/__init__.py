"""Pipelines of stages joined by topics: who holds back whom, and which source batches are finished.

Time is an argument, in monotonic milliseconds (`now_ms`) unless it is said otherwise. Rates are
records per second. All but `running` do no I/O.

`running`: the loop over all pipelines, wired to reports, state and metrics. `running_pipeline`: one
of a `graph`, the loop over its `nodes`, with its `completion` (of a `ledger`) and `batch_limit`.
"""
