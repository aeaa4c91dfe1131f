"""Tests run what pages say; what builds the site, and what was built, is not theirs."""

collect_ignore_glob = ["*.py", "_build", "_ipython"]
