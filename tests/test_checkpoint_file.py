"""One checkpoint file: what was written is read, and nothing else ever is."""

from __future__ import annotations

import os
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ampctl.checkpoint import disk, file
from ampctl.errors import CheckpointError, MachineError

DAMAGES = 500


def payload(**changes: Any) -> dict[str, Any]:
    state = {
        "model": {"weight": torch.arange(64.0), "bias": torch.ones(3)},
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(64)}}, "param_groups": [{"lr": 0.1}]},
        "scheduler": None,
        "ema": None,
        "scaler": {"scale": 1024.0, "_growth_tracker": 7},
        "progress": {"step": 3},
        "rng": [{"torch": torch.get_rng_state()[:16]}],
        "data": None,
        "recipe": "name: digits\n",
        "dtype": "float16",
        "world_size": 1,
        "environment": {"torch": "2"},
    }
    return {**state, **changes}


def saved(path: Path, **changes: Any) -> file.Written:
    written = file.write(path, payload(**changes))
    disk.publish(disk.temporary(path), path)
    return written


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step-00000003.pt"


def refusal(path: Path, digests: list[str] | None = None) -> str:
    """Return what is said of a file that cannot be used, which has one shape in all cases."""
    with pytest.raises(CheckpointError) as caught:
        file.read(path, digests)
    message = str(caught.value)
    assert message.startswith(f"checkpoint {path} cannot be used: ")
    assert "; " in message
    assert "\n" not in message
    return message


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_what_is_written_is_read(path):
    written = saved(path)
    expected = {"format": "ampctl", "version": 1, **payload()}
    assert tuple(expected) == file.REQUIRED_KEYS
    assert same(file.read(path, [written.sha256]), expected)
    assert same(file.read(path, None), expected)
    assert same(file.read(path, None, mmap=True), expected)
    assert written.size == path.stat().st_size
    assert written.sha256 == file.digest(path)
    assert os.listdir(path.parent) == [path.name]


def test_stock_torch_reads_it_with_weights_only(path):
    saved(path)
    assert same(torch.load(path, weights_only=True)["scaler"], payload()["scaler"])
    assert zipfile.ZipFile(path).testzip() is None


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("share", [0, 0.02, 0.3, 0.5, 0.9, 0.999])
def test_ck1_a_cut_file_gives_one_uniform_message(path, share, listed):
    written = saved(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert "it is damaged" in refusal(path, [written.sha256] if listed else None)


@pytest.mark.parametrize("listed", [True, False])
def test_ck1_a_flipped_byte_in_tensor_data_is_seen(path, listed):
    written = saved(path)
    content = bytearray(path.read_bytes())
    content[content.index(torch.arange(64.0).numpy().tobytes()) + 40] ^= 1
    path.write_bytes(content)
    torch.load(path, weights_only=True)  # torch itself does not see it
    assert "it is damaged" in refusal(path, [written.sha256] if listed else None)


def test_ck1_a_file_cut_at_any_length_or_flipped_anywhere_does_not_load(path):
    saved(path)
    content = path.read_bytes()
    chosen = random.Random(0)
    for _ in range(DAMAGES):
        place = chosen.randrange(len(content))
        flipped = bytearray(content)
        flipped[place] ^= 1 << chosen.randrange(8)
        for damaged in (flipped, content[:place]):
            path.write_bytes(damaged)
            refusal(path)
    for end in range(1, 120):  # around the zip end record and the digest that follows it
        for damaged in (content[:-end], content + b"\0" * end):
            path.write_bytes(damaged)
            refusal(path)


@settings(
    max_examples=DAMAGES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_ck1_no_damage_loads_or_raises_anything_else(path, data):
    """Splices: any stretch replaced by any bytes, by a copy of another stretch, or by nothing."""
    if not path.exists():
        saved(path)
        path.with_suffix(".whole").write_bytes(path.read_bytes())
        torch.save({"format": "ampctl", "version": 1, **payload()}, path.with_suffix(".unsealed"))
    source = data.draw(st.sampled_from([".whole", ".unsealed"]))
    content = path.with_suffix(source).read_bytes()
    start = data.draw(st.integers(0, len(content)))
    stop = data.draw(st.integers(start, len(content)))
    piece = data.draw(
        st.one_of(
            st.binary(max_size=64),
            st.just(b"\0" * (stop - start)),
            st.integers(0, len(content)).map(lambda i: content[i : i + stop - start]),
        )
    )
    damaged = content[:start] + piece + content[stop:]
    if damaged == content:
        return
    path.write_bytes(damaged)
    if source == ".whole":
        refusal(path)
        return
    try:  # of a file that torch alone wrote, what no CRC covers is padding
        assert same(file.read(path, None), file.read(path.with_suffix(source), None))
    except CheckpointError:
        refusal(path)


def test_a_file_that_the_user_saved_anew_is_read(path):
    saved(path)
    assert file.is_sealed(path)
    edited = {"format": "ampctl", "version": 1, **payload(dtype="bfloat16")}
    torch.save(edited, path)
    assert not file.is_sealed(path)
    assert file.read(path, None)["dtype"] == "bfloat16"
    assert "index.json" in refusal(path, ["0" * 64])


def test_a_flipped_byte_in_a_file_that_the_user_saved_anew_is_seen(path):
    torch.save({"format": "ampctl", "version": 1, **payload()}, path)
    content = bytearray(path.read_bytes())
    content[content.index(torch.arange(64.0).numpy().tobytes()) + 40] ^= 1
    path.write_bytes(content)
    assert "fails its CRC-32" in refusal(path)


@pytest.mark.parametrize("end", [b"more", b"\x05\x00"])
def test_what_follows_the_end_of_a_file_that_the_user_saved_anew_is_told(path, end):
    """Or what that end, which has the length of a comment in its last bytes, says would follow."""
    torch.save({"format": "ampctl", "version": 1, **payload()}, path)
    content = path.read_bytes()
    path.write_bytes((content[:-2] if len(end) == 2 else content) + end)
    assert "cut off, or something was added at its end" in refusal(path)


def test_what_was_read_does_not_change_with_the_file(path):
    written = saved(path)
    read = file.read(path, [written.sha256])
    with path.open("r+b") as opened:
        opened.write(bytes(written.size))
    assert same(read["model"], payload()["model"])


def test_what_a_file_says_of_itself_cannot_reach_the_terminal_unfiltered(path):
    torch.save({"format": "ampctl", "version": 1, **payload()}, path)
    name, damaged = b"/data.pkl", b"/\x1b[2J\n\x07.l"
    content = path.read_bytes().replace(name, damaged).replace(b"scale", b"scalf", 1)
    path.write_bytes(content)
    assert refusal(path).isprintable()


def test_missing_folder_and_special_files_are_named(path):
    assert "there is no such file" in refusal(path)
    path.mkdir()
    assert "it is a folder" in refusal(path)
    os.mkfifo(path / "pipe")
    assert "not a regular file" in refusal(path / "pipe")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty"),
        (b"\0" * 5000, "it is not a checkpoint file"),
        (b"name: digits\nseed: 0\n" * 40, "it is not a checkpoint file"),
        (b"PK", "it is damaged: it is cut off, or something was added at its end"),
        (b"\x02\0\0\0\0\0\0\0{}", "it is a safetensors file (weights alone)"),
        (pickle.dumps({"model": 1}), "it is not a checkpoint file"),
    ],
)
def test_what_is_no_checkpoint_at_all_is_said(path, content, said):
    path.write_bytes(content)
    assert said in refusal(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"weight": torch.ones(2)}, "bare state dict"),
        ({"pytorch-lightning_version": "2.5", "state_dict": {}}, "PyTorch Lightning"),
        ({"epoch": 3, "model": {}}, "another tool"),
        ([1, 2], "another tool"),
        (torch.ones(2), "another tool"),
        ({"format": "ampctl", "version": 2}, "version 2 and this ampctl reads up to 1"),
        ({"format": "ampctl", "version": 1, **payload(model=[1])}, "`model` is of type list"),
        ({"format": "ampctl", **payload(), "version": "1"}, "`version` is of type str"),
    ],
)
def test_what_another_tool_or_version_wrote_is_named(path, content, said):
    torch.save(content, path)
    assert said in refusal(path)


