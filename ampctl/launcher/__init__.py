"""From a recipe and a number of processes to ranks: run here, or on torchrun's own agent."""
