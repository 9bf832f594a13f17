"""Backpressure: what a query's batches say about the rate that it can take, put in force.

Sans-I/O: time is an argument in monotonic milliseconds; knows nothing of sockets.
"""
