"""All users in one process: batches drawn together, and few passes for many users."""
