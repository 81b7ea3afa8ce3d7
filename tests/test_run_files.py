"""What may lie in a run folder in the place of a file: it is refused at once, and nothing is lost.

Every reader of a file is limited to an address space, so that a file which asks for more memory
than its size ends in an error that these tests see.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import shutil
import socket
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_files import MARK, call, forge, name_of, number, records_of, sealed, text, write
from typer.testing import CliRunner, Result

from ampctl.checkpoint import archive, sharded
from ampctl.checkpoint.opcodes import Budget, ForgedError, walk
from ampctl.checkpoint.sharded_index import read_metadata
from ampctl.cli import app
from ampctl.errors import AmpctlError
from ampctl.recipe.load import load_recipe
from ampctl.recipe.yaml_source import parse_yaml
from ampctl.run import worker
from ampctl.track.metrics import MetricsFile, read_metrics

RECIPE = """
name: files
model: {_target_: own_parts.Net}
task: {_target_: ampctl.tasks.Classification}
data: {train: {_target_: own_parts.Augmented, size: 24}, batch_size: 6}
optimizer: {_target_: torch.optim.SGD, lr: 0.01}
amp: {dtype: float32}
train: {max_steps: 3}
checkpoint: {every_steps: 1, keep_last: 100, asynchronous: false}
"""
READERS = ("inspect", "verify", "resume", "eval", "export")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (folder / "recipe.yaml").write_text(RECIPE)


def train(run_dir: str = "a", *overrides: str) -> Path:
    loaded = load_recipe("recipe.yaml", overrides)
    worker.train(loaded, run_dir=Path(run_dir), resume=False, quiet=True)
    return Path(run_dir)


def ampctl_(*argv: str | Path) -> Result:
    return CliRunner().invoke(app, [f"{each}" for each in argv])


def read_by(reader: str, source: Path) -> Result:
    more: dict[str, list[str | Path]] = {
        "resume": ["train.max_steps=4"],
        "eval": ["data.eval={_target_: own_parts.Augmented}"],
        "export": ["out.pt", "--force"],
    }
    return ampctl_(reader, source, *more.get(reader, []))


@contextmanager
def memory(amount: int) -> Iterator[None]:
    """Let this process take so many more bytes of address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + amount, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as out:
        out.truncate(1 << 40)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        before = Path.cwd()
        os.chdir(path.parent)  # its name may have some hundred bytes
        end.bind(path.name)
        os.chdir(before)


PLACED: dict[str, Callable[[Path], None]] = {
    "a pipe": pipe,
    "an endless device": endless,
    "a link to a pipe": lambda path: (pipe(path.with_name("p")), path.symlink_to("p"))[0],
    "a file of the kernel": lambda path: path.symlink_to("/proc/self/environ"),
    "a huge file": sparse,
    "a socket": listening,
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("kind", PLACED)
def test_c4_what_stands_in_the_place_of_the_index_is_taken_for_damage(kind: str) -> None:
    run = train()
    index = run / "checkpoints/index.json"
    index.unlink()
    PLACED[kind](index)
    with memory(512 * MIB):
        shown = read_by("inspect", run)
        assert shown.exit_code == 0, shown.output
        assert "missing or damaged" in shown.stderr
        verdict = read_by("verify", run)
        assert verdict.exit_code == 4
        assert "index.json: it is missing or damaged" in verdict.stderr
        if kind != "a folder":  # which is not written over
            assert read_by("resume", run).exit_code == 0
            assert len(json.loads(index.read_bytes())) == 4


@pytest.mark.parametrize("kind", [kind for kind in PLACED if kind != "a huge file"])
def test_c4_what_stands_in_the_place_of_a_checkpoint_is_passed_over(kind: str) -> None:
    run = train()
    newest = run / "checkpoints/step-00000003.pt"
    newest.unlink()
    PLACED[kind](newest)
    with memory(512 * MIB):
        for reader in ("inspect", "export"):
            shown = read_by(reader, run)
            assert shown.exit_code == 0, shown.output
            assert "step-00000002.pt is taken instead" in shown.stderr
        verdict = read_by("verify", run)
        assert verdict.exit_code == 4
        assert "step-00000003.pt: it " in verdict.stderr
        again = read_by("resume", run)
        assert again.exit_code == 0, again.output
        for reader in READERS[:2]:
            alone = read_by(reader, run / "checkpoints/abandoned-step-00000003.pt")
            assert alone.exit_code == 4, alone.output


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "logs/rank-0.log"])
@pytest.mark.parametrize("kind", ["a pipe", "an endless device", "a link to a pipe", "a folder"])
def test_c4_what_stands_in_the_place_of_what_is_appended_to_is_named(name: str, kind: str) -> None:
    run = train()
    (run / name).unlink()
    PLACED[kind](run / name)
    told = read_by("resume", run)
    assert told.exit_code in (2, 5), (told.output, told.exc_info)
    assert Path(name).name in told.stderr
    assert read_by("inspect", run).exit_code == 0


