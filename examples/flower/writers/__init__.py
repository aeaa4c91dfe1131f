"""A model for writer 0, with the help of other writers."""
