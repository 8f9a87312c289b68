"""Loading takes what stays, one tensor's pages and bounded scratch: measured in a process of its own.

The peak of the process (VmHWM, its pages of the file included) over what it held before, when code and kernels were in
memory. Measured: 5 to 16 MB above what stays and the largest tensor together, and 30 MB once for a GGUF file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints_packed import build_large, build_packed

SCRATCH_BYTES = 32 * 2**20
CLEAR = Path("/proc/self/clear_refs")
MEASURE = """
import json, sys
from pathlib import Path
from tithe.arch import Shard, read_checkpoint
from tithe.models.loader import load_model
from tithe.models.options import ModelOptions
from tithe.quant import set_threads
from tithe.utils.memory import release_unused

def held(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))

set_threads(1)
small, large, quantize, ranks = sys.argv[1:]
options = ModelOptions(quantize=quantize)
load_model(read_checkpoint(small), options)
release_unused()
before = held("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
checkpoint = read_checkpoint(large)
decoder = load_model(checkpoint, options, Shard(0, int(ranks)))
peak = held("VmHWM") - before
release_unused()
print(json.dumps({
    "peak": peak, "after": held("VmRSS") - before, "resident": decoder.resident_bytes(), "file": decoder.file_bytes,
    "largest": max(entry.n_bytes for entry in checkpoint.tensors.values()),
}))
"""
WIDE = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
CASES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "bf16": ("llama", None, WIDE | {"intermediate_size": 4096, "vocab_size": 32768, "num_hidden_layers": 4}),
    "mixture": ("qwen3_moe", "int4", WIDE | {"moe_intermediate_size": 512, "num_experts": 32, "num_hidden_layers": 8}),
}
LEAST_BYTES = 200 * 10**6


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """A tiny and a large checkpoint of each case."""
    folder = tmp_path_factory.mktemp("memory")
    made: dict[str, tuple[Path, Path]] = {}
    for name, (architecture, method, sizes) in CASES.items():
        tiny = build_packed(folder / f"{name}-tiny", architecture, method)
        made[name] = tiny, build_large(folder / name, architecture, method, **sizes)
    return made


@pytest.mark.skipif(not CLEAR.exists(), reason="the peak of a process can only be reset on Linux")
@pytest.mark.parametrize(
    ("name", "quantize", "ranks"),
    [("bf16", "none", 1), ("bf16", "int4", 1), ("mixture", "none", 1), ("mixture", "none", 4)],
)
def test_the_peak_is_what_stays_and_one_tensor(
    paths: dict[str, tuple[Path, Path]], name: str, quantize: str, ranks: int
) -> None:
    tiny, large = paths[name]
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tiny), str(large), quantize, str(ranks)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")},
    )
    found = json.loads(run.stdout)
    assert found["file"] > LEAST_BYTES / ranks
    assert found["peak"] < found["resident"] + found["largest"] + SCRATCH_BYTES, found
    assert found["after"] < found["resident"] + SCRATCH_BYTES / 2, found
