"""HTTP for operators: metrics and health."""
