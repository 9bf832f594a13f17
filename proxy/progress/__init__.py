"""What each query has read and completed; `query_registry` has it for the other rooms."""
