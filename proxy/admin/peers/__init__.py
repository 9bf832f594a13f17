"""Asks the members of a tier, so that each of them answers for all."""
