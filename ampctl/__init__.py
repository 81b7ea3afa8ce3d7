"""Train PyTorch models in mixed precision: one YAML recipe in, an exact, resumable run out."""

__version__ = "0.1.0"
