"""Files in a directory or in an object store, which checkpoints and prepared data are kept in."""
