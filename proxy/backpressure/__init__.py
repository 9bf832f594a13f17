"""Backpressure: what a query's batches say about its rate, put in force. Sans-I/O, times in ms."""