@pytest.mark.parametrize("name", ["latest.pt", "best.pt"])
@pytest.mark.parametrize("kind", ["a pipe", "an endless device", "a socket", "a folder"])
def test_c4_what_stands_in_the_place_of_a_link_hangs_nothing(name: str, kind: str) -> None:
    run = train("a", "data.eval={_target_: own_parts.Augmented}", "train.eval_every_steps=1")
    link = run / "checkpoints" / name
    link.unlink()
    PLACED[kind](link)
    assert f"{name}: it " in read_by("verify", run).stderr
    assert read_by("inspect", run).exit_code == 0
    assert read_by("verify", link).exit_code == 4
    if kind != "a folder":
        assert read_by("resume", run).exit_code == 0
        assert link.is_symlink()


@pytest.mark.parametrize("name", ["recipe.yaml", "environment.json"])
def test_c4_what_stands_in_the_place_of_a_file_of_facts_is_replaced(name: str) -> None:
    run = train()
    Path("precious").write_text("dear")
    precious = Path("precious").absolute()
    for step, place in enumerate((pipe, lambda path: path.symlink_to(precious)), start=4):
        (run / name).unlink()
        place(run / name)
        assert read_by("inspect", run).exit_code == 0
        assert ampctl_("resume", run, f"train.max_steps={step}").exit_code == 0
        assert (run / name).is_file()
    assert Path("precious").read_text() == "dear"


def test_c4_a_temporary_name_that_is_taken_is_not_written_through() -> None:
    run = train()
    Path("precious").write_text("dear")
    Path("folder").mkdir()
    Path("folder/precious").write_text("dear")
    for name in ("checkpoints/.step-00000004.pt", "checkpoints/.index.json", ".recipe.yaml"):
        (run / f"{name}.{os.getpid()}.tmp").symlink_to(Path("precious").absolute())
    (run / "checkpoints/.x.1.tmp").symlink_to(Path("folder").absolute())
    assert read_by("resume", run).exit_code == 0
    assert Path("precious").read_text() == Path("folder/precious").read_text() == "dear"
    assert not list(run.rglob(".*.tmp"))


@pytest.mark.parametrize("name", ["checkpoints", "logs"])
def test_c6_a_folder_of_a_run_may_be_no_link(name: str) -> None:
    run, other = train("a"), train("b")
    before = {path: path.stat().st_mtime_ns for path in other.rglob("*")}
    shutil.rmtree(run / name)
    (run / name).symlink_to((other / name).absolute())
    for reader in READERS:
        told = read_by(reader, run)
        assert told.exit_code == 4, (reader, told.output, told.exc_info)
        assert f"{run / name} is a link" in told.stderr
    begun = ampctl_("train", "recipe.yaml", "--run-dir", run, "--resume", "auto")
    assert begun.exit_code == 4
    if name == "checkpoints":
        assert read_by("resume", run / name).exit_code == 4
        assert read_by("resume", run / name / "latest.pt").exit_code == 4
    assert {path: path.stat().st_mtime_ns for path in other.rglob("*")} == before


