"""What people read: figures and self-contained pages."""
