"""Checkpoints of a stranger who means harm: reading one ends with code 4 and runs nothing."""

from __future__ import annotations

import os
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_files import (
    MARK,
    call,
    forge,
    name_of,
    number,
    numbers,
    records_of,
    sealed,
    storage,
    text,
    write,
)
from jobs import job
from processes import starting
from typer.testing import CliRunner, Result

import ampctl
from ampctl.cli import app
from ampctl.errors import CheckpointError
from ampctl.recipe.load import load_recipe
from ampctl.run import worker

RECIPE = """
name: attacked
model: {_target_: ampctl.models.ConvNet, num_classes: 10}
task: {_target_: ampctl.tasks.Classification}
data:
  train: {_target_: ampctl.data.Digits, split: test}
  eval: {_target_: ampctl.data.Digits, split: test}
  batch_size: 300
optimizer: {_target_: torch.optim.AdamW, lr: 0.01}
amp: {dtype: float32}
train: {max_steps: 2}
checkpoint: {every_steps: 1, asynchronous: false}
"""
PLANT = "import pathlib; pathlib.Path('canary').touch()"
READERS: dict[str, list[str]] = {
    "resume": ["resume", "FILE", "--run-dir", "resumed"],
    "eval": ["eval", "FILE"],
    "inspect": ["inspect", "FILE"],
    "recipe": ["inspect", "FILE", "--recipe"],
    "verify": ["verify", "FILE"],
    "export": ["export", "FILE", "out.safetensors"],
    "train": ["train", "recipe.yaml", "--run-dir", "trained", "--init-from", "FILE"],
}
BUILDERS = ("resume", "eval")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The payload of a checkpoint as a run saves it."""
    where, before = tmp_path_factory.mktemp("trained"), Path.cwd()
    os.chdir(where)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", f"{where / 'state'}")
        (where / "recipe.yaml").write_text(RECIPE)
        worker.train(load_recipe("recipe.yaml", ()), run_dir=Path("a"), resume=False, quiet=True)
    os.chdir(before)
    found: dict[str, Any] = torch.load(where / "a/checkpoints/latest.pt", weights_only=True)
    return found


RUNS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect")


class Alarm:
    """Notes what no reader of a file may do: run a program, call the network, import from here."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.rung: list[str] = []

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event in RUNS and args[0] != "git":  # which a run asks for its commit
            self.rung.append(f"{event} {args!r}"[:200])
        elif event == "exec" and f"{args[0].co_filename}".startswith(f"{self.folder}"):
            self.rung.append(f"exec {args[0].co_filename}")
        elif event in ("os.mkdir", "open") and "canary" in f"{args[0]}":
            self.rung.append(f"{event} {args[0]}")


ALARM = Alarm()
sys.addaudithook(ALARM)


@pytest.fixture(autouse=True)
def _here(folder: Path) -> Iterator[None]:
    (folder / "recipe.yaml").write_text(RECIPE)
    for name in ("evil", "evil_too"):
        (folder / f"{name}.py").write_text(f"{PLANT}\nclass Net: pass\ndef run(*a, **k): pass\n")
    path = list(sys.path)
    ALARM.folder, ALARM.rung = folder, []
    yield
    ALARM.folder = None
    sys.path[:] = path
    assert ALARM.rung == []
    assert not list(folder.glob("canary*"))


def read_by(reader: str, file: Path) -> Result:
    argv = [f"{file}" if word == "FILE" else word for word in READERS[reader]]
    return CliRunner().invoke(app, argv)


def refused(file: Path, readers: Any = READERS) -> str:
    """Let every reader read a file; return what the last one says."""
    said = ""
    for reader in readers:
        result = read_by(reader, file)
        told = (reader, result.exit_code, result.output, result.exc_info)
        assert result.exit_code == 4, told
        said = result.stderr
        assert said.count("error: ") == 1, told
        assert "Traceback" not in said, told
        assert len(said) < 3000, told
    with pytest.raises(CheckpointError):
        ampctl.load_model(file)
    assert not Path("out.safetensors").exists()
    assert not Path("resumed").exists()
    return said


