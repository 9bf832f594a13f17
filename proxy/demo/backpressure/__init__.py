"""The demo of backpressure: two queries whose processing slows down, one of them with it.

Both read the same topic through the proxy in the same Spark session, with a trigger every two
seconds. Half-way each record takes four times as long for a while. `runner` starts the parts,
`query` and `proxy.demo.feed` are the child processes, `jobs` says what the queries do, `figures`
judges it, `plot` draws it.
"""