def test_c6_a_link_among_checkpoints_leads_to_one_beside_it() -> None:
    run, other = train("a"), train("b")
    latest = run / "checkpoints/latest.pt"
    latest.unlink()
    latest.symlink_to((other / "checkpoints/step-00000002.pt").absolute())
    for reader in READERS:
        told = read_by(reader, latest)
        assert told.exit_code == 4, (reader, told.output)
        assert "leads out of its folder" in told.stderr
    assert "latest.pt: it leads out of its folder" in read_by("verify", run).stderr
    latest.unlink()
    latest.symlink_to("latest.pt")
    assert read_by("inspect", latest).exit_code == 4


def test_c6_a_run_may_lie_behind_a_link_and_a_checkpoint_too() -> None:
    train("disk/runs/a")
    Path("runs").symlink_to("disk/runs")
    Path("run").symlink_to("runs/a")
    Path("mine.pt").symlink_to("run/checkpoints/latest.pt")
    for reader in ("inspect", "verify", "export"):
        for source in ("runs/a", "run", "run/checkpoints", "mine.pt"):
            told = read_by(reader, Path(source))
            assert told.exit_code == 0, (reader, source, told.output)
    assert read_by("resume", Path("run")).exit_code == 0


TORN = {
    "brackets": b"[" * 200_000,
    "braces": b'{"a":' * 100_000,
    "brackets that end": b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "digits": b'{"step": ' + b"9" * 100_000 + b"}",
    "no text": b"\xff" * 1000,
    "nothing": b"\0" * 100_000,
    "an escape": b'{"event": "\\ud8',
}


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("kind", TORN)
def test_c5_a_last_line_that_is_no_event_is_cut_whatever_it_is(kind: str, end: bytes) -> None:
    run = train()
    metrics = run / "metrics.jsonl"
    events = read_metrics(metrics)
    with metrics.open("ab") as out:
        out.write(TORN[kind] + end)
    assert read_metrics(metrics) == events
    assert read_by("resume", run).exit_code == 0
    again = read_metrics(metrics)
    assert again[: len(events)] == events
    assert len(again) > len(events)


def test_c5_a_last_line_longer_than_any_event_is_named_and_kept() -> None:
    path = Path("metrics.jsonl")
    path.write_bytes(b'{"event": "start", "step": 0}\n' + b"x" * (5 << 20))
    size = path.stat().st_size
    with pytest.raises(AmpctlError, match=r"metrics\.jsonl.* last line has .*\n *Move it away"):
        MetricsFile(path)
    assert path.stat().st_size == size
    with path.open("ab") as out:
        out.truncate(1 << 40)
    with memory(256 * MIB), pytest.raises(AmpctlError, match="last line"):
        MetricsFile(path)


@pytest.fixture
def payload() -> dict[str, Any]:
    """What a run saves."""
    run = train()
    found: dict[str, Any] = torch.load(run / "checkpoints/latest.pt", weights_only=True)
    return found


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def again(count: int, pushes: bytes, each: bytes) -> bytes:
    """Return the opcodes of a list that has what ``each`` makes of one object so many times."""
    return b"](" + pushes + b"r" + u32(9) + b"0" + each.replace(b"@", b"j" + u32(9)) * count + b"e"


LONG = b"(" + b"K\x01" * 100_000 + b"t"
PAIRS = b"](" + b"K\x01K\x02\x86" * 50_000 + b"e"
GREEDY: dict[str, bytes] = {
    "a memo of 2^28": b"Nr" + u32((1 << 28) - 1),
    "a memo of 2^30": b"Nr" + u32(1 << 30),
    "a memo in text": b"Np1073741824\n",
    "bytes that are not there": b"B" + u32(0xF0000000) + b"x",
    "more bytes that are not there": b"\x8e" + u64(1 << 40) + b"x",
    "an array that is not there": b"\x96" + u64(1 << 33) + b"x",
    "lists": b"](" + b"]" * 2_000_000 + b"e",
    "dicts": b"](" + b"}" * 2_000_000 + b"e",
    "sets": b"](" + b"\x8f" * 2_000_000 + b"e",
    "tuples": b"](" + b"N\x85" * 6_000_000 + b"e",
    "lists of marks": b"](" + b"(l" * 5_000_000 + b"e",
    "dicts of marks": b"](" + b"(d" * 5_000_000 + b"e",
    "frozen sets": b"](" + b"(\x91" * 2_000_000 + b"e",
}
"""Nothing but the walk over the opcodes stops these: whoever reads them has no memory left."""