def tensor(place: bytes, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    return call(
        "torch._utils._rebuild_tensor_v2",
        place,
        number(offset),
        numbers(*size),
        numbers(*stride),
        b"\x89",
        call("collections.OrderedDict"),
    )


EIGHT = storage("FloatStorage", "evil", 8)  # the record has 32 bytes
PICKLES: dict[str, bytes] = {
    "a program": call("posix.system", text("touch canary")),
    "a program, by its other name": call("os.system", text("touch canary")),
    "a process": call("subprocess.Popen", b"]" + text("touch") + b"a" + text("canary") + b"a"),
    "a folder": call("posix.mkdir", text("canary")),
    "eval": call("builtins.eval", text(f'exec("{PLANT}")')),
    "exec": call("builtins.exec", text(PLANT)),
    "an import": call("builtins.__import__", text("evil")),
    "an import by name alone": b"cevil\nNet\n",
    "an import by importlib": call("importlib.import_module", text("evil")),
    "getattr": call("builtins.getattr", b"cbuiltins\ndict\n", text("get")),
    "a file": call("builtins.open", text("canary"), text("w")),
    "python 2 names": call("__builtin__.execfile", text("evil.py")),
    "a class": b"(" + text(PLANT) + b"ibuiltins\nexec\n",
    "an object": b"(cbuiltins\nexec\n" + text(PLANT) + b"o",
    "names on the stack": text("builtins") + text("exec") + b"\x93" + text(PLANT) + b"\x85R",
    "a dotted name": text("torch") + text("os.system") + b"\x93" + text("touch canary") + b"\x85R",
    "an extension code": b"\x82\x01" + text(PLANT) + b"\x85R",
    "a new object": b"cevil\nNet\n)\x81",
    "a new object with keywords": b"cevil\nNet\n)}\x92",
    "a state": call("collections.OrderedDict") + b"cposix\nsystem\nb",
    "a reference to no storage": b"(" + text("module") + text("evil") + b"tQ",
    "a reference in text": b"Pevil\n",
    "an inner pickle": call("torch.storage._load_from_bytes", text("x")),
    "an inner pickle of pickle": call("pickle.loads", text("x")),
    "an inner file": call("torch.load", text("evil.pt")),
    "a jit archive": call("torch.jit.load", text("evil.pt")),
    "the hub": call("torch.hub.load", text("evil"), text("evil")),
    "the compiler": call("torch.utils.cpp_extension.load", text("evil")),
    "a target": call("ampctl.recipe.target.locate", text("evil.Net")),
    "a method of a module": b"ctorch.nn.modules.module\nModule.apply\n",
    "code": call("types.CodeType"),
    "the registry of pickle": call("copyreg.add_extension", text("evil"), text("Net"), b"K\x01"),
    "a tensor of any type": call("torch._tensor._rebuild_from_type_v2", b"cevil\nNet\n"),
    "a tensor with attributes": call(
        "torch._tensor._rebuild_from_type_v2",
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ctorch\nTensor\n",
        b"(" + EIGHT + number(0) + numbers(8) + numbers(1) + b"\x89" + b"}t",
        b"}" + text("numel") + text("x") + b"s",
    ),
    "a parameter with attributes": call("torch._utils._rebuild_parameter_with_state"),
    "a wrapper": call("torch._utils._rebuild_wrapper_subclass"),
    "memory without values": b"ctorch\nFloatTensor\n" + numbers(1 << 20) + b"R",
    "bytes without values": b"cbuiltins\nbytearray\n" + numbers(1 << 34) + b"R",
    "an array": call("numpy.core.multiarray._reconstruct"),
    "a tensor larger than its record": tensor(
        storage("FloatStorage", "evil", 1 << 14), 0, (1 << 14,), (1,)
    ),
    "a storage of less than nothing": tensor(storage("FloatStorage", "evil", -8), 0, (8,), (1,)),
    "a storage that is not there": tensor(storage("FloatStorage", "other", 8), 0, (8,), (1,)),
    "a storage of another record": tensor(storage("FloatStorage", "../data.pkl", 8), 0, (8,), (1,)),
    "a tensor past its storage": tensor(EIGHT, 0, (9,), (1,)),
    "a tensor before its storage": tensor(EIGHT, -4, (8,), (1,)),
    "a tensor with steps past its storage": tensor(EIGHT, 0, (8,), (1 << 40,)),
    "a tensor with steps back": tensor(EIGHT, 7, (8,), (-1,)),
    "a tensor that overflows": tensor(EIGHT, 0, (1 << 62, 4), (4, 1)),
    "a nested tensor": call("torch._utils._rebuild_nested_tensor"),
    "sparse indices out of bounds": call(
        "torch._utils._rebuild_sparse_tensor",
        call("torch.serialization._get_layout", text("torch.sparse_coo")),
        b"("
        + tensor(storage("LongStorage", "evil", 1), 0, (1, 1), (1, 1))
        + tensor(storage("FloatStorage", "evil", 1), 0, (1,), (1,))
        + numbers(10)
        + b"\x88t",
    ),
    "a text without end": b"X\xff\xff\xff\xffabc",
    "a number without end": b"\x8b\xff\xff\xff\x7f1",
    "a frame without end": b"\x95\xff\xff\xff\xff\xff\xff\xff\x7fN",
    "nothing on the stack": b"0000000",
    "no memo": b"r\xff\xff\xff\x0f",
    "deep lists": b"]" * 50_000 + b"N" + b"a" * 50_000,
    "deep tuples": b"(" * 50_000 + b"N" + b"t" * 50_000,
    "a sparse tensor without type": call("torch._utils._rebuild_sparse_tensor", b"N", b"N"),
}


def evil_record(records: dict[str, bytes]) -> None:
    records[name_of(records, "data.pkl").replace("data.pkl", "data/evil")] = b"\xa5" * 32


@pytest.mark.parametrize("technique", PICKLES)
def test_a_hostile_pickle_runs_nothing_whoever_reads_it(
    technique: str, trained: dict[str, Any]
) -> None:
    """In a place that every reader looks at; all of them read a file in the same way."""
    file = Path("evil.pt")
    payload = {**trained, "environment": {"x": MARK}}
    forge(file, payload, PICKLES[technique], evil_record)
    readers = READERS if technique in ("a program", "an import") else ("verify", "export")
    said = refused(file, readers)
    assert "cannot be used: it" in said


def test_a_hostile_pickle_may_stand_for_any_part_of_a_checkpoint(trained: dict[str, Any]) -> None:
    from ampctl.checkpoint import file

    for key in file.REQUIRED_KEYS[2:]:
        forge(Path("evil.pt"), {**trained, key: MARK}, PICKLES["a program"])
        refused(Path("evil.pt"), ("verify",))


def test_a_dict_may_not_hide_its_methods(trained: dict[str, Any]) -> None:
    hidden = b"}(" + b"".join(text(n) + b"K\x01" for n in ("items", "get", "keys", "values")) + b"u"
    names = b"(" + b"".join(text(n) + b"K\x00" for n in ("step",)) + b"u"
    pushed = call("collections.OrderedDict") + names + hidden + b"b"
    for key in ("environment", "progress", "model", "scaler", "optimizer"):
        forge(Path("evil.pt"), {**trained, key: MARK}, pushed)
        for reader in READERS:
            result = read_by(reader, Path("evil.pt"))
            assert result.exit_code in (0, 4), (key, reader, result.output, result.exc_info)
            Path("out.safetensors").unlink(missing_ok=True)
            for left in ("resumed", "trained"):
                if Path(left).exists():
                    Path(left).rename(f"{left}-{key}-{reader}")


Records = dict[str, bytes]
ARCHIVES: dict[str, Callable[[Records], bytes]] = {}


def forged(function: Callable[[Records], bytes]) -> Callable[[Records], bytes]:
    ARCHIVES[function.__name__.replace("_", " ")] = function
    return function


def packed(records: Records, compression: int = zipfile.ZIP_STORED) -> bytes:
    return write(Path("packed"), records, compression).read_bytes()


@forged
def compressed_a_thousandfold(records: Records) -> bytes:
    name = name_of(records, "data.pkl")
    long = text("\0" * (200 << 20))
    return packed({**records, name: records[name].replace(text("attacked"), long)}, 8)


@forged
def a_second_pickle_of_the_same_name(records: Records) -> bytes:
    name = name_of(records, "data.pkl")
    path = write(Path("packed"), records)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(name, PICKLES["a program"])
    return unsealed(path)


@forged
def a_second_pickle_of_another_case(records: Records) -> bytes:
    name = name_of(records, "data.pkl")
    return packed({**records, name.replace("data.pkl", "DATA.PKL"): PICKLES["a program"]})


@forged
def a_second_folder(records: Records) -> bytes:
    return packed({**records, "other/data.pkl": PICKLES["a program"]})


@forged
def a_record_that_climbs(records: Records) -> bytes:
    return packed({**records, "../../canary": b"x"})


@forged
def an_absolute_record(records: Records) -> bytes:
    return packed({**records, "/tmp/canary": b"x"})


@forged
def something_before_the_archive(records: Records) -> bytes:
    whole = write(Path("packed"), records)
    return sealed(b"PK\x03\x04" + b"\0" * 996 + unsealed_bytes(whole))


@forged
def two_archives(records: Records) -> bytes:
    whole = unsealed_bytes(write(Path("packed"), records))
    return sealed(whole + whole)


@forged
def records_that_share_their_bytes(records: Records) -> bytes:
    path = write(Path("packed"), records)
    with zipfile.ZipFile(path, "a") as archive:
        first = max(archive.infolist(), key=lambda each: each.file_size)
        for place in range(2000):
            again = zipfile.ZipInfo(f"{first.filename.partition('/')[0]}/data/x{place}")
            again.header_offset, again.CRC = first.header_offset, first.CRC
            again.file_size = again.compress_size = first.file_size
            archive.filelist.append(again)
        archive._didModify = True  # type: ignore[attr-defined]
    return unsealed(path)


@forged
def another_order_of_bytes(records: Records) -> bytes:
    return packed({**records, name_of(records, "byteorder"): b"middle"})


@forged
def no_pickle(records: Records) -> bytes:
    name = name_of(records, "data.pkl")
    return packed({each: data for each, data in records.items() if each != name})


@forged
def a_torchscript_archive(records: Records) -> bytes:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), "script.pt")
    return sealed(Path("script.pt").read_bytes())


