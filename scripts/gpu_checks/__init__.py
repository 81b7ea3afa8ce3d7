"""What ``scripts/gpu_check`` checks, a module for each kind; ``gpu_check.py`` runs them."""
