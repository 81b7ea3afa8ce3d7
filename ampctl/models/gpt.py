"""A small decoder-only transformer in the manner of GPT-2."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GPT(nn.Module):
    """Pre-norm decoder with learned positions and a head tied to the token embedding.

    Takes tokens [batch, time], int64, below ``vocab_size``, with a time of ``context`` at most.
    ``width``, a multiple of ``num_heads``, is the size of the residual stream; ``num_layers``
    counts the blocks, each of attention and feed-forward; ``dropout`` acts in both and on the
    embedding.

    Architecture and initialisation: Radford et al., "Language Models are Unsupervised Multitask
    Learners", 2019: weights N(0, 0.02), those that write into the residual stream scaled by
    1 / sqrt(2 * num_layers). The defaults make 10.8 M parameters.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        context: int = 256,
        num_layers: int = 6,
        num_heads: int = 6,
        width: int = 384,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(
                f"width {width} cannot be divided among {num_heads} heads; "
                "make width a multiple of num_heads"
            )
        self.context = context
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        self._initialise(num_layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [batch, time], int64, to logits [batch, time, vocab_size].

        Raises ValueError if time is more than ``context``.
        """
        time = tokens.shape[1]
        if time > self.context:
            raise ValueError(
                f"the sequence has {time} tokens and the model a context of {self.context}; "
                "shorten the sequence or build the model with a larger context"
            )
        stream = self.dropout(self.tokens(tokens) + self.positions.weight[:time])
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.head(self.norm(stream))
        return logits

    def _initialise(self, num_layers: int) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                to_residual = name.endswith("project.weight")
                scale = 1 / math.sqrt(2 * num_layers) if to_residual else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to the residual stream."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, dropout)

    def forward(self, stream: Tensor) -> Tensor:
        """Map [batch, time, width] to the same shape."""
        attended = stream + self.attention(self.attention_norm(stream))
        outputs: Tensor = attended + self.feed_forward(self.feed_forward_norm(attended))
        return outputs


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [batch, time, width] to the same shape; no position sees a later one."""
        batch, time, width = inputs.shape
        by_head = (batch, time, 3, self.num_heads, width // self.num_heads)
        query, key, value = torch.unbind(
            self.query_key_value(inputs).view(by_head).permute(2, 0, 3, 1, 4)
        )
        dropout = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        merged = mixed.transpose(1, 2).reshape(batch, time, width)
        outputs: Tensor = self.dropout(self.project(merged))
        return outputs


class FeedForward(nn.Module):
    """Two linear layers, four times as wide between them, with GELU."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [batch, time, width] to the same shape."""
        hidden = F.gelu(self.expand(inputs), approximate="tanh")
        outputs: Tensor = self.dropout(self.project(hidden))
        return outputs
