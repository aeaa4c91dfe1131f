"""A table, from the command line to a saved personal model and its predictions."""
