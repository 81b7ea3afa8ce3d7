"""Write the reference pages of the manual from the code: run it as ``scripts/references``.

What a page says stands in the code: helps and limits of recipe keys, helps of options, docstrings,
the table of events. Only the frame around it is written here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import EnumType
from pathlib import Path
from textwrap import indent
from typing import Any, get_args, get_type_hints

import typer.main
import yaml
from typer.models import OptionInfo

from ampctl import data, models, schedules, tasks
from ampctl.cli import app
from ampctl.recipe import builtin
from ampctl.recipe.hints import allowed, members
from ampctl.recipe.schema import TARGET, Recipe
from ampctl.track.events import COMMON, EVENTS

DOCS = Path(__file__).parents[1] / "ampctl" / "docs"
GENERATED = (
    "*This page is generated from the code by `scripts/references`. Do not edit it: change the "
    "code, then run that command.*"
)
KINDS = (
    ("Tasks", "task", tasks, "How a batch becomes a loss and, in evaluation, metrics."),
    ("Models", "model", models, "Small models; your own needs nothing from here."),
    ("Data sets", "data.train", data, "Data that needs no download; `data.eval` takes the same."),
    (
        "Schedules",
        "scheduler",
        schedules,
        "The learning rate as a factor on that of the optimizer. Steps that are skipped do not "
        "count. `total_steps`, if you do not give it, is the length of the run, where that is "
        "known beforehand.",
    ),
)
EXAMPLES: Mapping[str, Any] = {
    "in_features": 64,
    "hidden": [128, 128],
    "num_classes": 10,
    "path": "book.txt",
    "every": 1000,
}
"""Values for arguments without a default."""


def recipe_page() -> str:
    """Return the page of all recipe keys."""
    parts = [
        "Recipe keys",
        "All keys that a recipe file can have, section by section. These are needed in every "
        "recipe (of `train.max_epochs` and `train.max_steps` one is enough):",
        _fenced("yaml", minimal_recipe()),
        f"A *block* is a mapping with a `{TARGET}`, the import path of a class or function; its "
        "other keys are the arguments that it is called with. Blocks may stand inside blocks. A "
        "value may be `${KEY}`, which is the value of another key. On the command line a key is "
        "written with dots: `amp.init_scale=1024`.",
        "Beside the keys below a recipe file may have `extends`: another file, or a list of them, "
        "relative to this one. Their keys are taken over; where both have a key, this file wins. "
        "Example: `extends: base.yaml`",
    ]
    parts += [
        "## At the top",
        "\n".join(key_lines(Recipe)),
        "Two arguments of an optimizer are read by ampctl itself. `groups` gives options of their "
        'own to globs of parameter names, as in `groups: {"head.*": {lr: 1e-4}}`. `params` is a '
        "glob, or a list of them, of the parameters that one of several optimizers trains, as in "
        '`generator: {_target_: torch.optim.Adam, lr: 1e-3, params: "generator.*"}`.',
        *sections(Recipe),
    ]
    return _page(*parts)


def minimal_recipe() -> str:
    """Return a recipe of the examples of the needed keys."""
    needed = [each for each in fields(Recipe) if each.default is MISSING]
    examples = {each.name: each.metadata.get("example") for each in needed}
    return "\n".join(f"{name}: {example}" for name, example in examples.items() if example)


def sections(cls: type, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a heading, a line and a list of keys for each section of the schema."""
    hints = get_type_hints(cls)
    for entry in fields(cls):
        for member in members(hints[entry.name]):
            if is_dataclass(member):
                inner = (*path, entry.name)
                yield f"## {'.'.join(inner)}"
                yield _sentence(entry.metadata["help"])
                yield "\n".join(key_lines(member, inner))
                yield from sections(member, inner)


