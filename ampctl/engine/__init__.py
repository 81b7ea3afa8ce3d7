"""One training step: its passes, gradients and optimizers, and the state that they change."""
