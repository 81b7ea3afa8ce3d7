"""Facts of torch that ampctl's check before training rests on, and that check itself."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F

from gpu_checks import parts
from gpu_checks.check import Finding, Setup, require
from gpu_checks.processes import environment


def bce(setup: Setup) -> Finding:
    """Check that CUDA autocast refuses BCELoss, and that ``ampctl check`` tells so beforehand."""
    device = setup.device
    probabilities = torch.full((4,), 0.5, device=device)
    refused = ""
    with torch.autocast(device.type, dtype=torch.float16):
        try:
            F.binary_cross_entropy(probabilities, torch.ones(4, device=device))
        except RuntimeError as error:
            refused = f"{error}".strip().splitlines()[0]
    expected = device.type == "cuda"
    require(
        bool(refused) == expected,
        f"binary_cross_entropy under autocast on {device.type}: {refused or 'no error'}",
    )
    text = parts.recipe_text(
        device,
        model=parts.target(parts.Probability),
        task=parts.target(parts.BinaryTask),
        data={"train": parts.target(parts.Images), "batch_size": 8},
        amp={"dtype": "float16"},
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "recipe.yaml").write_text(text, encoding="utf-8")
        ended = subprocess.run(
            [sys.executable, "-m", "ampctl", "check", "recipe.yaml"],
            cwd=folder,
            env=environment(Path(folder)),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    code = 2 if expected else 0
    said = (ended.stderr.strip() or ended.stdout.strip()).splitlines()[-1:]
    require(
        ended.returncode == code,
        f"`ampctl check` of a recipe with BCELoss ended with {ended.returncode}, expected {code}: "
        + "".join(said),
    )
    return Finding(
        f"torch {'refuses' if refused else 'takes'} BCELoss under autocast on {device.type}; "
        f"`ampctl check` ends with {code}",
        {"torch": refused, "exit_code": ended.returncode, "said": ended.stderr},
    )


def bfloat16_gradients(setup: Setup) -> Finding:
    """Check that ampctl guards bfloat16 gradients; report whether torch's own scaler takes them."""
    device = setup.device
    weight = torch.nn.Parameter(torch.ones(4, device=device, dtype=torch.bfloat16))
    scaler = torch.amp.GradScaler(device.type)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.float().sum()).backward()
    refused = ""
    try:
        scaler.unscale_(optimizer)
    except (RuntimeError, ValueError) as error:
        refused = f"{error}".strip().splitlines()[0]
    good = parts.moved(parts.image_batch(6), device)
    for optimizer_name, options in (("plain", {"fused": False}), ("fused", parts.FUSED)):
        state = parts.build_state(
            device,
            model=parts.target(parts.HalfNet),
            optimizer=parts.ADAMW | options,
            amp={"dtype": "bfloat16", "clip_norm": 1.0},
        )
        reports = parts.run(state, [[good], [parts.spoiled(good)], [good]])
        skipped = [report.skipped for report in reports]
        require(
            skipped == [False, True, False],
            f"AdamW, {optimizer_name}: a good, a bad and a good batch: skipped is {skipped}",
        )
    return Finding(
        "ampctl skips the bad step and no other; torch's GradScaler "
        + (f"refuses bfloat16 gradients: {refused}" if refused else "takes bfloat16 gradients"),
        {"grad_scaler": refused},
    )
