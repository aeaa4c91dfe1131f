"""A personal model for every user: each is user 0 once, with all others as its peers."""