@forged
def a_legacy_tar(records: Records) -> bytes:
    import io
    import tarfile

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("../canary"))
        tar.addfile(tarfile.TarInfo("pickle"))
    return out.getvalue()


def unsealed_bytes(path: Path) -> bytes:
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b""
    return path.read_bytes()


def unsealed(path: Path) -> bytes:
    return sealed(unsealed_bytes(path))


@pytest.mark.filterwarnings("ignore")  # torch has no love left for TorchScript
@pytest.mark.parametrize("kind", ARCHIVES)
def test_a_forged_archive_is_refused(kind: str, trained: dict[str, Any]) -> None:
    import resource

    records = records_of(trained)
    Path("evil.pt").write_bytes(ARCHIVES[kind](records))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(Path("evil.pt"), ("inspect", "verify"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (100 << 10)  # KiB


def test_an_untouched_forgery_is_read(trained: dict[str, Any]) -> None:
    """What these tests forge is refused for what was forged."""
    forge(
        Path("plain.pt"),
        {**trained, "environment": {"x": MARK}},
        tensor(EIGHT, 0, (8,), (1,)),
        evil_record,
    )
    for reader in READERS:
        result = read_by(reader, Path("plain.pt"))
        assert result.exit_code == 0, (reader, result.output, result.exc_info)
    assert ampctl.load_model("plain.pt")


ENDS_ITS_QUOTES = (
    '[", 1) and getattr(__import__("os"), "system")("touch canary") or getattr(self, "]'
)
BOMB = "".join(
    f"{name}: &{name} [{', '.join([f'*{before}' if before else 'x'] * 10)}]\n"
    for name, before in zip("abcdef", ["", *"abcde"], strict=True)
)
RECIPES: dict[str, str] = {
    "a program": "model: {_target_: os.system, command: touch canary}",
    "a module beside the user": "model: {_target_: evil.Net}",
    "builtins": "model: {_target_: builtins.exec, source: import evil}",
    "the hub": "model: {_target_: torch.hub.load, repo_or_dir: ., model: evil, source: local}",
    "a pickle": "model: {_target_: torch.load, f: evil.pt, weights_only: false}",
    "the compiler": "model: {_target_: torch.utils.cpp_extension.load, name: evil, sources: [x]}",
    "a path that climbs": "model: {_target_: torch.nn.modules.module.os.system, command: x}",
    "a method": "model: {_target_: torch.nn.Module.load_state_dict}",
    "nested": "model: {_target_: torch.nn.Sequential, x: [{y: {_target_: evil.Net}}]}",
    "a name that becomes code": "model: {_target_: timm.models.GraphExtractNet, "
    "return_nodes: [']'], model: "
    "{_target_: torchvision.models.detection.backbone_utils.IntermediateLayerGetter, "
    f"return_layers: {{']': a}}, model: {{_target_: torch.nn.ModuleDict, modules: "
    f"{{'{ENDS_ITS_QUOTES}': {{_target_: torch.nn.Flatten}}, "
    "']': {_target_: torch.nn.Linear, in_features: 64, out_features: 10}}}}}",
    "an alias": "seed: 0\nmodel: &m {_target_: evil.Net}",
    "merged": "model: {<<: {_target_: evil.Net}}",
    "a loader of images": "data: {batch_size: 3, train: "
    "{_target_: torchvision.datasets.DatasetFolder, root: ., loader: evil.run}}",
    "what downloads": "data: {batch_size: 3, train: "
    "{_target_: torchvision.datasets.MNIST, root: canary, download: true}}",
    "a transform of text": "task: {_target_: torchvision.transforms.Lambda, lambd: evil.run}",
    "an optimizer of the user's": "optimizer: {_target_: evil.Net}",
    "a schedule of the user's": "scheduler: {_target_: evil.run}",
    "a compiler": "train: {max_steps: 2, compile: {options: {cpp.cxx: [./evil.sh]}}}",
    "a backend": "train: {max_steps: 2, compile: {backend: evil}}",
    "a recipe beside it": "extends: evil.yaml",
    "a name that climbs": "name: ../../canary",
    "a name that steers": 'name: "\\u009b2Jcanary"',
    "a tag": "name: !!python/object/apply:os.system ['touch canary']",
    "a bomb": BOMB,
    "depth": f"seed: {'[' * 5000}{']' * 5000}",
    "length": f"name: x #{'x' * 2_000_000}",
}


def hostile_recipe(kind: str) -> str:
    """Return the recipe with a section in place of its own."""
    line = RECIPES[kind]
    keys = {each.partition(":")[0] for each in line.splitlines()}
    sections = re.split(r"\n(?=\w)", RECIPE.strip())
    return "\n".join([line, *(each for each in sections if each.partition(":")[0] not in keys)])


@pytest.mark.parametrize("kind", RECIPES)
def test_a_hostile_recipe_inside_runs_nothing(kind: str, trained: dict[str, Any]) -> None:
    write(Path("evil.pt"), records_of({**trained, "recipe": hostile_recipe(kind)}))
    before = set(Path().iterdir())
    said = refused(Path("evil.pt"), BUILDERS)
    assert set(Path().iterdir()) == before
    assert "\x9b" not in said
    readers = ["inspect", "export", "verify"]  # which build nothing, but may parse it
    for reader in [*readers, "train"] if kind in FOR_RANKS else readers:
        result = read_by(reader, Path("evil.pt"))
        assert result.exit_code in (0, 4), (reader, result.output, result.exc_info)
    assert "evil" not in sys.modules


HUGE = {
    "one layer": "{_target_: torch.nn.Linear, in_features: 4000, out_features: 4000}",
    "many layers": "{_target_: ampctl.models.MLP, in_features: 9, num_classes: 9, "
    f"hidden: {[999] * 20}}}",
}


@pytest.mark.parametrize("kind", HUGE)
def test_a_model_far_larger_than_its_weights_is_not_built(
    kind: str, trained: dict[str, Any]
) -> None:
    recipe = re.sub("model: .*", f"model: {HUGE[kind]}", RECIPE)
    write(Path("evil.pt"), records_of({**trained, "recipe": recipe}))
    said = refused(Path("evil.pt"), ("eval",))
    assert read_by("resume", Path("evil.pt")).stderr == said
    with pytest.raises(CheckpointError, match="would have more than"):
        ampctl.load_model("evil.pt")
    assert "its weights are 53,292 values, and the model would have more than 10,213,168" in said


FOR_RANKS = ("a program", "a module beside the user", "what downloads", "a tag")


@pytest.mark.parametrize("kind", FOR_RANKS)
def test_ranks_refuse_a_hostile_recipe_as_one(
    kind: str, trained: dict[str, Any], folder: Path
) -> None:
    write(Path("evil.pt"), records_of({**trained, "recipe": hostile_recipe(kind)}))
    alone = refused(Path("evil.pt"), ("eval", "resume"))
    ALARM.folder = None  # it does not hear what they do; `evil` leaves a canary
    with job(folder, "resume", "evil.pt", "--run-dir", "resumed") as running:
        ended = running.wait()
    assert ended.code == 4
    assert f"error: {ended.error.removeprefix('rank 1: ')}" == alone.strip()
    assert ended.out == ended.err == ""  # the launcher tells it, once
    assert not Path("resumed").exists()


def test_the_launcher_refuses_a_hostile_recipe_before_it_starts_ranks(
    trained: dict[str, Any], folder: Path
) -> None:
    write(Path("evil.pt"), records_of({**trained, "recipe": hostile_recipe("a program")}))
    alone = refused(Path("evil.pt"), ("resume",))
    ALARM.folder = None
    for command in (("resume", "evil.pt", "--run-dir", "resumed"), ("eval", "evil.pt")):
        with starting(folder) as start:
            ended = start(*command, "--nproc-per-node", "2").wait()
        assert (ended.code, ended.out, ended.err) == (4, "", alone)
    assert not Path("resumed").exists()


TINY_BERT = (
    "{_target_: transformers.BertForSequenceClassification, config: {_target_: "
    "transformers.BertConfig, vocab_size: 8, hidden_size: 2, num_attention_heads: 1, "
    "intermediate_size: 2, max_position_embeddings: 8, num_hidden_layers: 1000000000}}"
)
MANY = {
    "layers of a model of transformers": TINY_BERT,
    "blocks": "{_target_: ampctl.models.GPT, vocab_size: 8, context: 8, width: 2, num_heads: 1, "
    "num_layers: 1000000000}",
    "layers of one module": "{_target_: torch.nn.LSTM, input_size: 1, hidden_size: 1, "
    "num_layers: 1000000000}",
}


@pytest.mark.parametrize("kind", MANY)
def test_c8_a_model_of_far_more_parts_than_weights_is_not_built(
    kind: str, trained: dict[str, Any]
) -> None:
    if "transformers" in MANY[kind]:
        ALARM.folder = None  # its import may run programs
        pytest.importorskip("transformers")
    recipe = re.sub("model: .*", f"model: {MANY[kind]}", RECIPE)
    write(Path("evil.pt"), records_of({**trained, "recipe": recipe}))
    said = refused(Path("evil.pt"), ("eval", "resume"))
    assert "would have more than 10,800 modules, parameters and buffers" in said


ABSURD = {
    "model": "{_target_: torch.nn.Embedding, num_embeddings: 1000000000, embedding_dim: 1000000}",
    "data.eval": "{_target_: torchvision.datasets.FakeData, size: 100, "
    "image_size: [100000, 100000, 100000], transform: null}",
}


@pytest.mark.parametrize("key", ABSURD)
def test_c8_an_allocation_that_fails_is_told(key: str, trained: dict[str, Any]) -> None:
    pytest.importorskip("torchvision")
    write(Path("big.pt"), records_of(trained))
    for argv in (
        ["eval", "big.pt", f"{key}={ABSURD[key]}"],
        ["resume", "big.pt", "--run-dir", "r", f"{key}={ABSURD[key]}", "train.max_steps=3"],
        ["train", "recipe.yaml", "--run-dir", "t", f"{key}={ABSURD[key]}"],
        ["check", "recipe.yaml", f"{key}={ABSURD[key]}"],
    ):
        ended = CliRunner().invoke(app, argv)
        assert ended.exit_code == 5, (argv, ended.output, ended.exc_info)
        assert "memory" in ended.stderr
        assert "Traceback" not in ended.stderr
