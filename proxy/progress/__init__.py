"""What each query has read and completed.

- From the wire: `tracker`, `topics`, `reader`.
- From the driver: `report`, `report_handler`.
- What is known: `offset_ranges`, `log_edges`, `skipped_ranges`, `partition`, `query`,
  `query_clients`, `query_registry`.
- Kept and shown: `progress_records`, `events`, `documents`, `progress_collector`.
- To and from the cluster: `log_ends`, `commits`, `committer`, `group_offsets`.
"""
