"""What pliant needs of a running Ray cluster: sending jobs to it."""
