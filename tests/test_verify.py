"""`ampctl verify`: a verdict on each file of a run, every damage told in one form."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ddp import RECIPE as DDP_RECIPE
from test_ddp import ranks
from test_fsdp import FSDP
from test_resume_exact import RECIPE
from typer.testing import CliRunner, Result

from ampctl.checkpoint import file
from ampctl.checkpoint.store import load
from ampctl.checkpoint.verify import verify as examine
from ampctl.cli import app, screen
from ampctl.errors import CheckpointError, NumericsError
from ampctl.recipe.load import load_recipe
from ampctl.run import worker

TESTS = Path(__file__).parent
NAME = "step-00000003.pt"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of three steps that saved each."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "recipe.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_STATE_HOME", f"{folder / 'state'}")
        patch.syspath_prepend(f"{TESTS}")
        loaded = load_recipe("recipe.yaml", ("train.max_steps=3", "train.eval_every_steps=1"))
        worker.train(loaded, run_dir=Path("a"), resume=False, quiet=True)
        yield folder / "a"


@pytest.fixture
def run_dir(trained: Path, folder: Path) -> Path:
    shutil.copytree(trained, "a", symlinks=True)
    return Path("a")


def verify(*argv: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["verify", *argv])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exc_info)
    assert result.stderr.count("error: ") == (1 if code else 0), result.stderr
    return result


def facts_of(*argv: str, code: int = 0) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(verify(*argv, "--json", code=code).stdout)
    return facts


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Let a change look as if the user had saved the file anew, and told the index of it."""
    payload = torch.load(path, weights_only=True)
    change(payload)
    torch.save(payload, path)
    index = path.with_name("index.json")
    rows = json.loads(index.read_text())
    for row in rows:
        if row["file"] == path.name:
            row["sha256"] = file.digest(path)
    index.write_text(json.dumps(rows))


def state_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        f"{path}": (path.lstat().st_mtime_ns, b"" if path.is_dir() else path.read_bytes())
        for path in sorted(folder.rglob("*"))
    }


def test_an_intact_run_is_told_file_by_file_and_nothing_is_changed(run_dir: Path) -> None:
    before = state_of(run_dir)
    facts = facts_of("a")
    assert [(f["file"], f["verdict"], f["step"]) for f in facts["files"]] == [
        (f"step-0000000{step}.pt", "intact", step) for step in (1, 2, 3)
    ]
    assert facts["files"][0]["bytes"] == (run_dir / "checkpoints/step-00000001.pt").stat().st_size
    assert facts["links"]["latest.pt"] == NAME
    assert facts["links"]["best.pt"] == os.readlink(run_dir / "checkpoints/best.pt")
    assert facts["notes"] == facts["problems"] == []
    lines = verify("a").stdout.splitlines()
    assert lines[-1] == "3 of 3 intact, no problems"
    assert f"latest.pt -> {NAME}" in lines
    assert facts_of("a/checkpoints")["files"] == facts["files"]
    (alone,) = facts_of("a/checkpoints/latest.pt")["files"]
    assert (alone["verdict"], alone["step"]) == ("intact", 3)
    assert state_of(run_dir) == before


