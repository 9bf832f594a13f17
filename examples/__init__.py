"""Configurations to copy from, and the demo."""
