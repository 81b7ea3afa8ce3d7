"""Recipe files and overrides: values, lines, mistakes, extends, interpolation and hostile text."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ampctl.errors import RecipeError, UsageError
from ampctl.recipe import builtin
from ampctl.recipe.json_schema import json_schema
from ampctl.recipe.load import LoadedRecipe, load_recipe, parse_recipe
from ampctl.recipe.scalar import dump, escape, scalar, unescape

VALID = """\
# a small recipe
name: digits
seed: 3
model: {_target_: ampctl.models.ConvNet, num_classes: 10}
task: {_target_: ampctl.tasks.Classification}
data:
  train: {_target_: ampctl.data.Digits, split: train}
  eval:
    _target_: ampctl.data.Digits
    split: test
  batch_size: 64
optimizer: {_target_: torch.optim.AdamW, lr: 3e-3, betas: [0.9, 0.99]}
amp:
  dtype: bfloat16
  modules: {"layers.11.*": float32}
train: {max_epochs: 2, early_stop: {patience: 3}}
log: {trackers: [tensorboard]}
"""


def load(text: str, *overrides: str) -> LoadedRecipe:
    return parse_recipe(text, where="r.yaml", overrides=overrides)


def problems(text: str, *overrides: str) -> list[tuple[str, str, str]]:
    with pytest.raises(RecipeError) as caught:
        load(text, *overrides)
    return [(p.where, p.key, f"{p.message} {p.advice}") for p in caught.value.problems]


def only(text: str, *overrides: str) -> tuple[str, str, str]:
    (problem,) = problems(text, *overrides)
    return problem


def with_lr(text: str) -> str:
    return VALID.replace("3e-3", text)


# Values


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.e-4", ".0001", "+1e-4", "'1e-4'", '"1E-4"'])
def test_yc1_every_way_to_write_a_number_gives_a_float_in_a_numeric_field(text: str) -> None:
    loaded = load(f"{VALID}checkpoint: {{every_minutes: {text}}}\n", f"amp.clip_norm={text}")
    assert loaded.recipe.checkpoint.every_minutes == 1e-4
    assert loaded.recipe.amp.clip_norm == 1e-4


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("1e4", 1e4), ("1.0e4", 1e4), (".1", 0.1), ("+1", 1), ("0x10", 16)],
)
def test_yc1_plain_numbers_of_a_block_are_numbers(text: str, value: float) -> None:
    assert load(with_lr(text)).recipe.optimizer["lr"] == value


@pytest.mark.parametrize("text", ["1e4", "no", "007", "on", "1.0", "true", "0x1F", "2024-01-01"])
def test_yc1_a_text_field_keeps_the_raw_text(text: str) -> None:
    changed = VALID.replace("name: digits", f"name: {text}")
    assert load(changed).recipe.name == text
    assert load(VALID, f"name={text}").recipe.name == text
    assert load(load(changed).text).recipe.name == text


@pytest.mark.parametrize(("text", "value"), [("3.0", 3), ("3", 3), ('"3"', 3), ("1e3", 1000)])
def test_yc2_a_whole_number_may_be_written_as_a_float(text: str, value: int) -> None:
    read = load(VALID.replace("max_epochs: 2", f"max_epochs: {text}")).recipe.train.max_epochs
    assert read == value
    assert type(read) is int


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("3.5", "3.5 (a fraction)"),
        ("true", "true (a boolean)"),
        ("[3]", "a list"),
        ("{a: 3}", "a mapping"),
        ("three", "'three' (text)"),
        (".inf", ".inf (not finite)"),
        (".nan", ".nan (not finite)"),
        ("0", "0 (a whole number)"),
        ("-1", "-1 (a whole number)"),
    ],
)
def test_yc2_a_wrong_number_is_told_with_its_line_its_type_and_the_wanted_one(
    text: str, got: str
) -> None:
    where, key, message = only(VALID.replace("batch_size: 64", f"batch_size: {text}"))
    assert (where, key) == ("r.yaml:11", "data.batch_size")
    assert f"got {got}; allowed: a whole number, at least 1" in message


def test_a_number_that_is_not_finite_or_of_a_thousand_digits_is_refused_for_a_float() -> None:
    for text in (".inf", ".nan", "1e999", "9" * 1000, "9" * 5000):
        where, key, _ = only(VALID, f"amp.max_scale={text}")
        assert (where, key) == ("command line", "amp.max_scale")


def test_a_wait_for_longer_than_clocks_can_count_is_refused() -> None:
    assert only(VALID, "distributed.timeout_minutes=1e300")[1] == "distributed.timeout_minutes"
    assert load(VALID, "distributed.timeout_minutes=525600")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", True),
        ("Off", False),
        ("yes", True),
        ("NO", False),
        ("False", False),
        ("true", True),
        ('"False"', False),
        ("'false'", False),
        ("FALSE", False),
    ],
)
def test_yc6_booleans_are_read_only_where_a_boolean_is_wanted(text: str, value: bool) -> None:
    assert load(VALID, f"amp.static={text}").recipe.amp.static is value
    assert load(f"{VALID}distributed: {{find_unused_parameters: {text}}}\n").recipe.distributed == (
        load(VALID, f"distributed.find_unused_parameters={value}").recipe.distributed
    )


def test_yc6_on_is_a_key_and_no_is_text() -> None:
    block = load(VALID.replace("split: train", "on: no, off: yes, 1: y")).recipe.data.train
    assert block == {"_target_": "ampctl.data.Digits", "on": "no", "off": "yes", "1": "y"}


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("amp:\n  dtype: bfloat16\n", "amp: on\nlog2:\n", "amp"),
        ("bfloat16", "off", "amp.dtype"),
        ("{max_epochs: 2,", "{compile: 3, max_epochs: 2,", "train.compile"),
    ],
)
def test_yc6_a_boolean_word_in_a_field_of_another_type_is_refused(
    old: str, new: str, key: str
) -> None:
    assert key in [found for _, found, _ in problems(VALID.replace(old, new))]


@pytest.mark.parametrize("key", ["[1, 2]", "{a: 1}", "? [1]\n", "''", "~x: 1\n ? "])
def test_yc6_a_key_that_is_no_name_is_an_error_with_its_line(key: str) -> None:
    where = problems(f"{VALID}{key}: 3\n")[0][0]
    assert where.startswith("r.yaml:")


def test_null_is_the_absence_of_a_value_and_a_section_left_empty_has_its_defaults() -> None:
    loaded = load(f"{VALID}scheduler:\ndistributed:\n", "amp.clip_norm=", "data.eval=null")
    assert loaded.recipe.scheduler is None
    assert loaded.recipe.data.eval is None
    assert loaded.recipe.amp.clip_norm is None
    assert loaded.recipe.distributed.strategy == "ddp"


def test_null_clears_what_an_earlier_layer_has_put_into_a_mapping_or_a_list() -> None:
    given = load(VALID).recipe
    assert given.amp.modules
    assert given.log.trackers
    cleared = load(VALID, "amp.modules=null", "log.trackers=null").recipe
    assert (cleared.amp.modules, cleared.log.trackers) == ({}, ())


# Mistakes


def test_yc3_duplicate_keys_name_both_lines() -> None:
    where, key, message = only(f"{VALID}name: again\n")
    assert (where, key) == ("r.yaml:18", "name")
    assert "at r.yaml:2 and at r.yaml:18" in message


def test_yc3_duplicate_keys_nested_and_in_flow_style() -> None:
    text = VALID.replace("lr: 3e-3,", "lr: 3e-3,\n  lr: 1e-3,").replace(
        "split: test", "split: a\n    split: b"
    )
    told = problems(text)
    assert [(where, key) for where, key, _ in told] == [("r.yaml:11", "split"), ("r.yaml:14", "lr")]
    assert "at r.yaml:13 and at r.yaml:14" in told[1][2]


def test_yc3_merge_keys_stay_legal_and_own_keys_win() -> None:
    text = VALID.replace(
        "train: {_target_: ampctl.data.Digits, split: train}",
        "train: &d {_target_: a.B, split: x, k: 1}",
    )
    text = text.replace("    _target_: ampctl.data.Digits\n", "    <<: *d\n")
    assert load(text).recipe.data.eval == {"_target_": "a.B", "split": "test", "k": 1}
    assert load(text).origins["data.eval.k"] == "r.yaml:7"


@pytest.mark.parametrize(
    ("line", "key", "meant"),
    [
        ("learning_rate: 1e-3", "learning_rate", "optimizer.lr"),
        ("num-epochs: 3", "num-epochs", "train.max_epochs"),
        ("weigth_decay: 0.1", "weigth_decay", "optimizer.weight_decay"),
        ("Optimzer: {}", "Optimzer", "optimizer"),
        ("batch_size: 3", "batch_size", "data.batch_size"),
        (
            "distributed: {timeout_minute: 3}",
            "distributed.timeout_minute",
            "distributed.timeout_minutes",
        ),
        ("checkpoint: {num_steps: 3}", "checkpoint.num_steps", "train.max_steps"),
        ("distributed: {keep_last: 3}", "distributed.keep_last", "checkpoint.keep_last"),
        (
            "distributed: {find_unused_paramters: true}",
            "distributed.find_unused_paramters",
            "distributed.find_unused_parameters",
        ),
    ],
)
def test_yc7_an_unknown_key_names_the_nearest_and_its_section(
    line: str, key: str, meant: str
) -> None:
    where, found, message = only(f"{VALID}{line}\n")
    assert (where, found) == ("r.yaml:18", key)
    assert f"did you mean {meant}?" in message


def test_yc7_an_unknown_key_in_an_override_and_in_an_extended_file(folder: Path) -> None:
    (folder / "base.yaml").write_text(VALID + "mpa: {}\n")
    (folder / "top.yaml").write_text("extends: base.yaml\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe("top.yaml", ["trian.max_steps=3"])
    found = [(p.where, p.key, p.advice) for p in caught.value.problems]
    assert found == [
        ("base.yaml:18", "mpa", "did you mean amp?"),
        ("command line", "trian", "did you mean train?"),
    ]


def test_five_mistakes_in_one_file_are_listed_with_their_five_lines() -> None:
    text = VALID.replace("seed: 3", "seed: -1").replace("bfloat16", "bf16")
    text = text.replace("batch_size: 64", "batch_size: many").replace("split: test", "split: '${x'")
    told = problems(f"{text}wat: 1\n".replace("patience: 3", "patience: 0.5"))
    assert [where for where, _, _ in told] == [
        "r.yaml:3",
        "r.yaml:11",
        "r.yaml:14",
        "r.yaml:16",
        "r.yaml:18",
    ]
    assert "did you mean bfloat16?" in told[2][2]


def test_a_missing_key_says_what_it_is_for_and_shows_a_line() -> None:
    told = {key: message for _, key, message in problems("seed: 1\n")}
    assert set(told) == {"name", "model", "task", "data", "optimizer", "train.max_epochs"}
    assert "optimizer: {_target_: torch.optim.AdamW" in told["optimizer"]
    assert "nn.Module" in told["model"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["train.max_epochs=null"], "train.max_epochs"),
        (["amp.init_scale=0.5"], "amp.init_scale"),
        (["amp.max_scale=1024"], "amp.max_scale"),
        (["data.micro_batch_size=65"], "data.micro_batch_size"),
        (["name=a/b"], "name"),
        (["name=.."], "name"),
        (["scheduler.warmup_steps=3"], "scheduler"),
        (["model._target_=Net"], "model._target_"),
        (["model._target_=[a.B]"], "model._target_"),
        (["model.inner={_target_: 3}"], "model.inner._target_"),
        (["model.inner=[1, {_target_: 'os.system; x'}]"], "model.inner[1]._target_"),
        (["amp.modules[head]=float99"], "amp.modules.head"),
        (["log.trackers=tensorboard"], "log.trackers"),
    ],
)
def test_rules_of_blocks_and_of_several_keys(overrides: list[str], key: str) -> None:
    assert only(VALID, *overrides)[1] == key


def test_several_blocks_have_names_of_letters_digits_and_underscores() -> None:
    def named(name: str) -> str:
        block = "{_target_: torch.optim.SGD, lr: 0.1}"
        several = f"optimizer: {{'{name}': {block}, rest: {block}}}\n"
        return re.sub(r"^optimizer: .*\n", several, VALID, flags=re.MULTILINE)

    for good in ("generator", "G_2"):
        assert good in load(named(good)).recipe.optimizer
    for bad in ("2nd", "a b", "a-b"):
        _, key, message = only(named(bad))
        assert bad in key
        assert f"got the name {bad!r}; allowed: letters, digits and _" in message


def test_a_mapping_in_a_list_of_arguments_needs_no_target() -> None:
    model = "{_target_: ampctl.models.MLP, layers: [{width: 2}, [{width: 3}]]}"
    layers = load(VALID, f"model={model}").recipe.model["layers"]
    assert [dict(layers[0]), dict(layers[1][0])] == [{"width": 2}, {"width": 3}]


def test_a_value_of_more_than_60_characters_is_told_by_its_first_60() -> None:
    for count, told in ((60, "x" * 60), (61, "x" * 60 + "...")):
        assert f"got '{told}' (text)" in only(VALID, f"seed={'x' * count}")[2]


def test_a_key_that_is_wrong_by_itself_gives_one_problem() -> None:
    assert only(VALID, "train.max_epochs=x")[1] == "train.max_epochs"
    assert only(VALID, "amp.min_scale=x", "amp.init_scale=0.5")[1] == "amp.min_scale"


def test_a_key_of_another_section_goes_before_one_that_is_only_alike() -> None:
    assert "did you mean train.max_steps?" in only(VALID, "amp.max_steps=3")[2]


def test_allowed_values_are_named_by_the_type_of_the_key() -> None:
    assert "allowed: true or false or a mapping" in only(VALID, "train.compile=3")[2]
    assert "allowed: a block with a _target_ or null" in only(VALID, "scheduler=3")[2]


def test_thousands_of_unknown_keys_are_told_in_short_and_at_once() -> None:
    text = VALID + "".join(f"key_{i}: 1\n" for i in range(3_000))
    told = problems(text)
    assert len(told) == 21
    assert "2980 more" in told[-1][2]


# Files that are no recipe


@pytest.mark.parametrize(
    ("text", "place", "says"),
    [
        ("name: a\n\tseed: 1\n", ":2:1", "<TAB>seed: 1"),
        ("name: a\nseed: 1\n\t# note\n", ":3:1", "tab"),
        ("a: b: c\n", ":1:5", "quote"),
        ("name: [1, 2\nseed: 1\n", ":2", "bracket"),
        ("name: @x\n", ":1:7", "quote"),
        ("name: 'a\n", ":2:1", "quote"),
        ("name: %x\n", ":1:7", "quote"),
        ("name: *x\n", ":1:7", "anchor"),
        ("", "", "empty"),
        ("# only a comment\n", "", "empty"),
        ("- a\n- b\n", ":1", "a list at the top"),
        ("just text\n", ":1", "a single value"),
        ("a: 1\n---\nb: 2\n", ":2", "one document"),
        ("name: !!python/object/apply:os.system [ls]\n", ":1", "tag"),
        ("name: \x07\n", ":1", "U+0007"),
        ('name: "\\UFFFFFFFF"\n', "", "no character"),
        ('name: "\\ud800"\n', ":1", "surrogate"),
    ],
)
def test_yc8_text_that_is_no_yaml_is_told_with_its_place(text: str, place: str, says: str) -> None:
    where, _, message = problems(text)[0]
    assert where.startswith(f"r.yaml{place}")
    assert says in message


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("name: a\n".encode("utf-16"), "UTF-16"),
        (bytes(range(256)), "UTF-8"),
        (b"\x80\x04\x95pickle", "UTF-8"),
        (b"", "is empty"),
        (b"a: " + b"x" * 1_000_001, "larger than 1,000,000 bytes"),
        (b"\x00\x00\x00", "U+0000"),
    ],
)
def test_yc8_files_that_are_no_text(folder: Path, data: bytes, says: str) -> None:
    (folder / "r.yaml").write_bytes(data)
    with pytest.raises(RecipeError, match=r"^r\.yaml.*" + says.replace("+", r"\+")):
        load_recipe("r.yaml")


def test_yc8_folders_and_missing_files_are_told_with_the_nearest_name(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(VALID)
    (folder / "sub").mkdir()
    with pytest.raises(RecipeError, match="is a folder"):
        load_recipe("sub")
    with pytest.raises(RecipeError, match=r"did you mean recipe\.yaml"):
        load_recipe("recipes.yaml")
    for name in ("", "a\0b", "x" * 300 + ".yaml", "recipe.yaml/x.yaml"):
        with pytest.raises(RecipeError):
            load_recipe(name)


def test_a_byte_order_mark_and_windows_lines_are_read(folder: Path) -> None:
    (folder / "r.yaml").write_bytes(b"\xef\xbb\xbf" + VALID.replace("\n", "\r\n").encode())
    assert load_recipe("r.yaml").recipe == load(VALID).recipe


def test_an_alias_bomb_is_refused_in_words() -> None:
    # Expanded, each would take years or all memory.
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    merges = ["a0: &a0 {x: 1}"]
    merges += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 12)]
    long = ["a: &a " + "x" * 100_000] + [f"b{i}: *a" for i in range(10_000)]
    empty = [line.replace("x", "[]") for line in lines]
    for bomb in (lines, merges, long, empty):
        assert "alias" in only("\n".join(bomb))[2]


@pytest.mark.parametrize("text", ["[" * 100_000, "a: " + "{b: " * 60, "&a [*a]", "a: &a {b: *a}"])
def test_text_that_is_too_deep_is_refused(text: str) -> None:
    assert "nested deeper than 50" in only(text)[2]


# Extends


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)


def test_extends_merges_deeply_and_the_file_itself_wins(folder: Path) -> None:
    (folder / "conf").mkdir()
    write(folder / "conf", base=VALID, mid="extends: base.yaml\nseed: 4\namp: {hysteresis: 2}\n")
    write(folder / "conf", other="amp: {init_scale: 8}\nseed: 5\n")
    write(folder, top="extends: [conf/mid.yaml, conf/other.yaml]\namp: {init_scale: 16}\n")
    loaded = load_recipe("top.yaml", ["amp.hysteresis=3"])
    recipe = loaded.recipe
    assert (recipe.seed, recipe.amp.init_scale, recipe.amp.hysteresis) == (5, 16.0, 3)
    assert recipe.amp.dtype == "bfloat16"
    assert loaded.origins["amp.init_scale"] == "top.yaml:2"
    assert loaded.origins["seed"] == "conf/other.yaml:2"
    assert loaded.origins["amp.dtype"] == "conf/base.yaml:14"
    assert loaded.origins["amp.hysteresis"] == "command line"
    assert loaded.origins["amp.growth_factor"] == "default"
    assert "amp.dtype" in loaded.explicit
    assert "amp.growth_factor" not in loaded.explicit


def test_a_block_whose_target_changes_starts_empty(folder: Path) -> None:
    write(
        folder,
        base=VALID,
        sgd="extends: base.yaml\noptimizer: {_target_: torch.optim.SGD, momentum: 0.9}\n",
    )
    write(folder, same="extends: base.yaml\noptimizer: {_target_: torch.optim.AdamW, lr: 1}\n")
    assert load_recipe("sgd.yaml").recipe.optimizer == {
        "_target_": "torch.optim.SGD",
        "momentum": 0.9,
    }
    assert load_recipe("same.yaml").recipe.optimizer["betas"] == [0.9, 0.99]
    assert load(VALID, "optimizer._target_=torch.optim.SGD").recipe.optimizer == {
        "_target_": "torch.optim.SGD"
    }


def test_extends_in_a_circle_is_refused_with_the_chain(folder: Path) -> None:
    write(folder, a="extends: b.yaml\n", b="extends: c.yaml\n", c="extends: a.yaml\n")
    with pytest.raises(
        RecipeError, match=r"c\.yaml:1: extends: .*a\.yaml -> b\.yaml -> c\.yaml -> a\.yaml"
    ):
        load_recipe("a.yaml")


def test_all_faults_of_extended_files_are_told_at_once(folder: Path) -> None:
    write(folder, top="extends: [nope.yaml, bad.yaml]\nname: a\nname: b\n", bad="a: b: c\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe("top.yaml")
    assert sorted(p.where for p in caught.value.problems) == [
        "bad.yaml:1:5",
        "top.yaml:1",
        "top.yaml:3",
    ]


# Overrides


def test_overrides_take_dotted_keys_list_items_and_flow_values() -> None:
    loaded = load(
        VALID,
        "optimizer.betas[0]=0.5",
        "optimizer.betas.1=.75",
        "amp.modules[layers.11.*]=bfloat16",
        "amp.modules['head']=float32",
        "log.trackers=[wandb, mlflow]",
        'model.note="a: b"',
        "model.path=s3://x=y",
        "model.star=*x",
        "scheduler={_target_: a.B, x: {y: 1e-2}}",
        "scheduler.x.z=on",
    )
    recipe = loaded.recipe
    assert recipe.optimizer["betas"] == [0.5, 0.75]
    assert recipe.amp.modules == {"layers.11.*": "bfloat16", "head": "float32"}
    assert recipe.log.trackers == ("wandb", "mlflow")
    assert (recipe.model["note"], recipe.model["path"], recipe.model["star"]) == (
        "a: b",
        "s3://x=y",
        "*x",
    )
    assert recipe.scheduler == {"_target_": "a.B", "x": {"y": 0.01, "z": "on"}}
    assert loaded.origins["optimizer.betas[0]"] == "command line"
    assert loaded.origins["amp.modules[layers.11.*]"] == "command line"


def test_a_target_override_comes_before_the_arguments_whatever_the_order() -> None:
    first = load(VALID, "optimizer.momentum=0.9", "optimizer._target_=torch.optim.SGD")
    last = load(VALID, "optimizer._target_=torch.optim.SGD", "optimizer.momentum=0.9")
    assert first.recipe.optimizer == last.recipe.optimizer
    assert first.recipe.optimizer == {"_target_": "torch.optim.SGD", "momentum": 0.9}


@pytest.mark.parametrize(
    "override",
    [
        "seed",
        "=3",
        "a..b=3",
        "a[=3",
        "optimizer.betas[2]=1",
        "seed[0]=1",
        "name=[1",
        'name="x',
        "name={a: b: c}",
    ],
)
def test_an_override_that_cannot_be_read_is_a_problem_of_the_command_line(override: str) -> None:
    told = problems(VALID, override)
    assert {where.split(":")[0] for where, _, _ in told} == {"command line"}


# Interpolation


def test_interpolation_keeps_types_and_reads_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATE", "1e-3")
    text = VALID.replace(
        "lr: 3e-3", "lr: '${amp.growth_factor}', eps: '${optimizer.lr}', tag: '007'"
    )
    text = text.replace("name: digits", "name: run-${seed}-${model.num_classes}")
    evaluation = r"""
    split: ${..train.split}
    lr: ${oc.env:RATE}
    no: ${oc.env:NOPE,0.5}
    quoted: '${oc.env:RATE}'
    tag: ${optimizer.tag}
    literal: 'a \${b}'
    block: ${optimizer.betas}"""
    write(folder, r=text.replace("\n    split: test", evaluation))
    recipe = load_recipe("r.yaml").recipe
    assert recipe.name == "run-3-10"
    assert recipe.optimizer["lr"] == recipe.optimizer["eps"] == 2.0
    assert recipe.data.eval == {
        "_target_": "ampctl.data.Digits",
        "split": "train",
        "lr": 1e-3,
        "no": 0.5,
        "quoted": "1e-3",
        "tag": "007",
        "literal": "a ${b}",
        "block": [0.9, 0.99],
    }
    again = load_recipe_text(folder, load_recipe("r.yaml").text)
    assert again.recipe == recipe
    assert load(load_recipe("r.yaml").text).recipe == recipe


def load_recipe_text(folder: Path, text: str) -> LoadedRecipe:
    (folder / "again.yaml").write_text(text)
    return load_recipe("again.yaml")


def test_every_interpolation_that_fails_is_a_problem_of_its_line(folder: Path) -> None:
    text = VALID.replace(
        "split: test", "split: ${nope}\n    a: ${oc.env:NOPE_NOPE}\n    b: ${\n    c: ${data}"
    )
    write(folder, r=text.replace("seed: 3", "seed: ${seed}"))
    with pytest.raises(RecipeError) as caught:
        load_recipe("r.yaml")
    assert [(p.where, p.key) for p in caught.value.problems] == [
        ("r.yaml:3", "seed"),
        ("r.yaml:10", "data.eval.split"),
        ("r.yaml:11", "data.eval.a"),
        ("r.yaml:12", "data.eval.b"),
        ("r.yaml:13", "data.eval.c"),
    ]


def test_a_stored_recipe_reads_no_environment_and_no_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "token")
    assert load(VALID.replace("split: test", "split: ${oc.env:SECRET}")).recipe.data.eval == {
        "_target_": "ampctl.data.Digits",
        "split": "${oc.env:SECRET}",
    }
    write(folder, base="seed: 9\n")
    assert only(f"{VALID}extends: base.yaml\n")[1] == "extends"
    assert only(VALID, "name=${oc.env:SECRET}")[0] == "command line"


MODEL = "model: {_target_: ampctl.models.ConvNet, "
NAME = "name: digits"
ATTACKS: dict[str, tuple[str, str]] = {
    "environment": (NAME, "name: ${oc.env:SECRET}"),
    "escaped environment": (NAME, r"name: \${oc.env:SECRET}"),
    "environment escaped twice": (NAME, r"name: \\${oc.env:SECRET}"),
    "environment in environment": (NAME, "name: ${${oc.env:SECRET}}"),
    "environment in a name": (MODEL, f"{MODEL}'${{oc.env:SECRET}}': 1, "),
    "environment in a target": (MODEL, "model: {_target_: '${oc.env:SECRET}.x', "),
    "environment as a number": ("seed: 3", "seed: ${oc.env:SECRET}"),
    "decoded": (MODEL, MODEL + "x: '${oc.decode:${oc.env:SECRET}}', "),
    "created": (MODEL, MODEL + "x: '${oc.create:{_target_: os.system}}', "),
    "of itself": (NAME, "name: ${name}"),
    "a circle": (MODEL, MODEL + "x: '${model.y}', y: '${model.x}', "),
    "a mapping of itself": (MODEL, "model: &m {_target_: a.b, x: *m, "),
    "merged with itself": (MODEL, "model: &m {_target_: a.b, <<: *m, "),
    "merged with a number": (MODEL, MODEL + "<<: [{x: 1}, 3], "),
    "hexadecimal": ("seed: 3", "seed: 0x" + "F" * 3999),
    "hexadecimal in a block": (MODEL, MODEL + "x: 0x" + "F" * 3500 + ", "),
    "octal in a block": (MODEL, MODEL + "x: 0o" + "7" * 3999 + ", "),
    "hexadecimal epochs": ("max_epochs: 2", "max_epochs: 0x" + "F" * 3999),
    "decimal epochs": ("max_epochs: 2", "max_epochs: " + "9" * 3999),
    "no number": ("seed: 3", "seed: .nan"),
    "half a pair": (NAME, r'name: "\ud800"'),
    "half a pair, raw": (NAME, "name: \ud800"),
    "half a pair as a name": (MODEL, MODEL + r'"\udfff": 1, '),
    "nothing": (NAME, r'name: "\0"'),
    "nothing, raw": (NAME, "name: a\0b"),
    "no character": (NAME, r'name: "\UFFFFFFFF"'),
    "from right to left": (NAME, r'name: "\u202egpj"'),
    "a name as a list": (NAME, f"? [a]\n: 1\n{NAME}"),
    "a name of 10 MB": (MODEL, f"{MODEL}{'k' * 10_000_000}: 1, "),
    "a name of 900 kB": (MODEL, f"{MODEL}{'k' * 900_000}: 1, "),
    "an object": (MODEL, "model: !!python/object/new:os.system [x]\nx: {"),
    "a name of Python": (NAME, "name: !!python/name:os.system"),
    "a tag by another name": (
        NAME,
        f"%TAG ! tag:yaml.org,2002:python/\n---\n{NAME} !name:os.system",
    ),
    "a file": (NAME, "name: !include /etc/passwd"),
    "binary": (NAME, "name: !!binary aGVsbG8="),
    "a set": (MODEL, "model: !!set {_target_, "),
    "a target of 200 kB": (MODEL, f"model: {{_target_: {'a.' * 100_000}b, "),
    "a target as a list": (MODEL, "model: {_target_: [os.system], "),
    "a glob": ('"layers.11.*"', '"[' + "*a" * 5000 + '"'),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_stored_recipe_that_attacks_is_literal_or_refused(
    attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "token")
    monkeypatch.setenv("token", "token")
    old, new = ATTACKS[attack]
    assert VALID.count(old) == 1
    text = VALID.replace(old, new)
    try:
        told = load(text).text
    except RecipeError as error:
        told = f"{error}"
    else:
        assert load(told).recipe == load(text).recipe
    assert "token" not in told


# What is written out


def test_the_resolved_text_holds_every_key_and_reads_back_to_the_same() -> None:
    loaded = load(VALID)
    again = load(loaded.text)
    assert (again.recipe, again.text, again.digest) == (loaded.recipe, loaded.text, loaded.digest)
    assert yaml.safe_load(loaded.text)["checkpoint"]["keep_last"] == 3
    assert set(loaded.origins.values()) <= {"default"} | {f"r.yaml:{i}" for i in range(1, 19)}
    assert loaded.digest != load(VALID, "seed=4").digest


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=12)
    | st.sampled_from(
        [
            "1e4",
            "no",
            "~",
            "007",
            "${a}",
            "\\${a}",
            "<<",
            "- x",
            "a: b",
            "0x1",
            "=",
            "\ufeff",
            "\x85",
        ]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(min_size=1, max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=80)
@given(values=st.dictionaries(st.text("abc", min_size=1), PLAIN, max_size=4))
def test_any_plain_values_survive_being_written_and_read(values: dict[str, Any]) -> None:
    block = {"_target_": "a.B", **values}
    text = VALID.replace("{_target_: ampctl.models.ConvNet, num_classes: 10}", "null")
    text = text.replace("model: null\n", "") + dump({"model": block})
    loaded = load(text)
    assert loaded.recipe.model == block
    again = load(loaded.text)
    assert (again.recipe, again.text) == (loaded.recipe, loaded.text)


@settings(max_examples=300)
@given(text=st.text("\\${}ab.:", max_size=12))
def test_escaped_text_is_literal_to_omegaconf_and_to_us(text: str) -> None:
    from omegaconf import OmegaConf

    assert unescape(escape(text)) == text
    assert OmegaConf.create({"x": escape(text)}).x == text


@given(value=st.floats(allow_nan=False) | st.integers())
def test_any_number_python_writes_is_read_back(value: float) -> None:
    if value not in (float("inf"), float("-inf")):
        assert scalar(repr(value)) == value
        assert type(scalar(repr(value))) is type(value)


# Mutations


FRAGMENTS = [
    "\t",
    "  ",
    "\n",
    ":",
    ": ",
    "- ",
    "[",
    "]",
    "{",
    "}",
    '"',
    "'",
    "&a ",
    "*a",
    "<<: ",
    "? ",
    "|\n",
    ">",
    "#",
    "!!",
    "!",
    "%",
    "@",
    "`",
    "${",
    "${seed}",
    "}",
    "---\n",
    "...",
    "~",
    "null",
    "1e4",
    "\0",
    "\u2028",
    "\ud7ff",
    "é",
    "\\",
    "_target_",
    "extends: ",
    "\x85",
    "-1",
    ".inf",
    '"\\U00110000"',
]


@st.composite
def mutated(draw: st.DrawFn) -> str:
    text = VALID
    for _ in range(draw(st.integers(1, 4))):
        lines = text.split("\n")
        kind = draw(
            st.sampled_from(["delete", "insert", "replace", "indent", "swap", "drop", "twice"])
        )
        at = draw(st.integers(0, max(len(text) - 1, 0)))
        row = draw(st.integers(0, len(lines) - 1))
        other = draw(st.integers(0, len(lines) - 1))
        fragment = draw(st.sampled_from(FRAGMENTS) | st.characters(codec="utf-8"))
        if kind == "delete":
            text = text[:at] + text[at + draw(st.integers(1, 8)) :]
        elif kind == "insert":
            text = text[:at] + fragment + text[at:]
        elif kind == "replace":
            text = text[:at] + fragment + text[at + 1 :]
        else:
            if kind == "indent":
                lines[row] = draw(st.sampled_from([" ", "  ", "\t", "    "])) + lines[row]
            elif kind == "swap":
                lines[row], lines[other] = lines[other], lines[row]
            elif kind == "drop":
                del lines[row]
            else:
                lines.insert(other, lines[row])
            text = "\n".join(lines)
    return text


@settings(max_examples=250)
@given(text=mutated())
def test_any_mutation_of_a_recipe_is_loaded_or_told_in_words(text: str) -> None:
    loads_or_tells(text)


@pytest.mark.slow
@settings(max_examples=6000)
@given(text=mutated())
def test_thousands_of_mutations_are_loaded_or_told_in_words(text: str) -> None:
    loads_or_tells(text)


def loads_or_tells(text: str) -> None:
    try:
        loaded = load(text)
    except RecipeError as error:
        told = error.problems
    else:
        told = ()
        assert load(loaded.text).recipe == loaded.recipe
    assert all(problem.message for problem in told)


@settings(max_examples=100)
@given(text=mutated(), override=st.text(max_size=12) | mutated())
def test_any_mutation_of_a_file_and_an_override_is_loaded_or_told_in_words(
    tmp_path_factory: pytest.TempPathFactory, text: str, override: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.yaml"
    path.write_bytes(text.encode())
    try:
        loaded = load_recipe(path, [f"model.x={override}", override])
    except RecipeError:
        return
    assert load(loaded.text).recipe == loaded.recipe


# Built-in recipes, the JSON Schema and imports


def test_a_built_in_recipe_is_found_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "built").mkdir()
    (folder / "built" / "tiny.yaml").write_text(VALID)
    monkeypatch.setattr(builtin, "_folder", lambda: folder / "built")
    assert builtin.builtin_names() == ["tiny"]
    assert builtin.describe("tiny") == "a small recipe"
    loaded = load_recipe("tiny")
    assert loaded.recipe.name == "digits"
    assert loaded.origins["name"] == "tiny:2"
    with pytest.raises(RecipeError, match="did you mean tiny"):
        load_recipe("tiyn")
    with pytest.raises(UsageError, match="did you mean tiny"):
        builtin.builtin_path("tiyn")
    (folder / "mine.yaml").write_text("extends: tiny\nseed: 8\n")
    assert load_recipe("mine.yaml").recipe.seed == 8


def test_every_built_in_recipe_loads() -> None:
    for name in builtin.builtin_names():
        assert load_recipe(name).recipe.name


def test_the_json_schema_has_types_limits_choices_defaults_and_help() -> None:
    schema = json_schema()
    amp = schema["properties"]["amp"]
    assert amp["additionalProperties"] is False
    assert amp["properties"]["backoff_factor"]["default"] == 0.5
    assert {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1} in amp["properties"][
        "backoff_factor"
    ]["anyOf"]
    assert amp["properties"]["nonfinite"]["anyOf"][0]["enum"] == ["skip", "stop"]
    assert "float32" in f"{amp['properties']['modules']}"
    assert schema["$defs"]["block"]["additionalProperties"] is True
    assert "batch_size" in schema["then"]["properties"]["data"]["required"]
    assert set(load(VALID).origins) >= {"seed"}
    assert all(entry["description"] for entry in amp["properties"].values())


def test_nothing_in_recipe_imports_torch() -> None:
    names = ["load", "target", "trust", "builtin", "json_schema"]
    code = "import sys; " + "".join(f"import ampctl.recipe.{name}; " for name in names)
    result = subprocess.run(
        [sys.executable, "-c", f"{code}print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "False"
