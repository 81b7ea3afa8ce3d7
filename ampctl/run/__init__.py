"""One training run in one process: its loop, its evaluations, its folder, its checkpoints."""
