"""The `pliant` command."""
