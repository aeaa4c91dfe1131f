"""A personal model for every user, tied to the others' by a penalty, a mixture, a cluster or a common start."""
