"""The first hour with the proxy: `init` writes what it needs, `doctor` says what is wrong."""
