"""Quotas: who is bounded by which rule, and for how long a response waits to keep the bound.

Sans-I/O: time is an argument in monotonic milliseconds; knows nothing of sockets.
"""
