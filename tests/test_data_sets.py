"""The data sets that ampctl carries: their splits, their shapes, and batches gathered at once."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ampctl.data import Digits, PythonSource, TextFile
from ampctl.data.text import ByteWindows
from ampctl.errors import UsageError


def test_digits_splits_are_disjoint_and_together_are_all():
    train, test = Digits("train"), Digits("test")
    of_train = {image.numpy().tobytes() for image in train.images}
    of_test = {image.numpy().tobytes() for image in test.images}
    assert (len(train), len(test)) == (1442, 355)
    assert len(of_train) + len(of_test) == 1797
    assert not of_train & of_test


def test_digits_splits_hold_each_class_alike():
    train, test = Digits("train"), Digits("test")
    share = test.labels.bincount() / (train.labels.bincount() + test.labels.bincount())
    assert len(share) == 10
    assert torch.all((share > 0.19) & (share < 0.21))


def test_digits_have_the_promised_shapes_types_and_range():
    digits = Digits("train")
    image, label = digits[0]
    assert image.shape == (1, 8, 8)
    assert image.dtype == torch.float32
    assert label.shape == ()
    assert label.dtype == torch.int64
    assert (digits.images.min(), digits.images.max()) == (0, 1)


def test_digits_are_those_of_scikit_learn():
    bunch = pytest.importorskip("sklearn.datasets").load_digits()
    theirs = {
        (image.astype("float32").tobytes(), int(label))
        for image, label in zip(bunch.images, bunch.target, strict=True)
    }
    ours = {
        ((image * 16).numpy().tobytes(), int(label))
        for split in ("train", "test")
        for image, label in Digits(split)
    }
    assert ours == theirs


def test_digits_are_the_same_each_time():
    assert torch.equal(Digits("test").images, Digits("test").images)


@pytest.mark.parametrize("indices", [torch.tensor([5, 0, 5, 2]), [5, 0, 5, 2]])
@pytest.mark.parametrize("name", ["digits", "text"])
def test_a_gathered_batch_equals_its_items(name: str, indices: Tensor | list[int]):
    data = Digits("train") if name == "digits" else ByteWindows(bytes(range(200)), 9, origin="text")
    batch = data.__getitems__(indices)
    assert isinstance(batch, tuple)
    for position, index in enumerate([5, 0, 5, 2]):
        for column, value in zip(batch, data[index], strict=True):
            assert torch.equal(column[position], value)
            assert column.dtype == value.dtype
            assert column.is_contiguous()


@pytest.mark.parametrize("data", [Digits("test"), ByteWindows(b"abcdefgh", 3, origin="text")])
def test_an_index_beyond_the_end_is_an_index_error(data):
    with pytest.raises(IndexError):
        data[len(data)]


def test_windows_do_not_overlap_and_targets_are_one_ahead():
    windows = ByteWindows(bytes(range(23)), 4, origin="text")
    assert len(windows) == 4
    inputs, targets = windows.__getitems__([0, 1, 2, 3])
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [[0, 1, 2, 3], [5, 6, 7, 8], [10, 11, 12, 13], [15, 16, 17, 18]]
    assert torch.equal(targets, inputs + 1)


def test_text_is_kept_as_bytes():
    assert ByteWindows(b"x" * 100, 9, origin="text").windows.dtype == torch.uint8


def test_python_source_is_large_and_its_splits_hold_different_files():
    train, test = PythonSource("train"), PythonSource("test")
    sizes = [len(split) * 257 for split in (train, test)]
    assert sizes[0] > 5_000_000
    assert 0.03 < sizes[1] / sum(sizes) < 0.25
    of_train = {window.numpy().tobytes() for window in train.windows}
    of_test = {window.numpy().tobytes() for window in test.windows}
    # Copied passages could fall on the same window in both, but hardly often.
    assert len(of_train & of_test) < len(test) // 100


def test_python_source_is_the_library_without_its_tests(tmp_path: Path, monkeypatch):
    for name in ("b.py", "a/c.py", "a/tests/no.py", "site-packages/no.py", "__pycache__/no.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("no" if path.name == "no.py" else path.stem * 4)
    (tmp_path / "no.txt").write_text("no")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert bytes(PythonSource("train", context=7).windows[0].tolist()) == b"ccccbbbb"


def test_every_tenth_file_of_python_source_is_test(tmp_path: Path, monkeypatch):
    for number in range(20):
        (tmp_path / f"{number:02d}.py").write_bytes(bytes([number, number]))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert PythonSource("test", context=1).windows[:, 0].tolist() == [9, 19]
    assert PythonSource("train", context=1).windows[:, 0].tolist() == [
        number for number in range(20) if number not in (9, 19)
    ]


def test_max_bytes_keeps_the_beginning():
    short, longer = PythonSource(max_bytes=10_000), PythonSource(max_bytes=200_000)
    assert len(short) == 10_000 // 257
    assert torch.equal(short.windows, longer.windows[: len(short)])


def test_text_file_is_cut_in_two_at_its_end(tmp_path: Path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(100)))
    train = TextFile(file, "train", context=9, test_fraction=0.3)
    test = TextFile(file, "test", context=9, test_fraction=0.3)
    assert train.windows.flatten().tolist() == list(range(70))
    assert test.windows.flatten().tolist() == list(range(70, 100))
    assert len(TextFile(file, context=9, test_fraction=0)) == 10


def test_a_missing_text_file_is_told_in_words(tmp_path: Path):
    with pytest.raises(UsageError, match=r"no\.txt: cannot be read: No such file"):
        TextFile(tmp_path / "no.txt")
    for device in (tmp_path, "/dev/zero"):
        with pytest.raises(UsageError, match="is not a regular file"):
            TextFile(device)


def test_a_text_shorter_than_a_window_is_told_in_words(tmp_path: Path):
    file = tmp_path / "short.txt"
    file.write_bytes(b"x" * 200)
    with pytest.raises(UsageError, match=r"train part of .*short\.txt has 180 bytes.*needs 257"):
        TextFile(file)
    file.write_bytes(b"")
    with pytest.raises(UsageError, match="0 bytes"):
        TextFile(file)


@pytest.mark.parametrize("make", [Digits, PythonSource, lambda split: TextFile(__file__, split)])
def test_an_unknown_split_is_refused_with_the_allowed_ones(make):
    with pytest.raises(ValueError, match='\'val\'; it must be "train" or "test"'):
        make("val")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PythonSource(context=0), "context is 0"),
        (lambda: PythonSource(max_bytes=0), "max_bytes is 0"),
        (lambda: TextFile(__file__, test_fraction=1.0), "test_fraction is 1.0"),
    ],
)
def test_wrong_values_are_refused_by_name(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
