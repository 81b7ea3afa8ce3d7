"""The places that open files: what a run or a checkpoint consists of goes through `files`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import ampctl

ROOT = Path(ampctl.__file__).parent
NAMES = frozenset(
    name
    for names in (
        "open read_text read_bytes write_text write_bytes fdopen touch FileInput FileHandler",
        "ZipFile TarFile mmap memmap fromfile tofile loadtxt genfromtxt safe_open load_file",
        "copyfile copy2 copytree sendfile save_file FileSystemReader FileSystemWriter",
    )
    for name in names.split()
)
OF_MODULES = frozenset(
    f"{module}.{name}"
    for module, names in {
        "torch": "load save",
        "np": "load save savez",
        "numpy": "load save savez",
        "os": "open",
        "io": "open FileIO",
        "shutil": "copy move",
        "pickle": "load dump",
        "json": "load dump",
        "yaml": "load",
    }.items()
    for name in names.split()
)

# What else opens files, and why it may.
ALLOWED = {
    "files": {"os.open", "os.fdopen", "open"},  # the one way
    "checkpoint.file": {"torch.save", "torch.load", "zipfile.ZipFile"},  # of what is open already
    "checkpoint.archive": {"zipfile.ZipFile"},  # of what is open already
    "checkpoint.export": {"torch.save", "save_file", "os.fdopen"},  # to a file that was made anew
    "checkpoint.disk": {"os.open"},  # a folder
    "checkpoint.index": {"disk.write_bytes"},  # by files.create
    "checkpoint.sharded": {
        "FileSystemWriter",  # to a folder that was made anew
        "class FileSystemReader",  # of parts that were proved
    },
    "run.init_from": {"load_file"},  # of a file that was opened, and is named by the user
    "run.folder": {"disk.write_bytes"},  # by files.create
    "run.log": {"class logging.FileHandler", "os.fdopen"},  # of files.descriptor
    "exactness.proof": {"spec.write_text", "noted.read_text"},  # in a temporary folder
    "exactness.witness": {"told.read_text", "write_text"},  # in a temporary folder
    "run.job_place": {"watchdog.open"},  # no file
    "recipe.reading": {"os.open"},  # a recipe that the user names; it may be a pipe
    "recipe.builtin": {"open"},  # ampctl's own
    "cli.recipes": {"read_text", "target.open", "source.read_text"},  # ampctl's own, and a new one
    "cli.manual": {"path.read_text"},  # ampctl's own
    "data.digits": {"file.open", "np.load"},  # ampctl's own
    "data.text": {"path.read_bytes", "file.read_bytes"},  # the user's data
    "environment": {"CPUINFO.read_text"},  # /proc
    "distributed.env": {"self._listener.open"},  # a pipe without a name
    "distributed.thread_activity": {"read_text"},  # /proc
    "launcher.srun": {"read_bytes", "read_text"},  # /proc
    "distributed.address": {"read_text"},  # /proc
    "distributed.failure": {"part.write_text", "path.touch"},  # in torchelastic's folder
    "launcher.streams": {"os.open"},  # the null device
    "track.console": {"os.open"},  # the null device
}


def called(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each call that may open a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = [base for base in node.bases if isinstance(base, ast.Attribute | ast.Name)]
            for base in bases:
                if (name := ast.unparse(base)).rpartition(".")[2] in NAMES:
                    yield node.lineno, f"class {name}"
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        owner, _, last = name.rpartition(".")
        if name in OF_MODULES or (last in NAMES and owner != "files"):
            yield node.lineno, name if len(name) < 40 and "(" not in name else last


def test_files_are_opened_in_one_place_but_for_those_listed_here() -> None:
    found: dict[str, set[str]] = {}
    places = []
    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for line, name in called(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(module, set()).add(name)
            if name not in ALLOWED.get(module, ()):
                places.append(f"{path}:{line} calls {name}")
    assert not places, "open it by ampctl.files, or list it here with a reason:\n" + "\n".join(
        places
    )
    assert {module: names for module, names in ALLOWED.items() if names - found[module]} == {}


def test_what_opens_a_file_is_found() -> None:
    for line in (
        "open(x)",
        "io.open(x)",
        "os.open(x, 0)",
        "path.open()",
        "(a / b).read_bytes()",
        "torch.load(x)",
        "zipfile.ZipFile(x)",
        "class A(logging.FileHandler): ...",
    ):
        assert list(called(ast.parse(line))), line
    assert not list(called(ast.parse("files.read(x, most=1); json.loads(x); files.create(x)")))