def test_nothing_is_built(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was built")

    monkeypatch.setattr("ampctl.recipe.target.build", refuse)
    monkeypatch.setattr("ampctl.builder.parts.build", refuse)
    monkeypatch.setenv("XDG_STATE_HOME", f"{Path('nobody').absolute()}")  # nothing is trusted
    facts_of("a")


def test_a_file_that_was_saved_anew_is_intact_by_less(run_dir: Path) -> None:
    payload = load(run_dir / "checkpoints" / NAME, notify=print).payload
    torch.save(payload, "again.pt")
    (verdict,) = facts_of("again.pt")["files"]
    assert (verdict["verdict"], verdict["proof"]) == ("intact", "CRC-32")
    (line, _) = verify("again.pt").stdout.splitlines()
    assert line.endswith("; by its CRC-32 sums alone: it was saved anew, without ampctl's SHA-256")
    shutil.copy(run_dir / "checkpoints" / NAME, "copied.pt")
    for source in ("copied.pt", "a"):
        assert {each["proof"] for each in facts_of(source)["files"]} == {"SHA-256"}
        assert "CRC-32" not in verify(source).stdout


@pytest.mark.parametrize("step", [1, 3])
def test_a_damaged_file_of_a_run_is_named_and_the_others_are_still_told(
    run_dir: Path, step: int
) -> None:
    path = run_dir / f"checkpoints/step-0000000{step}.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    facts = facts_of("a", code=4)
    assert [f["verdict"] == "intact" for f in facts["files"]] == [s != step for s in (1, 2, 3)]
    (problem,) = facts["problems"]
    assert (
        problem == f"{path.name}: it is damaged: its SHA-256 is not the one that index.json holds"
    )
    result = verify("a", code=4)
    assert f"  {problem}" in result.stderr.splitlines()
    assert result.stdout.splitlines()[-1] == "2 of 3 intact, 1 problem"


def test_a_state_that_is_not_finite_is_told_but_for_masks_that_always_were(run_dir: Path) -> None:
    path = run_dir / "checkpoints" / NAME
    rewritten(path, lambda p: p["model"]["head.bias"].fill_(float("inf")))
    told = "it holds NaN or infinity in model.head.bias"
    assert facts_of("a", code=4)["problems"] == [f"{NAME}: {told}"]
    assert f"checkpoint {path} cannot be used: {told}; " in verify(f"{path}", code=4).stderr
    rewritten(path, lambda p: p["environment"].update(nonfinite_by_design=["head.bias"]))
    assert facts_of("a")["problems"] == []


def test_a_file_that_was_set_aside_is_no_fault_of_a_run_but_no_run_goes_on_from_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(f"{TESTS}")
    Path("recipe.yaml").write_text(RECIPE)
    overrides = ("model={_target_: own_parts.Poisons}", "train.ema_decay=null", "train.max_steps=3")
    loaded = load_recipe("recipe.yaml", overrides)
    with pytest.raises(NumericsError, match="that can is a/checkpoints/step-00000002"):
        worker.train(loaded, run_dir=Path("a"), resume=False, quiet=True)
    facts = facts_of("a")
    verdicts = {f["file"]: (f["verdict"], f["reason"]) for f in facts["files"]}
    told = "it holds NaN or infinity in model.largest"
    (bad,) = Path("a/checkpoints").glob("*.nonfinite.pt")
    assert verdicts[bad.name] == ("set aside", told)
    assert told in verify(f"{bad}", code=4).stderr
    for path in Path("a/checkpoints").glob("step-*"):
        if path != bad:
            path.unlink()
    assert "there is no checkpoint to go on from" in facts_of("a", code=4)["problems"]


def test_a_damaged_file_that_a_resume_has_put_aside_is_no_fault_of_the_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(f"{TESTS}")
    path = run_dir / "checkpoints" / NAME
    os.truncate(path, 500)
    assert CliRunner().invoke(app, ["resume", "a", "--trust"]).exit_code == 0
    verdicts = {f["file"]: f["verdict"] for f in facts_of("a")["files"]}
    assert verdicts.pop(f"abandoned-{NAME}") == "set aside"
    assert {*verdicts.values()} == {"intact"}
    verify(f"{path.with_name(f'abandoned-{NAME}')}", code=4)


def test_what_a_kill_leaves_is_a_note_and_what_someone_removed_is_a_problem(run_dir: Path) -> None:
    folder = run_dir / "checkpoints"
    index = folder / "index.json"
    rows = json.loads(index.read_text())
    index.write_text(json.dumps([*rows, {**rows[-1], "file": "step-00000004.pt", "step": 4}]))
    (folder / ".step-00000004.pt.99.tmp").write_bytes(b"half")
    facts = facts_of("a")  # killed between index and rename
    assert len(facts["notes"]) == 2
    assert "step-00000004.pt: index.json tells of it and it is not there" in facts["notes"][0]
    assert facts["notes"][1].startswith(".step-00000004.pt.99.tmp: ")
    index.write_text(json.dumps(rows))
    (folder / ".step-00000004.pt.99.tmp").unlink()
    best = os.readlink(folder / "best.pt")
    gone = next(name for name in ("step-00000001.pt", "step-00000002.pt") if name != best)
    index.write_text(json.dumps([row for row in rows if row["file"] != gone]))
    (note,) = facts_of("a")["notes"]  # killed between index and unlink
    assert note.startswith(f"{gone}: index.json does not tell of it")
    index.write_text(json.dumps(rows))
    shutil.copy(folder / NAME, folder / "step-00000009.pt")
    (problem,) = facts_of("a", code=4)["problems"]
    assert problem == "step-00000009.pt: it is of step 3, not 9"
    (folder / "step-00000009.pt").unlink()
    (folder / gone).unlink()
    (problem,) = facts_of("a", code=4)["problems"]
    assert problem.startswith(f"{gone}: index.json tells of it")
    shutil.copy(folder / NAME, folder / gone)
    (problem,) = facts_of("a", code=4)["problems"]
    assert "SHA-256" in problem


def test_links_and_index_are_examined_too(run_dir: Path) -> None:
    folder = run_dir / "checkpoints"
    (folder / NAME).unlink()
    problems = facts_of("a", code=4)["problems"]
    assert f"latest.pt: it points at {NAME} and there is none" in problems
    assert f"{NAME}: index.json tells of it and it is not there: someone has removed it" in problems
    (folder / "latest.pt").unlink()
    (folder / "latest.pt").symlink_to("step-00000001.pt")
    (folder / "best.pt").unlink()
    notes = facts_of("a")["notes"]
    assert "latest.pt: it points at step-00000001.pt, and index.json has step-00000002.pt" in notes
    assert any(note.startswith("best: there is no link to ") for note in notes)
    for content in ("", "[]", "{", '{"a": 1}', "[" * 100_000, '[{"file": "../../x"}]', "[1]"):
        (folder / "index.json").write_text(content)
        assert "index.json: it is missing or damaged" in facts_of("a", code=4)["problems"][0]


def test_where_links_cannot_be_copies_stand_for_them(run_dir: Path) -> None:
    link = run_dir / "checkpoints/latest.pt"
    link.unlink()
    shutil.copy(link.with_name(NAME), link)
    assert facts_of("a")["links"]["latest.pt"] == NAME
    link.write_bytes(b"another")
    assert "latest.pt" in facts_of("a", code=4)["problems"][0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p["optimizer"].pop("param_groups"), "`optimizer.param_groups`"),
        (lambda p: p["optimizer"].update(param_groups=[{}]), "`optimizer.param_groups`"),
        (lambda p: p["progress"].update(step="3"), "whole numbers in `progress`"),
        (lambda p: p["progress"].update(optimizer_updates={"a": 1}), "`optimizer.param_groups`"),
        (lambda p: p.update(rng=[]), "a state in `rng` for each rank"),
        (lambda p: p["progress"].update(step=2), "it is of step 2, not 3"),
        (lambda p: p.update(recipe="name: 3: 4"), "its recipe cannot be read"),
        (
            lambda p: p["model"].update(x=torch.empty(3, device="meta")),
            "no plain tensor in model.x",
        ),
        (lambda p: p["model"].update(x=torch.ones(1).expand(9)), "no plain tensor in model.x"),
        (lambda p: p.update(version=2), "it has version 2"),
        (lambda p: p.pop("scaler"), "it lacks `scaler`"),
        (lambda p: p.update(model=[1]), "`model` is of type list"),
    ],
)
def test_rs2_what_a_run_could_not_go_on_with_is_told(
    run_dir: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    path = run_dir / "checkpoints" / NAME
    rewritten(path, change)
    assert said in verify("a", code=4).stderr
    message = verify(f"{path}", code=4).stderr
    assert message.startswith(f"error: checkpoint {path} cannot be used: ")
    assert said in message


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


Damage = Callable[[random.Random, bytes], bytes]


def _cut(chosen: random.Random, content: bytes) -> bytes:
    return content[: chosen.randrange(len(content))]


def _flipped(chosen: random.Random, content: bytes) -> bytes:
    place = chosen.randrange(len(content))
    return (
        content[:place] + bytes([content[place] ^ 1 << chosen.randrange(8)]) + content[place + 1 :]
    )


def _zeros(chosen: random.Random, content: bytes) -> bytes:
    start = chosen.randrange(len(content) - 600)  # no stretch of zeros is so long
    stop = chosen.randrange(start + 600, len(content) + 1)
    return content[:start] + bytes(stop - start) + content[stop:]


def _text(chosen: random.Random, content: bytes) -> bytes:
    return "".join(chosen.choices("name: digits\n\t{}[]", k=chosen.randrange(2000))).encode()


def _of_another_tool(chosen: random.Random, content: bytes) -> bytes:
    state = {"weight": torch.ones(chosen.randrange(1, 9))}
    what: list[Any] = [
        state,
        {"state_dict": state, "pytorch-lightning_version": "2.5"},
        {"model": state, "epoch": 3},
        [state],
        Hostile(),
        {"format": "ampctl", "version": 1, "model": Hostile()},
    ]
    return _as_saved(chosen.choice(what))


def _pickled(chosen: random.Random, content: bytes) -> bytes:
    return pickle.dumps(chosen.choice([Hostile(), {"model": 1}, [1, 2]]), chosen.randrange(6))


def _edited(chosen: random.Random, content: bytes) -> bytes:
    """A whole file of torch that is no checkpoint of this version, or lacks something."""
    Path("edited").write_bytes(content)
    payload = torch.load("edited", weights_only=True)
    key = chosen.choice([*file.REQUIRED_KEYS])
    how = chosen.randrange(4)
    if how == 0:
        del payload[key]
    elif how == 1:
        payload[key] = chosen.choice([3.5, {1, 2}, b"x"])
    elif how == 2:
        payload["version"] = chosen.randrange(2, 99)
    else:
        part = chosen.choice(["model", "ema"])
        name = chosen.choice(["first.weight", "norm.running_var", "head.bias"])
        payload[part][name].view(-1)[0] = chosen.choice([float("nan"), float("inf")])
    return _as_saved(payload)


def _as_saved(value: Any) -> bytes:
    torch.save(value, "edited")
    return Path("edited").read_bytes()


DAMAGES = (_cut, _flipped, _zeros, _text, _of_another_tool, _pickled, _edited)


@pytest.mark.parametrize(
    "count", [60, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_ck1_no_damage_loads_and_each_is_told_in_one_form(
    trained: Path, folder: Path, count: int
) -> None:
    """No index is beside the file: what it is, it has to prove itself."""
    content = (trained / "checkpoints" / NAME).read_bytes()
    path = folder / "one.pt"
    chosen = random.Random(count)
    for number in range(count):
        damage = DAMAGES[number % len(DAMAGES)]
        damaged = damage(chosen, content)
        assert damaged != content
        path.write_bytes(damaged)
        result = verify(f"{path}", code=4)
        assert result.stderr.startswith(f"error: checkpoint {path} cannot be used: "), damage
        assert result.stderr.count("\n") == 1, result.stderr
        assert "; " in result.stderr
        if "NaN or infinity" not in result.stderr:  # a look at those is for `inspect`
            with pytest.raises(CheckpointError):
                load(path, notify=print)
        assert not Path("ran").exists()


def test_parts_of_ranks_are_verified_as_files_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(f"{TESTS}")
    Path("recipe.yaml").write_text(DDP_RECIPE)
    ranks(2, "a", FSDP, "train.max_steps=2", "checkpoint.every_steps=1")
    facts = facts_of("a")
    assert {f["file"]: f["verdict"] for f in facts["files"]} == {
        f"step-0000000{step}.dist": "intact" for step in (1, 2)
    }
    assert (facts["links"]["latest.dist"], facts["problems"]) == ("step-00000002.dist", [])
    chosen = random.Random(0)
    folder = Path("a/checkpoints/step-00000001.dist")
    for part in sorted(folder.iterdir()):
        content = part.read_bytes()
        for damage in (_cut, _flipped, _text):
            part.write_bytes(damage(chosen, content))
            (problem,) = facts_of("a", code=4)["problems"]
            assert problem.startswith(f"{folder.name}: it is "), problem
            message = verify(f"{folder}", code=4).stderr
            assert message.startswith(f"error: checkpoint {folder}"), message
            assert message.count("\n") == 1
        part.write_bytes(content)
    (folder / "__1_0.distcp").unlink()
    assert "its part __1_0.distcp is missing" in verify(f"{folder}", code=4).stderr


@pytest.mark.parametrize("name", ["nowhere", "nowhere/step-00000001.dist", "empty", "x" * 5000])
def test_ck2_what_is_not_there_is_said(folder: Path, name: str) -> None:
    Path("empty").mkdir()
    verify(name, code=4)


def test_a_terminal_sees_how_far_it_is_within_a_file_and_a_pipe_does_not(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(file, "_BLOCK", 1000)
    sizes = [path.stat().st_size for path in sorted(run_dir.glob("checkpoints/step-*.pt"))]
    for source, total in ((run_dir, sum(sizes)), (run_dir / "checkpoints" / NAME, sizes[-1])):
        told: list[tuple[int, int]] = []
        examine(source, passed=lambda done, of, told=told: told.append((done, of)))
        assert told == sorted(told)
        assert len(told) > total // 1000 - 4
        assert told[-1] == (total, total)
    with screen.reading("verifying") as shown:
        shown.passed(1, 2)
        shown.warning("[odd]")
    assert capsys.readouterr().err == "warning: [odd]\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with screen.reading("verifying") as shown:
        shown.passed(500, 2000)
        shown.warning("[odd] " + "long " * 100 + "end")
    err = capsys.readouterr().err
    assert "0.5/2.0 kB" in err
    assert "warning: [odd] " + "long " * 100 + "end" in err  # a line of its own, and no markup


@pytest.mark.parametrize("command", [["verify"], ["inspect"], ["export", "out.pt", "--force"]])
def test_each_command_that_reads_a_large_file_shows_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    told = []

    @contextmanager
    def watched(doing: str) -> Iterator[screen.Reading]:
        yield screen.Reading(lambda done, total: told.append((done, total)), screen.warning)

    monkeypatch.setattr(screen, "reading", watched)
    source = run_dir / "checkpoints" / NAME
    result = CliRunner().invoke(app, [command[0], f"{source}", *command[1:]])
    assert result.exit_code == 0, result.stderr
    assert told[-1] == (source.stat().st_size,) * 2