PICKLE_KNOWS: dict[str, bytes] = {
    "a memo in many digits": b"Np" + b"9" * 5000 + b"\n",
    "a text that is not there": b"\x8d" + u64(1 << 40) + b"x",
    "a number that is not there": b"\x8b" + u32(0x7FFFFFFF) + b"1",
    "an old text that is not there": b"T" + u32(0x7FFFFFFF) + b"x",
    "a frame that is not there": b"\x95" + u64(1 << 60) + b"N",
    "marks": b"](" + b"(" * 9_000_000 + b"1" * 100 + b"e",
}
"""Python's own reader refuses these too."""

CALLS: dict[str, bytes] = {
    "a tuple in sizes": again(50_000, LONG, b"ctorch\nSize\n@\x85R"),
    "a list in dicts": again(50_000, PAIRS, b"ccollections\nOrderedDict\n@\x85R"),
    "a text in bytes": again(
        50_000, b"X" + u32(1_000_000) + b"x" * 1_000_000, b"c_codecs\nencode\n@U\x06latin1\x86R"
    ),
    "bytes in hexadecimal": b"".join(
        b"c_codecs\nencode\n" for _ in range(40)
    ) + text("x" * 1000) + text("hex") + b"\x86R" + (text("hex") + b"\x86R") * 39,
    "attributes": again(
        50_000,
        b"}(" + b"".join(text(f"a{n}") + b"N" for n in range(20_000)) + b"u",
        b"ccollections\nOrderedDict\n)R@b",
    ),
    "a quantized tensor without values": call(
        "torch._utils._rebuild_qtensor",
        b"(" + text("storage") + b"ctorch\nQInt8Storage\n" + text("evil") + text("cpu")
        + number(8) + b"tQ",
        number(0),
        b"(" + number(1 << 33) + b"t",
        b"(" + number(1) + b"t",
        b"(ctorch\nper_tensor_affine\nG" + struct.pack(">d", 0.1) + number(0) + b"t",
        b"\x89",
        call("collections.OrderedDict"),
    ),
}  # fmt: skip
"""What the calls in these copy is counted as they are gone through, and what they may do."""

REFUSED = {**GREEDY, **PICKLE_KNOWS, **CALLS}


@pytest.mark.usefixtures("deadline")
@pytest.mark.parametrize("kind", GREEDY)
def test_c3_nothing_but_the_walk_over_its_opcodes_stops_a_greedy_pickle(
    kind: str, payload: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ForgedError):
        walk(b"\x80\x02" + GREEDY[kind] + b".")
    forge(Path("evil.pt"), {**payload, "environment": {"x": MARK}}, GREEDY[kind])
    size = Path("evil.pt").stat().st_size
    monkeypatch.setattr(archive, "walk", lambda content: Budget(1 << 30))
    with memory(256 * MIB + 8 * size):
        told = read_by("inspect", Path("evil.pt"))
    assert told.exit_code != 4 or "MemoryError" in told.stderr


@pytest.mark.usefixtures("deadline")  # what is not counted copies for hours
@pytest.mark.parametrize("kind", REFUSED)
def test_c3_a_pickle_takes_no_more_memory_than_its_length_allows(
    kind: str, payload: dict[str, Any]
) -> None:
    def record(records: dict[str, bytes]) -> None:
        records[name_of(records, "data.pkl").replace("data.pkl", "data/evil")] = b"\xa5" * 32

    forge(Path("evil.pt"), {**payload, "environment": {"x": MARK}}, REFUSED[kind], record)
    size = Path("evil.pt").stat().st_size
    with memory(256 * MIB + 8 * size):
        told = read_by("inspect", Path("evil.pt"))
    assert told.exit_code == 4, (told.output, told.exc_info)
    assert "MemoryError" not in told.stderr
    assert "cannot be used: it" in told.stderr


