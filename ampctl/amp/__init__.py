"""Mixed precision: the autocast dtype, the loss scale, clipping."""
