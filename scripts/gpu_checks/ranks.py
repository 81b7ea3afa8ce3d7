"""Checks with several ranks: DDP and FSDP2 that are saved, killed, resumed and evaluated.

Two GPUs take a rank each, over NCCL. One takes both, over gloo, where each rank passes for the only
one of its machine; NCCL refuses that, and is tried with one rank.
"""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from ampctl.checkpoint import disk, sharded
from ampctl.distributed.ranks import ALONE, Writers
from ampctl.distributed.shard import shard_, whole
from ampctl.state_dict.copies import snapshot
from ampctl.state_dict.host_memory import HostMemory
from gpu_checks import parts
from gpu_checks.check import Check, CheckSkipped, Finding, Setup, first_difference, require
from gpu_checks.processes import DEADLINE_S, end, kill_after, said, start

NUM_STEPS, SAVED_EVERY, KILLED_AFTER = 24, 4, 8
# What gloo says of an operation that it has not for tensors on a GPU.
UNSUPPORTED = ("does not support", "not supported", "not implemented", "No backend type")


def two_ranks(strategy: str) -> Check:
    """Return the check that a job of two ranks loses nothing when one of them is killed."""
    return partial(_two_ranks, strategy)


def _two_ranks(strategy: str, setup: Setup) -> Finding:
    several = setup.device.type == "cpu" or torch.cuda.device_count() > 1
    text = parts.recipe_text(
        setup.device if setup.device.type == "cpu" else torch.device("cuda"),
        model=parts.target(parts.SmallNet, dropout=0.1),
        data={
            "train": parts.target(parts.Images, size=48, bad=[5], pause_s=0.01),
            "eval": parts.target(parts.Images, size=7),
            "batch_size": 8,
        },
        amp={"dtype": "float16", "clip_norm": 1.0, "init_scale": 1024.0, "growth_interval": 5},
        train={"max_steps": NUM_STEPS, "ema_decay": 0.9, "deterministic": True},
        checkpoint={"every_steps": SAVED_EVERY},
        distributed={"strategy": strategy, "backend": "auto" if several else "gloo"},
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "recipe.yaml").write_text(text, encoding="utf-8")
        job = partial(_job, folder, several=several)
        try:
            _end_all(job("train", "recipe.yaml", "--run-dir", "whole", "--quiet"), folder)
        except AssertionError as error:
            if not several and any(words in f"{error}" for words in UNSUPPORTED):
                raise CheckSkipped(f"gloo cannot, with both ranks on one GPU: {error}") from error
            raise
        cut = job("train", "recipe.yaml", "--run-dir", "cut", "--quiet")
        try:
            killed_at = kill_after(cut[-1], folder / "cut", KILLED_AFTER, of=_second_rank)
            codes = [process.wait(DEADLINE_S) for process in cut]
        finally:
            for process in cut:
                process.kill()
                process.wait()
        require(any(codes), "the job ended well although a rank was killed")
        _end_all(job("resume", "cut", "--quiet"), folder)
        exported = []
        for run in ("cut", "whole"):
            _end_all([start(folder, "export", run, f"{run}.pt")], folder)
            path = folder / f"{run}.pt"
            exported.append(torch.load(path, map_location="cpu", weights_only=True))
        trained = _last_evaluation(folder / "whole")
        evaluated = _evaluated(folder)
    difference = first_difference(*exported)
    require(difference is None, f"killed after step {killed_at}: {difference} (resumed, whole)")
    apart = abs(evaluated - trained) / (1 + abs(trained))
    require(apart < 1e-2, f"`ampctl eval`: loss {evaluated:g}, in training {trained:g}")
    how = "over NCCL" if several and setup.device.type == "cuda" else "over gloo"
    return Finding(
        f"two ranks {how}: one killed after step {killed_at}, resumed, exported and evaluated: the "
        "weights of an undisturbed job, to the bit",
        {"killed_after_step": killed_at, "backend": how, "evaluated": evaluated},
    )


def _job(folder: Path, *arguments: str, several: bool) -> list[subprocess.Popen[bytes]]:
    """Start two ranks: by ampctl's launcher, or by hand as if each had a machine of its own."""
    if several:
        return [start(folder, *arguments, "--nproc-per-node", "2")]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [start(folder, *arguments, variables={**place, "RANK": rank}) for rank in "01"]


def _second_rank(process: subprocess.Popen[bytes]) -> int:
    """Return the process to kill: rank 1, which the launcher has started, or was started here."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for child in map(int, children.read_text(encoding="utf-8").split()):
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if b"RANK=1" in variables:
            return child
    return process.pid


def _end_all(processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    try:
        for process in processes:
            end(process, folder)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _last_evaluation(run_dir: Path) -> float:
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [row["eval/loss"] for row in map(json.loads, lines) if row["event"] == "eval"]
    return float(losses[-1])


def _evaluated(folder: Path) -> float:
    process = start(folder, "eval", "whole", "--trust", "--json", stdout=subprocess.PIPE)
    out, _ = process.communicate(timeout=DEADLINE_S)
    require(
        process.returncode == 0, f"`ampctl eval` ended with {process.returncode}: {said(folder)}"
    )
    return float(json.loads(out)["metrics"]["eval/loss"])


def one_rank(setup: Setup) -> Finding:
    """Check that FSDP2 of one rank, over the device's own backend, steps, saves and reads back."""
    device = setup.device
    backend = f"cpu:gloo,{device.type}:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1,
        device_id=device if device.type == "cuda" and device.index is not None else None,
    )  # fmt: skip
    try:
        return _one_rank(device)
    finally:
        dist.destroy_process_group()


def _one_rank(device: torch.device) -> Finding:
    torch.manual_seed(parts.SEED)
    model = parts.SmallNet()
    shard_(model, ALONE, device, ())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    images, labels = parts.moved(parts.image_batch(6), device)
    memory, writers = HostMemory(), Writers(ALONE, 1.0, device)
    rest = {**parts.build_state(device).state_dict(), "data": {}, "recipe": "", "environment": {}}
    for step in range(2):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            F.cross_entropy(model(images).float(), labels).backward()
        optimizer.step()
        shards: dict[str, Any] = {}
        payload = snapshot({**rest, "model": model.state_dict()}, shards=shards, memory=memory)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"step-0000000{step + 1}.dist")
            written = sharded.write(path, payload, shards, writers)
            disk.publish(disk.temporary(path), path)
            found = sharded.read(path, [written.sha256])
            sharded.fill(found, path)
        expected = {name: whole(value).cpu() for name, value in model.state_dict().items()}
        difference = first_difference(found["model"], expected)
        require(difference is None, f"step {step + 1}: {difference} (read back, trained)")
    return Finding(f"{len(shards)} sharded tensors written in parts and read back, to the bit")
