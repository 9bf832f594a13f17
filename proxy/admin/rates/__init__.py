"""How fast clients read and write, by the hour, and the rules that would fit that."""