def key_lines(cls: type, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield an item of a list for each key of a section, but for those that are sections."""
    hints = get_type_hints(cls)
    for entry in fields(cls):
        if not is_dataclass(hints[entry.name]):
            inner, metadata = (*path, entry.name), entry.metadata
            yield (
                f"* **`{'.'.join(inner)}`**: {_sentence(metadata['help'])} Takes "
                f"{takes(entry, hints[entry.name])}; {_default(entry)}. "
                f"Example: `{yaml_example(inner, metadata['example'])}`"
            )


def yaml_example(path: tuple[str, ...], value: str) -> str:
    """Write a value below the keys of its section, on one line."""
    first, *inner = path
    for name in reversed(inner):
        value = f"{{{name}: {value}}}"
    return f"{first}: {value}"


def takes(entry: Field[Any], hint: Any) -> str:
    """Describe the values of a key."""
    named = " or names, each with a block" if entry.metadata.get("many") else ""
    return f"{allowed(hint, entry.metadata)}{named}".replace(TARGET, f"`{TARGET}`")


def _default(entry: Field[Any]) -> str:
    if entry.default is not MISSING:
        return f"default `{_yaml(entry.default)}`"
    if entry.default_factory is not MISSING:
        return f"default `{_yaml(entry.default_factory())}`"
    return "it is needed"


def commands_page() -> str:
    """Return the page of all commands, with their arguments and options."""
    parts = [
        "Commands",
        "Every command also takes `--help`, or `-h`, which prints what this page says of it. "
        "`ampctl --install-completion` teaches your shell to complete commands and options. "
        "Arguments in brackets may be left out.",
        *command_parts(typer.main.get_command(app), "ampctl"),
    ]
    return _page(*parts)


def command_parts(command: Any, name: str) -> Iterator[str]:
    """Yield the parts of the page about a command, then about the commands in it."""
    inner = getattr(command, "commands", {})
    declared = parameters(command)
    arguments = [each for each in declared if not each.flags]
    options = [each for each in declared if each.flags]
    usage = [name, *(["[OPTIONS]"] if options else []), *(each.usage for each in arguments)]
    yield f"## {name}"
    yield _fenced("text", " ".join([*usage, *(["COMMAND"] if inner else [])]))
    yield _sentence(command.help)
    yield "\n".join(f"* `{name} {each}`: {_sentence(inner[each].help)}" for each in inner)
    for panel in dict.fromkeys(each.panel for each in [*arguments, *options]):
        yield f"{panel}:"
        yield "\n".join(each.line for each in declared if each.panel == panel)
    for each, command_inside in inner.items():
        yield from command_parts(command_inside, f"{name} {each}")


@dataclass(frozen=True)
class Parameter:
    """An argument or an option of a command, as its function declares it for Typer."""

    name: str
    flags: list[str]
    hint: Any
    info: Any
    default: Any

    @property
    def panel(self) -> str:
        """The heading that it stands under."""
        return self.info.rich_help_panel or ("Options" if self.flags else "Arguments")

    @property
    def value(self) -> str:
        """What stands for its value; a flag has none."""
        if self.flags and bool in members(self.hint):
            return ""
        kind = members(self.hint)[0]
        choices = [each.value for each in kind] if isinstance(kind, EnumType) else []
        value = self.info.metavar or "|".join(choices) or {int: "N"}.get(kind, self.name.upper())
        return f"{value.strip('[]')} ..." if self.is_many and not self.flags else value.strip("[]")

    @property
    def is_many(self) -> bool:
        """Whether several may be given."""
        return list[str] in members(self.hint)

    @property
    def usage(self) -> str:
        """How an argument stands in the command."""
        return self.value if self.default is inspect.Parameter.empty else f"[{self.value}]"

    @property
    def line(self) -> str:
        """An item of a list."""
        parts = [_sentence(self.info.help)]
        if self.info.min is not None:
            parts.append(f"At least {self.info.min}.")
        if self.flags and self.is_many:
            parts.append("It may be given several times.")
        if isinstance(self.info.show_default, str):
            parts.append(f"Default: {self.info.show_default}.")
        elif self.default not in (None, False, inspect.Parameter.empty):
            parts.append(f"Default: `{getattr(self.default, 'value', self.default)}`.")
        written = " ".join(filter(None, ["/".join(self.flags), self.value]))
        return f"* **`{written}`**: {' '.join(parts)}"


def parameters(command: Any) -> list[Parameter]:
    """Return the parameters that the function of a command declares."""
    function = inspect.unwrap(command.callback)
    hints = get_type_hints(function, include_extras=True)
    found = []
    for each in command.params:
        if each.name in hints:  # Typer's own options, for completion, are not
            hint, info = get_args(hints[each.name])
            flags = [*each.opts, *each.secondary_opts] if isinstance(info, OptionInfo) else []
            default = inspect.signature(function).parameters[each.name].default
            found.append(Parameter(each.name, flags, hint, info, default))
    return found


def events_page() -> str:
    """Return the page of the events of metrics.jsonl."""
    parts = [
        "Events of metrics.jsonl",
        "`metrics.jsonl` in a run folder has one JSON object a line: an event. A number that is "
        'not finite is written as the text `"nan"`, `"inf"` or `"-inf"`, so that every line is '
        "valid JSON. In Python `ampctl.track.metrics.read_metrics` reads the file. Every event has "
        "these fields:",
        _field_lines(COMMON),
        "`NAME` below stands for the name of an optimizer or of a metric.",
    ]
    for name, event in EVENTS.items():
        parts += [f"## {name}", event.meaning, _field_lines(event.fields)]
    return _page(*parts)


def _field_lines(given: Mapping[str, Any]) -> str:
    return "\n".join(
        f"* **`{name}`** ({allowed(each.type)}): {each.meaning}"
        + (f" ({each.only})" if each.only else "")
        for name, each in given.items()
    )


def builtin_page() -> str:
    """Return the page of what comes with ampctl: recipes, tasks, models, data and schedules."""
    names = builtin.builtin_names()
    parts = [
        "Built-in recipes, tasks, models, data sets and schedules",
        "What a recipe can name without any code of yours. A recipe names a class by its path, "
        "with its arguments beside it, as the examples show.",
        "## Recipes",
        "`ampctl train NAME` trains one; `ampctl recipes show NAME` prints it, with what it needs "
        "and reaches; `ampctl recipes copy NAME` gives you a copy to change.",
        "\n".join(f"* **`{name}`**: {_sentence(builtin.describe(name))}" for name in names),
    ]
    for title, key, module, text in KINDS:
        parts += [f"## {title}", text]
        for cls in built_in(module):
            parts += class_parts(cls, key, f"{module.__name__}.{cls.__name__}")
    return _page(*parts)


def built_in(module: Any) -> list[type]:
    """Return the classes of a module that a recipe may name, by name; the base class comes last."""
    own = [
        thing
        for name, thing in vars(module).items()
        if isinstance(thing, type)
        and thing.__module__.startswith(module.__name__)
        and not name.startswith("_")
    ]
    return sorted(own, key=lambda cls: (cls is tasks.Task, cls.__name__))


def class_parts(cls: type, key: str, path: str) -> Iterator[str]:
    """Yield the parts of the page about a class: docstring, arguments, an example."""
    yield f"### {path}"
    yield _docstring(cls)
    if cls is tasks.Task:
        yield "It is there to inherit from. Its methods:"
        methods = [m for n, m in vars(cls).items() if inspect.isfunction(m) and n[0] != "_"]
        for method in methods:
            names = ", ".join(list(inspect.signature(method).parameters)[1:])
            text = indent(_docstring(method), "  ").lstrip()
            yield f"* **`{method.__name__}({names})`**: {text}"
        return
    given = _arguments(cls)
    yield "\n".join(map(_argument_line, given)) or "It has no arguments."
    yield _fenced("yaml", yaml_example(tuple(key.split(".")), example_block(cls, path)))


def _arguments(cls: type) -> list[inspect.Parameter]:
    return list(inspect.signature(cls, eval_str=True).parameters.values())


def _argument_line(argument: inspect.Parameter) -> str:
    default = "it is needed"
    if argument.default is not argument.empty:
        default = f"default `{_yaml(argument.default)}`"
    elif argument.name == "total_steps":
        default = "filled in"
    return f"* **`{argument.name}`**: {allowed(argument.annotation)}; {default}"


def example_block(cls: type, path: str) -> str:
    """Return a block that builds an object of a class, on one line."""
    needed = [each.name for each in _arguments(cls) if each.default is each.empty]
    given = {name: EXAMPLES[name] for name in needed if name != "total_steps"}
    return "{" + ", ".join([f"{TARGET}: {path}", *(f"{k}: {_yaml(given[k])}" for k in given)]) + "}"


def _docstring(thing: Any) -> str:
    """Return a docstring as Markdown."""
    text = re.sub(r":\w+:(?=`)", "", inspect.cleandoc(thing.__doc__))
    return text.replace("``", "`")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith((".", "?")) else ".")


def _yaml(value: Any) -> str:
    """Write a value as YAML, on one line."""
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("...\n").strip()


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", GENERATED, *filter(None, parts)]) + "\n"


PAGES: Mapping[str, Callable[[], str]] = {
    "reference-recipe.md": recipe_page,
    "reference-commands.md": commands_page,
    "reference-events.md": events_page,
    "reference-builtin.md": builtin_page,
}


def main() -> None:
    """Write the pages that are not current."""
    for name, make in PAGES.items():
        file, text = DOCS / name, make()
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            print(f"written: {file.relative_to(DOCS.parents[1])}")


if __name__ == "__main__":
    main()
