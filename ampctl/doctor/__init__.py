"""Finding what is at fault when numbers go wrong, and saying what to change."""
