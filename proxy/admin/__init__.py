"""HTTP for operators: metrics, health, the API, the status page, and its view in the terminal."""
