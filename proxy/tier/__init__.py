"""Many members as one: who owns which clients, how slots move, and what members tell each other."""
