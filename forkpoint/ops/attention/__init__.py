"""Writing keys and values to blocks, and attention over them."""
