"""A relay between a scripted broker and scripted clients, for misbehaviour no real one shows."""
