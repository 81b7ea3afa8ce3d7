"""A sharded model trains, saves and resumes as one that every rank has whole.

Two ranks under ``fsdp`` against two under ``ddp``: the same samples, and the same sums in another
order, so that weights agree as those of ``test_ddp`` do, and counters and scale to the bit.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from traceback import StackSummary
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hostile_files import text
from safetensors.torch import load_file
from test_ddp import RECIPE, TESTS, assert_close, events, ranks
from test_resume_exact import assert_same
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule
from typer.testing import CliRunner

from ampctl import load_model
from ampctl.checkpoint import sharded
from ampctl.checkpoint.abandoned import abandon_after
from ampctl.checkpoint.index import read_index, write_index
from ampctl.checkpoint.links import point
from ampctl.checkpoint.store import load
from ampctl.cli import app
from ampctl.distributed.ranks import ALONE, Ranks, Writers
from ampctl.distributed.shard import shard_
from ampctl.engine.step import _unsteppable
from ampctl.errors import CheckpointError, MachineError

FSDP = "distributed.strategy=fsdp"
DEEP = "model={_target_: test_fsdp.Deep}"


class Centred(nn.Module):
    """Keeps a running mean, which one sample can move too."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().float().mean(0), 0.1)
        return x - self.mean


class Deep(nn.Module):
    """Blocks to shard, statistics to share, and a bias with fewer rows than there are ranks."""

    def __init__(self, size: int = 5, statistics: str = "mean") -> None:
        super().__init__()
        self.stem = nn.Linear(8, size)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(size, size), nn.LayerNorm(size), nn.GELU()) for _ in range(3)
        )
        kinds = {"mean": Centred, "batch": nn.BatchNorm1d, "none": nn.LayerNorm}
        self.norm = kinds[statistics](size)
        self.gate = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(size, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x) * self.gate)


class OtherOrder(Deep):
    """The same model, whose stem is registered last."""

    def __init__(self) -> None:
        super().__init__()
        stem = self.stem
        del self.stem
        self.stem = stem


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    Path("recipe.yaml").write_text(RECIPE.replace("test_ddp.Net", "test_fsdp.Deep"))


def last(run_dir: str) -> dict[str, Any]:
    """Read the newest checkpoint of a run, of either form, whole."""
    payload = load(Path(run_dir), notify=pytest.fail).payload
    payload.pop(sharded.PARTS, None)
    return payload


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        ("float32", ("data.micro_batch_size=2",)),
        ("bfloat16", ("data.micro_batch_size=1", "task={_target_: test_ddp.Tokens}")),
        (
            "float16",
            ("data.train.bad=[5]", "distributed.blocks=layers.*", "model.statistics=batch"),
        ),
    ],
)
def test_sharded_equals_whole(dtype: str, changes: tuple[str, ...]) -> None:
    changes = (*changes, f"amp.dtype={dtype}")
    ranks(2, "ddp", *changes)
    ranks(2, "fsdp", FSDP, *changes)
    ours, theirs = last("fsdp"), last("ddp")
    assert_close(ours, theirs, dtype)
    assert ours["progress"]["skipped"] == (3 if dtype == "float16" else 0)
    for index, state in theirs["optimizer"]["state"].items():
        for name, value in state.items():
            mine = ours["optimizer"]["state"][index][name]
            torch.testing.assert_close(mine, value, rtol=3e-2, atol=3e-2)
    for mine, other in zip(events("fsdp", "train"), events("ddp", "train"), strict=True):
        for name in ("loss", "grad_norm"):
            if other[name] not in ("nan", "inf"):
                assert mine[name] == pytest.approx(other[name], rel=3e-2), name
        for name in ("scale", "skipped", "samples", "underflow"):
            assert mine.get(name) == pytest.approx(other.get(name)), name
    for mine, other in zip(events("fsdp", "eval"), events("ddp", "eval"), strict=True):
        assert mine["eval/index"] == pytest.approx(other["eval/index"], rel=1e-12)
        assert mine["eval/loss"] == pytest.approx(other["eval/loss"], rel=3e-2)
    saved = sorted(path.name for path in Path("fsdp/checkpoints").iterdir())
    steps = theirs["progress"]["step"]
    assert saved == [
        *("best.dist", "index.json", "latest.dist"),
        *(f"step-{step:08d}.dist" for step in range(1, steps + 1)),
    ]


