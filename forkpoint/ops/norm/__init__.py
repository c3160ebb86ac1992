"""Root-mean-square norms."""
