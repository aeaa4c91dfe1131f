"""What a run is, and the one way to take a step: for one run, and for many as one program."""
