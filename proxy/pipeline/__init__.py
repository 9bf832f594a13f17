"""Pipelines of stages joined by topics: who holds back whom, and which source batches are finished.

Time is an argument, in monotonic milliseconds (`now_ms`) unless it is said otherwise. Rates are
records per second. All but `running` do no I/O.

`flow_control` joins `trigger`, `controller`, `coordinator` and `fair_rates` for one pipeline of a
`graph`, `completion` joins `ledger`, `edges`, `deferred` and `completion_records`.
`running_pipeline` joins both; `batch_planner` and `batch_limit` bound its batches, and `enforcer`
holds its clients. `running`: all pipelines, wired to reports, state and metrics.
"""
