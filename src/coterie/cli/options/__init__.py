"""The options of commands: in groups, and those whose values are registered names or knobs."""
