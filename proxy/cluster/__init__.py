"""The one Kafka client of our own, for all that the proxy asks the cluster itself.

Who uses it brings the messages, which are kafka-python's.
"""
