"""Sockets: listeners, connection pairs, and the bytes that move between client and broker."""
