"""State dicts: what of a state a checkpoint holds, what it must look like, and how it is loaded."""