def test_legacy_format_and_torchscript_are_refused(path):
    torch.save(payload(), path, _use_new_zipfile_serialization=False)
    assert "the format that torch.save had before 1.6" in refusal(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/b.txt", "hello")
    assert "it is damaged" in refusal(path)


@pytest.mark.parametrize(
    "key", [key for key in file.REQUIRED_KEYS if key not in ("format", "version")]
)
def test_rs2_a_missing_key_is_named(path, key):
    content = {"format": "ampctl", "version": 1, **payload()}
    del content[key]
    torch.save(content, path)
    message = refusal(path)
    assert f"it lacks `{key}`" in message
    if key == "scaler":
        assert "the loss scale would start again" in message


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_hostile_pickle_is_refused_and_not_run(path, tmp_path):
    torch.save(payload(environment={"x": Hostile(tmp_path / "ran")}), path)
    assert "it would import posix.mkdir" in refusal(path)
    assert not (tmp_path / "ran").exists()


def test_ck7_a_cuda_tensor_loads_on_a_machine_without_cuda(path):
    content = {"format": "ampctl", "version": 1, **payload()}
    source = path.with_suffix(".cpu")
    torch.save(content, source)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
        for record in old.infolist():
            data = old.read(record)
            if record.filename.endswith("data.pkl"):
                # The storage's location: BINUNICODE, its length, its text.
                assert b"X\x03\0\0\0cpu" in data
                data = data.replace(b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:0")
            new.writestr(record, data)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA"):
            torch.load(path, weights_only=True)
    loaded = file.read(path, None)
    assert loaded["model"]["weight"].device.type == "cpu"
    assert same(loaded, content)


def test_a_file_that_cannot_be_opened_is_a_checkpoint_error(path, monkeypatch):
    saved(path)
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user reads every file")
    assert "it cannot be opened (Permission denied)" in refusal(path)


def test_a_folder_that_is_not_there_is_the_machines_fault(tmp_path):
    with pytest.raises(MachineError, match="cannot write"):
        file.write(tmp_path / "gone" / "x.pt", payload())


def test_a_payload_that_cannot_be_pickled_leaves_no_file(path):
    with pytest.raises(Exception, match="pickle"):
        file.write(path, payload(data={"f": lambda: None}))
    assert os.listdir(path.parent) == []
