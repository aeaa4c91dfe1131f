"""Methods that give each user's model a weight: learned from losses, distances or gradients, or given."""
