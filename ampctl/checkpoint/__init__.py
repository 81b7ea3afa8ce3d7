"""Checkpoints that are whole or absent: one file, the files of a run, the lock of its folder."""
