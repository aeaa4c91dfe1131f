"""Training: set up, choose, take steps, finish; one run or many at once."""
