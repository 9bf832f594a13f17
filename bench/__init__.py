"""Performance figures of the proxy, measured against targets: `python -m bench`."""
