"""Quotas: who is bounded by which rule, and how long responses wait. Sans-I/O, monotonic ms."""
