"""Adds up on Spark who used what: pyspark and the standard library are enough, on a cluster too."""
