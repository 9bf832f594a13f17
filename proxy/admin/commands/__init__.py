"""Commands for operators: they ask the admin server of a running proxy."""
