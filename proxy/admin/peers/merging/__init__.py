"""Documents of several members put together: documents in, a document out, and no I/O."""
