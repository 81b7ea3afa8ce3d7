"""Three small models for the built-in recipes; a user's own model needs nothing from here."""

from ampctl.models.convnet import ConvNet
from ampctl.models.gpt import GPT
from ampctl.models.mlp import MLP

__all__ = ["GPT", "MLP", "ConvNet"]
