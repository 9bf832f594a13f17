"""The demo of pipelines: of two queries in a row the second slows down for a while.

`a` is fed at a steady rate. `first` reads it and writes `b`, `second` reads that and writes `c`:
a pipeline of examples/demo-pipeline.yaml. `free-first` and `free-second` do the same with topics of
their own and are no pipeline. While it is slow each record takes both second queries much longer.
`runner` starts the parts, `query` and `proxy.demo.feed` are the child processes, `jobs` says what
the queries do, `figures` makes sense of what is seen and judges it, `plot` draws.
"""
