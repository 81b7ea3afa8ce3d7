"""The training run: its loop, its evaluation, its folder."""
