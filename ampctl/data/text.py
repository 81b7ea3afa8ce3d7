"""Text as bytes, cut into windows for a language model: any file, or Python's own source code."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ampctl.errors import UsageError

Split = Literal["train", "test"]

TEST_EVERY = 10
NOT_SOURCE = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
)


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of ``context + 1`` bytes that do not overlap; what is left at the end is dropped.

    A sample is (input, target), both int64 [context]; the target is the input moved on by one byte.
    ``__getitems__`` gathers a whole batch at once: two tensors [batch, context].
    ``origin`` names the text in the UsageError that is raised when it has not one window.
    """

    vocab_size: ClassVar[int] = 256

    def __init__(self, text: bytes, context: int, *, origin: str) -> None:
        if context < 1:
            raise ValueError(f"context is {context}; it must be 1 or more")
        window = context + 1
        count = len(text) // window
        if count == 0:
            raise UsageError(
                f"{origin} has {len(text):,} bytes; one window of context {context} needs "
                f"{window:,}. Give a longer text or a smaller context."
            )
        # A bytearray: torch warns about memory that it may not write to.
        self.windows = torch.frombuffer(
            bytearray(memoryview(text)[: count * window]), dtype=torch.uint8
        ).view(count, window)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.windows[index].long()
        return window[:-1], window[1:]

    def __getitems__(self, indices: Tensor | Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        windows = self.windows.index_select(0, chosen)
        return windows[:, :-1].long(), windows[:, 1:].long()


class PythonSource(ByteWindows):
    """The source of the standard library of the Python that runs this: about 12 MB of real text.

    The ``.py`` files without their tests, in the order of their paths, joined. ``split``: every
    tenth file is ``test``, the rest is ``train``. Another version of Python gives another text.
    ``max_bytes`` keeps the beginning alone; null: all.

    A sample is (input, target), both int64 [``context``], of bytes; the target is the input moved
    on by one byte.
    """

    def __init__(
        self, split: Split = "train", context: int = 256, max_bytes: int | None = None
    ) -> None:
        _check_split(split)
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}; it must be 1 or more, or null")
        root = Path(sysconfig.get_path("stdlib"))
        text = bytearray()
        for number, path in enumerate(_source_files(root)):
            if (number % TEST_EVERY == TEST_EVERY - 1) == (split == "test"):
                text += path.read_bytes()
            if max_bytes is not None and len(text) >= max_bytes:
                break
        super().__init__(
            bytes(text[:max_bytes]),
            context,
            origin=f"the {split} part of Python's source in {root}",
        )


class TextFile(ByteWindows):
    """The bytes of a file; its last ``test_fraction`` is ``test``, what comes before is ``train``.

    ``split`` is one of the two. A relative ``path`` starts at the current folder. A file that
    cannot be read is a UsageError.

    A sample is (input, target), both int64 [``context``], of bytes; the target is the input moved
    on by one byte.
    """

    def __init__(
        self,
        path: str | Path,
        split: Split = "train",
        context: int = 256,
        test_fraction: float = 0.1,
    ) -> None:
        _check_split(split)
        if not 0 <= test_fraction < 1:
            raise ValueError(f"test_fraction is {test_fraction}; it must be 0 or more and below 1")
        file = Path(path).expanduser()
        if file.exists() and not file.is_file():  # a device would be read for ever
            raise UsageError(f"{file} is not a regular file. Give the path of a text file.")
        try:
            text = file.read_bytes()
        except OSError as error:
            raise UsageError(
                f"{file}: cannot be read: {error.strerror or error}. "
                f"Give the path of a text file (the current folder is {Path.cwd()})."
            ) from error
        cut = len(text) - int(len(text) * test_fraction)
        part = text[:cut] if split == "train" else text[cut:]
        super().__init__(part, context, origin=f"the {split} part of {file}")


def _check_split(split: str) -> None:
    if split not in ("train", "test"):
        raise ValueError(f'split is {split!r}; it must be "train" or "test"')


def _source_files(root: Path) -> Iterator[Path]:
    """Yield the .py files below ``root``, sorted by their relative paths."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_SOURCE]
        relative = Path(folder).relative_to(root)
        found += [(relative / name).as_posix() for name in names if name.endswith(".py")]
    for name in sorted(found):
        yield root / name
