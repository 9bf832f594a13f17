"""Several members on one host: their ports, their processes, and a restart of each that ends."""
