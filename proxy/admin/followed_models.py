"""What documents of queries and pipelines say, which `progress` and `pipeline` make."""

from proxy.admin.columns import Column
from proxy.admin.document_models import Model
from proxy.state import Document

QUERY = Model[Document](
    """
    name, client_id, query_id, run_id: whose it is; the ids are Spark's
    state, ended, error: `running`, `idle`, `ended`, `failed`, or `silent`: neither ended nor heard
        of for a minute; when it ended, and with which exception
    trigger: of the present run; `null` when not known. `kind` is `processing_time`,
        `available_now`, `once`, `continuous`, `real_time`, or `other`; `interval_s` is 0 for as
        fast as it can, `null` for the second and third
    last_report, last_heard: when its listener last reported an event, and when it last said
        anything of the present run
    report_age_s: for how long no report has said what the run has completed, and so how old
        `completed_to` and `lag` may be. A heartbeat of a listener that knows of no further batch
        counts; `null` when nothing has yet, or the run has ended
    batch, last_batch, run_batches: the last one that was reported: `id`, `rows`, `duration_s`
        (Spark's `triggerExecution`) and `ended`; its number, and how many this run has had
    reports: `received`, `lost`, `repeated`, and how many were `refused`, by reason
    commit: `null` when the query has no `commit_group`; else the `group`, when it was committed
        `last`, the last `error`, and how often a commit would have gone `backwards`
    advice: what to mend in its configuration or job: [the
        kinds](spark.md#what-the-proxy-says-to-mend)
    notes: what happened lately, the newest first, each with its `text`
    adaptive: `null` when no adaptive rule bounds its client; else `entity`, `client_id`, `query`,
        `state`, `rate` (records/s), `ceiling`, `bound` and `static_bound` (bytes/s), in force where
        batches are not shaped, `bytes_per_record`, `offsets_per_record`, `batch_interval_ms` as the
        rule says or as learnt, `waiting_ms`, `bound_age_s`, `report_age_s`, `reason`; and in
        `clamp` what the driver was told of the log's end: `on`, `why`, `offsets`, and `withheld`,
        by [how many records](spark.md#the-signal-for-autoscalers) that was less than the real one
    totals: of all partitions, shown or not: `partitions`, `lag_records`, `lag_s` (the longest),
        `in_flight_records`, `failed_records`, `skipped_records`, `stuck_partitions`
    partitions: those of the page
    """
)

PARTITION = Model[Document](
    """
    topic, partition, topic_id, leader: which it is, and the node id of the broker that leads it
    completed_to, delivered_to, completed_at: all below was completed by batches, was given to the
        query; when the first was so
    committed: to the group
    high_watermark, log_start, lag_records, lag_s: the log's end is taken from what the query is
        answered; when nothing passes, the proxy asks the cluster: while the query is at work, each
        0.2 s, and of 10,000 partitions each 4 s; when nothing was seen of it for longer than 6 s,
        in a sixtieth of that time, 10 s at most
    in_flight, failed: given and not completed; of that, what will be read again: `records`, and the
        `ranges` of offsets, of which 20 are shown and `ranges_left_off` not
    refetched: given again: `records`, and the `latest`
    skipped, skipped_records: ranges that the query does not read, each `from` an offset `to` before
        another, with its reason. What the broker has removed counts when a reader is told so, and
        at the latest with the report of the batch that should have had it
    stuck_since: since when nothing completes although there is lag
    """,
    columns=(
        Column("completed", "completed_to", "count", page="Completed to"),
        Column("end", "high_watermark", "count", page="Log end"),
        Column("lag", "lag_records", "count", page="Lag"),
        Column("oldest", "lag_s", "seconds", page="Oldest"),
        Column("in flight", "in_flight.records", "count", page="In flight"),
    ),
)

PIPELINE_ROW = Model[Document](
    """
    name, at_s, hold_producers, max_lag: the pipeline, when this was so, and what its configuration
        says
    stages, sources: its nodes; sources are producers, `uncontrolled` without `hold_producers`
    events: what was held and released, up to 100, the latest last: `at_s`, `node`, `rate`, `reason`
    refused_readings, unknown: 0 and empty, for those who read the fields of earlier versions
    completion: of source batches, since the proxy started: how many `completed`, `timed_out` and
        `failed`, by reason; `early_batches`, `forced_batches`, `dropped_batches`; `edges` of at
        most `max_edges`; and the following
    """
)

COMPLETION = Model[Document](
    """
    pending: source batches in flight: `batches` of `max_batches`, `size_bytes` of `max_bytes`,
        whether it is `full`; `first` has the 100 that came first, each with `root`, `stage`,
        `batch`, `size_bytes`, `started_s`, `age_s` and the stage where it `waits_at`
    counts, notes: what was unusual in the ledger: `late_acks`, `repeated_records`,
        `foreign_records`, `unanchored_ranges`, `ownerless`, `unknown_stages`, `unknown_topics`,
        `repeated_inits`, `unknown_fails`; and up to 100 texts
    """
)

NODE = Model[Document](
    """
    name, state, rate, normal_rate: `uncontrolled`, or `reduced` to so many records/s; and its own
        rate
    waits: of a stage: `null`, or `for` which stage it waits, how many `records` its next batch may
        have, and the `reason`. `max_lag` and `max_pending` are
        [bounds](pipelines.md#what-is-a-bound-and-what-is-a-target), rates and bands are targets
    upstream: of a stage: the stages and sources whose topics it consumes
    held_by: the stages that asked for it; with none of them left it is released step by step
    t_delay_ms: what each record is delayed, on average, at that rate
    measured_rate: records/s that a stage was sent, or a source sent, in its last period; `null`
        when not known
    received_rate, processing_rate, lag: of a stage: what it is sent and processes (records/s), how
        many records wait
    band, band_in_force, samples: its band, and that at the rate that it is held to; samples of the
        last period: `count`, `above` and `below` it
    last_change: `at_s`, `direction`, `by` whom, `reason`
    last_request: what it asked of those before it: `at_s`, `direction`, `processing_rate`,
        `reason`, and whom it `asked`
    alive: `false` after 5 minutes without a report, and when the query has ended: it asks nothing
        then; bounds are kept all the same
    """
)
