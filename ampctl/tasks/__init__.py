"""What a batch becomes: a loss and, in evaluation, metrics; the tasks that come with ampctl."""

from ampctl.tasks.builtin import (
    IGNORE_INDEX,
    Classification,
    LanguageModel,
    Regression,
    Transformers,
)
from ampctl.tasks.task import Task

__all__ = ["IGNORE_INDEX", "Classification", "LanguageModel", "Regression", "Task", "Transformers"]
