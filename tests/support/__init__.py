"""What tests share that is no test."""