def test_resume_is_exact_on_the_same_ranks_and_goes_on_with_others_and_with_ddp() -> None:
    fixed = (FSDP, "scheduler=null", "model.statistics=none")
    ranks(2, "whole", *fixed)
    whole = last("whole")
    ranks(2, "again", resume="whole/checkpoints/step-00000004.dist")
    assert_same(last("again"), whole)

    ranks(2, "a", *fixed, "train.max_steps=3")
    ranks(3, "", "train.max_steps=5", resume="a")
    ranks(2, "", "train.max_steps=7", "distributed.strategy=ddp", resume="a")
    names = [path.name for path in Path("a/checkpoints").glob("latest*")]
    assert names == ["latest.pt"]
    ranks(2, "", "train.max_steps=8", FSDP, resume="a")
    ranks(1, "", "train.max_steps=null", resume="a")
    assert_close(last("a"), whole, "float32")
    started = events("a", "resume")
    assert [event["world_size"] for event in started] == [3, 2, 2, 1]


@pytest.fixture(scope="module")
def _saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short sharded run, to be copied and damaged."""
    here, run_dir = Path.cwd(), tmp_path_factory.mktemp("saved")
    os.chdir(run_dir)
    try:
        Path("recipe.yaml").write_text(RECIPE.replace("test_ddp.Net", "test_fsdp.Deep"))
        ranks(2, "run", FSDP, "train.max_steps=3", "checkpoint.keep_last=2")
    finally:
        os.chdir(here)
    return run_dir / "run"


@pytest.fixture
def saved(_saved: Path, folder: Path) -> Path:
    shutil.copytree(_saved, folder / "run", symlinks=True)
    return Path("run")


def test_parameters_in_another_order_get_their_own_part_of_the_optimizers_state() -> None:
    ranks(2, "run", FSDP, "train.max_steps=3")
    expected = last("run")
    other = "model={_target_: test_fsdp.OtherOrder}"
    ranks(2, "other", other, resume="run/checkpoints/step-00000002.dist")
    found = last("other")
    for name, value in expected["model"].items():
        torch.testing.assert_close(found["model"][name], value)
    held = []
    for payload in (found, expected):
        (group,), state = payload["optimizer"]["param_groups"], payload["optimizer"]["state"]
        pairs = zip(group["param_names"], group["params"], strict=True)
        held.append({name: state[index] for name, index in pairs})
    assert list(held[0]) != list(held[1])
    torch.testing.assert_close(*held)


def test_old_folders_are_removed_whole_and_nothing_temporary_is_left(saved: Path) -> None:
    assert sorted(path.name for path in (saved / "checkpoints").glob("*.dist")) == [
        "best.dist",
        "latest.dist",
        "step-00000002.dist",
        "step-00000003.dist",
    ]
    rows = json.loads((saved / "checkpoints/index.json").read_text())
    newest = saved / "checkpoints/step-00000003.dist"
    assert rows[-1]["size"] == sum(path.stat().st_size for path in newest.iterdir())
    assert not list((saved / "checkpoints").glob(".*"))
    whole = load(saved, notify=print).payload["model"]
    assert not any(weight.is_meta for weight in whole.values())


def test_every_damage_is_found_and_the_folder_before_it_is_taken(saved: Path) -> None:
    newest = saved / "checkpoints/step-00000003.dist"
    intact = {path.name: path.read_bytes() for path in newest.iterdir()}
    assert sorted(intact) == [".metadata", "__0_0.distcp", "__1_0.distcp", "state.pt"]
    for name, content in intact.items():
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
        for damaged in (None, b"", content[:middle], flipped):
            if damaged is None:
                (newest / name).unlink()
            else:
                (newest / name).write_bytes(damaged)
            with pytest.raises(CheckpointError, match="cannot be used"):
                load(newest, notify=pytest.fail)
            told: list[str] = []
            assert load(saved, notify=told.append).path.name == "step-00000002.dist"
            assert "step-00000003.dist cannot be used" in told[0]
            (newest / name).write_bytes(content)
    assert load(saved, notify=pytest.fail).path.name == newest.name


def test_a_part_that_is_named_alone_or_missing_is_told_with_its_folder(saved: Path) -> None:
    newest = saved / "checkpoints/step-00000003.dist"
    with pytest.raises(
        CheckpointError, match=r"several ranks wrote; name its folder, step-N\.dist"
    ):
        load(newest / "state.pt", notify=pytest.fail)
    (newest / "state.pt").unlink()
    with pytest.raises(CheckpointError, match=r"its state\.pt is missing"):
        load(newest, notify=pytest.fail)


def test_without_symlinks_a_folder_has_no_second_name(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(1, "Operation not permitted")

    folder = saved / "checkpoints"
    monkeypatch.setattr(os, "symlink", refuse)
    point(folder / "best.dist", "step-00000002.dist")
    point(folder / "latest.dist", "step-00000002.dist")
    left = ["index.json", "step-00000002.dist", "step-00000003.dist"]
    assert sorted(path.name for path in folder.iterdir()) == left
    assert load(saved, notify=pytest.fail).path.name == "step-00000003.dist"


def test_a_full_disk_is_told_as_one(mount: Callable[[str], Path]) -> None:
    disk = mount("size=44k")
    with pytest.raises(Exception, match=r"no room to write .*step-0000000\d\.dist"):
        ranks(2, f"{disk}/a", FSDP)
    assert not list(disk.glob("a/checkpoints/.*"))
    cut = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    fault = sharded._fault(Path("a"), CheckpointException("write", {1: (cut, StackSummary())}))
    assert f"{fault}".startswith("no room to write a, it seems: rank 1 could not")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "[pair.cc:534] Connection closed by peer [::1]:5",
            "a is not saved: another rank was gone",
        ),
        (
            "[x.cc:1] Timed out waiting 30000ms for recv operation",
            "a is not saved: it took too long",
        ),
        ("something else", "cannot write a: RuntimeError: something else"),
    ],
)
def test_a_save_that_the_other_ranks_do_not_end_says_so(said: str, told: str) -> None:
    class Lost:
        def of_first(self, value: Any) -> Any:
            raise RuntimeError(said)

    with pytest.raises(MachineError) as raised:
        sharded.write_part(Path("a"), {}, cast(Writers, Lost()))
    assert f"{raised.value}".startswith(told)


def test_going_back_twice_puts_folders_aside_again(saved: Path) -> None:
    older, newer = read_index(saved)
    folder, again = saved / "checkpoints", saved / "again"
    shutil.copytree(folder / newer.file, again)
    assert abandon_after(saved, older) == [f"abandoned-{newer.file}"]
    again.rename(folder / newer.file)
    write_index(folder, [older, newer])
    assert abandon_after(saved, older) == [f"abandoned-{newer.file}"]
    assert load(folder / f"abandoned-{newer.file}", notify=pytest.fail)
    assert load(saved, notify=pytest.fail).path.name == older.file


class Canary:
    def __reduce__(self) -> Any:
        return (os.system, ("touch canary",))


def forged(folder: Path, name: str, content: bytes) -> None:
    """Replace a part by a hostile one that ``state.pt`` vouches for."""
    from ampctl.checkpoint import disk, file

    (folder / name).write_bytes(content)
    payload = torch.load(folder / "state.pt", weights_only=True)
    told = {"size": len(content), "sha256": file.digest(folder / name)}
    payload[sharded.PARTS][name] = told
    file.write(folder / "state.pt", payload)
    disk.publish(disk.temporary(folder / "state.pt"), folder / "state.pt")
    for index in folder.parent.glob("index.json"):
        index.unlink()


def test_a_hostile_index_of_parts_runs_nothing(saved: Path) -> None:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    newest = saved / "checkpoints/step-00000003.dist"
    metadata = pickle.loads((newest / ".metadata").read_bytes())
    original = pickle.dumps(metadata)
    key = "model.gate"
    assert key in metadata.state_dict_metadata

    def tried(change: Any) -> None:
        hostile = pickle.loads(original)
        change(hostile)
        forged(newest, ".metadata", pickle.dumps(hostile))
        with pytest.raises(CheckpointError, match="parts cannot be read"):
            load(newest, notify=pytest.fail)
        assert not Path("canary").exists()

    tried(lambda m: setattr(m, "planner_data", Canary()))
    tried(lambda m: m.state_dict_metadata.update({key: Canary()}))
    # Torch's own reader would unpickle the bytes of this one.
    tried(lambda m: m.state_dict_metadata.update({key: BytesStorageMetadata()}))
    for info in metadata.storage_data:
        tried(lambda m, info=info: setattr(m.storage_data[info], "relative_path", "../../x"))
        tried(lambda m, info=info: setattr(m.storage_data[info], "offset", -(10**9)))
        break
    # The state of a class would be that of all its objects: `_str`, say, the name of every path.
    # Torch 2.10 tells only that there is no metadata, not why.
    for named in (b"cpathlib\nPosixPath\n", b"ctorch.serialization\n_get_layout\n"):
        state = b"}" + text("mark") + text("x") + b"s"
        forged(newest, ".metadata", b"\x80\x02" + named + b"N" + state + b"\x86b.")
        with pytest.raises(CheckpointError, match=r"changes what it names|metadata is None"):
            load(newest, notify=pytest.fail)
    assert not hasattr(Path, "mark")
    tried(lambda m: m.storage_data.clear())
    tried(lambda m: m.state_dict_metadata.clear())
    forged(newest, ".metadata", original)
    load(newest, notify=lambda text: None)
    state = torch.load(newest / "state.pt", weights_only=True)
    state["model"]["gate"] = torch.empty(2**40, 2**20, device="meta")
    torch.save(state, newest / "state.pt")
    with pytest.raises(CheckpointError, match="parts cannot be read"):
        load(newest, notify=lambda text: None)
    state["model"]["gate"] = torch.empty(1, device="meta")
    torch.save(state, newest / "state.pt")
    part = pickle.dumps(Canary())
    forged(newest, "__0_0.distcp", part + bytes(10**4))
    with pytest.raises(CheckpointError, match="parts cannot be read"):
        load(newest, notify=pytest.fail)
    assert not Path("canary").exists()


def test_ck_a_part_outside_of_the_folder_is_not_read(saved: Path) -> None:
    newest = saved / "checkpoints/step-00000003.dist"
    part = newest / "__1_0.distcp"
    part.rename("elsewhere")
    part.symlink_to(Path("elsewhere").resolve())
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is missing"):
        load(newest, notify=pytest.fail)


def test_a_sharded_checkpoint_is_inspected_exported_and_evaluated_as_a_file_is(
    saved: Path,
) -> None:
    def ampctl(*argv: str) -> str:
        result = CliRunner().invoke(app, list(argv))
        assert result.exit_code == 0, (result.output, result.exc_info)
        return result.stdout

    whole = last("run")
    newest = saved / "checkpoints/latest.dist"
    facts = json.loads(ampctl("inspect", f"{newest}", "--json"))
    assert facts["progress"]["step"] == 3
    assert facts["world_size"] == 2
    assert facts["nonfinite"] == facts["strange"] == []
    (row,) = [
        e for e in json.loads((saved / "checkpoints/index.json").read_text()) if e["step"] == 3
    ]
    assert (facts["sha256"], facts["bytes"]) == (row["sha256"], row["size"])
    sizes = facts["parts"]["model"]
    assert sizes["bytes"] == sum(v.numel() * v.element_size() for v in whole["model"].values())
    ampctl("export", "run", "weights.safetensors")
    for name, value in load_file("weights.safetensors").items():
        assert torch.equal(value, whole["ema"][name]), name
    ampctl("export", f"{newest}", "raw.pt", "--raw")
    for name, value in torch.load("raw.pt", weights_only=True).items():
        assert torch.equal(value, whole["model"][name]), name
    told = json.loads(ampctl("eval", "run", "--json", "--trust"))
    stored = whole["progress"]["metrics"]
    assert told["metrics"] == pytest.approx(stored, rel=1e-6)
    assert isinstance(load_model("run", trust=True), Deep)


def test_dd7_a_bad_sample_on_one_rank_is_diagnosed_on_the_whole_model() -> None:
    bad = ("data.train.bad=[7]", "data.shuffle=false", "amp.nonfinite=stop")
    with pytest.raises(Exception, match=r"(?s)batch holds .*its samples 7\).*on rank 1"):
        ranks(2, "a", FSDP, *bad)
    assert events("a", "stop")[-1]["exit_code"] == 3


def test_a_signal_saves_all_parts_and_the_run_ends_as_the_undisturbed() -> None:
    ranks(2, "whole", FSDP)

    def kill(context: Any) -> None:
        while not list(Path("a/checkpoints").glob("step-*.dist")):
            time.sleep(0.05)
        os.kill(context.pids()[1], signal.SIGTERM)

    ranks(2, "a", FSDP, "data.train.delay_s=0.05", "checkpoint.every_steps=2", kill=kill)
    assert "which is saved" in Path("preempted-1").read_text()
    step = last("a")["progress"]["step"]
    assert step < last("whole")["progress"]["step"]
    ranks(2, "", "data.train.delay_s=0", resume="a")
    assert_same({**last("a"), "recipe": ""}, {**last("whole"), "recipe": ""})


def test_unused_optimizers_and_models_are_refused_in_words() -> None:
    with pytest.raises(Exception, match=r"optimizer\.fused: .*does not take .*sharded by fsdp"):
        ranks(2, "a", FSDP, "optimizer={_target_: torch.optim.SGD, lr: 0.1, fused: true}")
    with pytest.raises(Exception, match="Adafactor cannot step parameters that fsdp shards"):
        ranks(2, "b", FSDP, "optimizer={_target_: torch.optim.Adafactor}")
    lbfgs = ("optimizer={_target_: torch.optim.LBFGS}", "amp.dtype=float32")
    with pytest.raises(Exception, match="LBFGS compares whole gradients, which a model sharded"):
        ranks(2, "e", FSDP, *lbfgs)
    ranks(2, "c", FSDP, "optimizer={_target_: torch.optim.SGD, lr: 0.1}", "train.max_steps=2")
    ranks(2, "d", "optimizer={_target_: torch.optim.SGD, lr: 0.1}", "train.max_steps=2")
    assert_close(last("c"), last("d"), "float32")


class Either(nn.Module):
    """Rank 1 uses another layer than rank 0, of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x) if os.environ["RANK"] == "1" else self.first(x)


