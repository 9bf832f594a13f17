"""Which clients share a quota, and so one owner. Sans-I/O."""
