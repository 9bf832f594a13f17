"""The processes of one machine: a supervisor, and the workers that relay."""
