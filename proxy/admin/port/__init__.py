"""Who may connect to the admin port, how often, and what they may do there."""
