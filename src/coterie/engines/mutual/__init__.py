"""Everybody trains: users in processes of their own, each of which asks the others and answers them."""
