"""What people read of a run: the verdict, a summary, figures and self-contained pages."""
