"""What each query has read and completed.

From the wire: `tracker`, `topics`, `reader`. From the driver: `report`, `report_handler`. All else
that is known is under `query_registry`; `log_ends` and `committer` speak with the cluster.
"""
