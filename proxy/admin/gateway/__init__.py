"""One admin port that answers for all members."""
