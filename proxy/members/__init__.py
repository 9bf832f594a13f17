"""Which member owns which clients: quota keys, slots, the map of slots to members. Sans-I/O."""
