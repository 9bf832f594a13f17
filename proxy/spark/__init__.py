"""What runs in the user's Spark driver: needs nothing but pyspark and the standard library."""

from proxy.spark.quota_listener import QuotaListener, client_options

__all__ = ["QuotaListener", "client_options"]
