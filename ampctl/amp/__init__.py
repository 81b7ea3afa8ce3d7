"""Mixed precision: the autocast dtype, the loss scale, clipping. Torch alone; no recipe is read here."""
