"""What each query has read and completed.

- From the wire: `tracker`, `topics`, `reader`.
- From the driver: `report`, `ranges`, `intake`, `senders`.
- What is known: `ranges`, `log`, `lag`, `skips`, `stall`, `partition`, `query`, `clients`, `book`,
  within the bounds of `settings`.
- Kept and shown: `records`, `loading`, `notes`, `documents`, `exposition`.
- To and from the cluster: `log_ends`, `commits`, `committer`, `group_offsets`, `link`.
"""
