"""Many runs as one program: seeds, users as user 0, rules and step sizes side by side."""
