"""Methods that give each user's model a weight.

Learned from losses, distances or gradients, or given.
"""
