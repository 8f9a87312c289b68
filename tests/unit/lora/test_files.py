"""Safetensors straight from memory, and what a disk's refusal looks like."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tithe.lora import save_tensors

LIMITED = """
import resource, signal, sys, torch
from pathlib import Path
from tithe.lora import save_tensors
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    save_tensors({"a": torch.zeros(4096)}, Path(sys.argv[1]))
except OSError as error:
    print(error.errno)
"""


def test_a_file_holds_what_was_given(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(2, dtype=torch.bfloat16)}
    save_tensors(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    again = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


def test_a_refusing_disk_is_an_os_error_with_its_number(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        save_tensors({"a": torch.zeros(1)}, tmp_path / "absent" / "x")
    assert caught.value.errno == errno.ENOENT
    done = subprocess.run([sys.executable, "-c", LIMITED, tmp_path / "x"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(errno.EFBIG)
