"""The one Kafka client of our own, for all that the proxy asks the cluster itself.

`dial` opens connections, `login` says who the proxy is, `broker_connection` carries requests and
their responses, `kafka_client` finds the broker to ask, and `upstream` says why none answered. Who
uses the client brings the messages, which are kafka-python's.
"""