def test_c3_what_torch_writes_is_far_from_that_limit(payload: dict[str, Any]) -> None:
    """Tensors of one value are the worst: nearly all of such a file is pickle and directory."""
    model = {f"layer.{n}.weight": torch.ones(1) for n in range(5_000)}
    torch.save({**payload, "model": model, "data": {"order": list(range(50_000))}}, "many.pt")
    assert read_by("verify", Path("many.pt")).exit_code == 0


@pytest.mark.parametrize("kind", ["the memo", "the memo alone", "bytes", "a copied tuple"])
def test_c3_the_index_of_parts_takes_no_more_memory_than_its_length_allows(kind: str) -> None:
    content = {
        "the memo": pickle.dumps(list(range(1000)))[:-1] + b"r" + u32(1 << 31) + b".",
        "the memo alone": b"\x80\x02Nr" + u32(1 << 28) + b".",
        "bytes": b"\x80\x04B" + u32(0xF0000000) + b"x.",
        "a copied tuple": b"\x80\x02" + again(50_000, LONG, b"ctorch\nSize\n@\x85R") + b".",
    }[kind]
    with memory(400 * MIB), pytest.raises(Exception, match=r"pickle|index"):
        read_metadata(content, [])


def test_c3_parts_that_claim_more_than_their_bytes_are_not_filled() -> None:
    folder = Path("step-00000001.dist")
    folder.mkdir()
    payload = {"model": {"w": torch.empty(1 << 33, device="meta")}, "parts": {}}
    with memory(400 * MIB), pytest.raises(AmpctlError, match="larger than its parts"):
        sharded.fill(payload, folder)


