"""What the proxy does for Structured Streaming queries: follows them, keeps and bounds them."""