EITHER = "model={_target_: test_fsdp.Either}"


def test_dd4_gradients_of_different_parameters_are_never_added_up() -> None:
    with pytest.raises(Exception, match=r"(?s)2 parameters take no part .*find_unused_parameters"):
        ranks(2, "a", FSDP, EITHER)


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="torch 2.14 brought it"
)
def test_dd4_parameters_that_one_rank_alone_uses_are_allowed_by_the_key() -> None:
    allowed = (EITHER, "distributed.find_unused_parameters=true", "amp.dtype=float32")
    ranks(2, "sharded", FSDP, *allowed)
    ranks(2, "whole", *allowed)
    assert_close(last("sharded"), last("whole"), "float32")


class PastTheModel:
    """Calls a part of the model, or uses a parameter, in the loss."""

    def __init__(self, how: str) -> None:
        self.how = how

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.how == "part":
            return model.layers[0](model.stem(batch[0])).sum()
        return model(batch[0]).float().sum() + model.layers[0][0].weight.square().sum()


@pytest.mark.parametrize("how", ["part", "penalty"])
def test_a_loss_that_goes_past_a_sharded_model_is_explained(how: str) -> None:
    task = f"task={{_target_: test_fsdp.PastTheModel, how: {how}}}"
    with pytest.raises(Exception) as raised:
        ranks(2, "a", FSDP, task, "data.eval=null")
    assert "parameters are whole only while the model runs" in f"{raised.value}"


def test_a_rank_that_is_gone_in_an_optimizer_s_step_is_not_blamed_on_the_optimizer() -> None:
    state: Any = SimpleNamespace(ranks=Ranks(size=2, shards=True))
    updater: Any = SimpleNamespace(optimizer=None, name="")
    lost = RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:5")
    assert _unsteppable(lost, state, updater) is None
    assert _unsteppable(RuntimeError("no kernel for DTensor"), state, updater) is not None


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.head = nn.Linear(3, 3)
        self.head.weight = self.blocks[0].weight


def test_what_cannot_be_sharded_is_said_in_words() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match=r"blocks\.0\.weight and head\.weight are one parameter"):
        shard_(Tied(), ALONE, cpu)
    with pytest.raises(ValueError, match=r"'layer\.\*' is no module of Deep; .*layers\.0"):
        shard_(Deep(), ALONE, cpu, ["layer.*"])
    with pytest.raises(ValueError, match=r"'layers' is a list, .* choose 'layers\.\*'"):
        shard_(Deep(), ALONE, cpu, ["*"])
    scalar = Deep()
    scalar.gate = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="without a dimension cannot be sharded: gate"):
        shard_(scalar, ALONE, cpu)