def directory(entries: int) -> bytes:
    """Return an archive whose directory names one record again and again."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02N.")
    whole = out.getvalue()
    start = whole.index(b"PK\x01\x02")
    row = whole[start : whole.index(b"PK\x05\x06")]
    rows = row * entries
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, len(rows), start, 0)
    return whole[:start] + rows + end


def test_c3_a_directory_names_no_more_records_than_it_says() -> None:
    Path("evil.pt").write_bytes(sealed(directory(400_000)))
    size = Path("evil.pt").stat().st_size
    with memory(128 * MIB + 4 * size):
        told = read_by("inspect", Path("evil.pt"))
    assert told.exit_code == 4
    assert "its directory has other records than it says" in told.stderr


@pytest.mark.parametrize("is_sealed", [False, True])
def test_c11_a_record_is_not_inflated_to_be_examined(
    is_sealed: bool, payload: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = records_of(payload)
    records[name_of(records, "data.pkl").replace("data.pkl", "data/big")] = bytes(64 * MIB)
    write(Path("bomb.pt"), records, zipfile.ZIP_DEFLATED)
    if not is_sealed:
        with zipfile.ZipFile("bomb.pt", "a") as archive:
            archive.comment = b""
    inflated = []
    monkeypatch.setattr(zlib, "decompressobj", lambda *a: inflated.append(a))
    for reader in ("inspect", "verify", "export"):
        told = read_by(reader, Path("bomb.pt"))
        assert told.exit_code == 4, (told.output, told.exc_info)
        assert "is compressed" in told.stderr
    assert not inflated


def test_c3_a_recipe_takes_no_more_memory_than_its_length_allows() -> None:
    recipe = "a: [" + "[]," * 120_000 + "]"
    with memory(400 * MIB), pytest.raises(AmpctlError, match=r"more than 100,000 values"):
        parse_yaml(recipe, "evil", [])


def test_c3_a_tensor_in_many_places_is_named_at_each_in_bounds(payload: dict[str, Any]) -> None:
    one = torch.ones(1)
    torch.save({**payload, "data": {"a" * 400: [one] * 300_000}}, "many.pt")
    with memory(400 * MIB):
        assert read_by("inspect", Path("many.pt")).exit_code == 0


def forget(run: Path) -> None:
    """Lose the index, which has the digest of each file."""
    (run / "checkpoints/index.json").unlink()


def names(run: Path, step: int) -> Path:
    return run / f"checkpoints/step-{step:08d}.pt"


SWAPS: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "of another step": (
        lambda run, other: shutil.copy(names(run, 1), names(run, 3)),
        "step-00000003.pt: it is of step 1, not 3",
    ),
    "swapped": (
        lambda run, other: (
            names(run, 1).rename("x"),
            names(run, 3).rename(names(run, 1)),
            Path("x").rename(names(run, 3)),
        ),
        "step-00000003.pt: it is of step 1, not 3",
    ),
    "of another run": (
        lambda run, other: shutil.copy(names(other, 3), names(run, 3)),
        "step-00000003.pt: it is of another run",
    ),
    "a link to another run": (
        lambda run, other: (
            names(run, 3).unlink(),
            names(run, 3).symlink_to(names(other, 3).absolute()),
        ),
        "step-00000003.pt: it is a link",
    ),
}


@pytest.mark.parametrize("kind", SWAPS)
def test_c7_a_file_in_the_place_of_another_is_not_taken_for_it(kind: str) -> None:
    run, other = train("a"), train("b", "seed=1")
    swap, reason = SWAPS[kind]
    swap(run, other)
    forget(run)
    verdict = read_by("verify", run)
    assert verdict.exit_code == 4
    assert reason in verdict.stderr
    for reader in ("verify", "inspect", "eval"):
        told = read_by(reader, names(run, 3))
        assert told.exit_code == 4, (reader, told.output)
    again = read_by("resume", run)
    assert again.exit_code == 0, again.output
    assert "step-00000003.pt cannot be used" in again.output
    assert "going on from step-00000002.pt" in again.output


def test_c7_a_file_that_its_index_does_not_tell_of_is_held_against_the_run_too() -> None:
    run, other = train("a"), train("b", "seed=1", "train.max_steps=5")
    shutil.copy(names(other, 5), names(run, 5))
    told = read_by("resume", names(run, 5))
    assert told.exit_code == 4
    assert "it is of another run" in told.stderr
    assert "step-00000005.pt: it is of another run" in read_by("verify", run).stderr


def test_c7_a_run_may_be_copied_moved_and_go_on_elsewhere() -> None:
    run = train()
    shutil.copytree(run, "copy", symlinks=True)
    run.rename("moved")
    for place in map(Path, ("copy", "moved")):
        forget(place)
        assert read_by("verify", place).exit_code == 4  # of the index alone
        assert ampctl_("resume", place, "train.max_steps=4").exit_code == 0
        assert read_by("verify", place).exit_code == 0
    assert ampctl_("resume", "copy", "train.max_steps=6", "--run-dir", "on").exit_code == 0
    shutil.copy(names(Path("copy"), 2), "any name.pt")
    assert ampctl_("resume", "any name.pt", "--run-dir", "other").exit_code == 0
    found = [
        {
            torch.load(path, weights_only=True)["environment"]["run_id"]
            for path in place.glob("checkpoints/step-*.pt")
        }
        for place in map(Path, ("copy", "moved", "on", "other"))
    ]
    assert all(len(each) == 1 for each in found)
    assert found[0] == found[1]
    assert not found[0] & found[2] | found[2] & found[3]


def test_c7_a_run_that_an_older_ampctl_began_goes_on() -> None:
    run = train()
    for step in (1, 2, 3):
        payload = torch.load(names(run, step), weights_only=True)
        del payload["environment"]["run_id"]
        torch.save(payload, names(run, step))
    facts = json.loads((run / "environment.json").read_text())
    del facts["run_id"]
    (run / "environment.json").write_text(json.dumps(facts))
    (run / "checkpoints/index.json").unlink()
    assert ampctl_("resume", run, "train.max_steps=4").exit_code == 0
    (run / "checkpoints/index.json").unlink()
    again = ampctl_("resume", run, "train.max_steps=5")
    assert again.exit_code == 0
    assert "step-00000003.pt was saved by an older ampctl" in again.output
    assert "going on from step-00000004.pt" in again.output
    (run / "environment.json").unlink()
    assert ampctl_("resume", run, "train.max_steps=6").exit_code == 0
    whole = json.loads((run / "environment.json").read_text())["run_id"]
    found = [torch.load(names(run, n), weights_only=True)["environment"] for n in (3, 4, 6)]
    assert [each.get("run_id") for each in found] == [None, whole, whole]
