"""Whom to listen to and how much, chosen from the data before the first step."""
