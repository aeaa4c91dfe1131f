"""Rules against a plain scalar loop, and the properties they share."""
