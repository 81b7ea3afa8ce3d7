"""Data sets that need no download, and (in ``loader``) how samples become batches."""

from ampctl.data.digits import Digits
from ampctl.data.text import PythonSource, TextFile

__all__ = ["Digits", "PythonSource", "TextFile"]
