"""Speed, measured."""
