"""Users in processes of their own, each of which asks the others, answers them, or both."""
