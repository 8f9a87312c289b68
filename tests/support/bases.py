"""Tiny bases and exact products, as the tests of trainer and reward models share them: fixtures for their conftest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from support.checkpoints import build_hf
from support.decoders import BF16, FP32
from support.threads import one_thread
from tithe.arch import read_checkpoint
from tithe.models import Decoder, load_model


@pytest.fixture(scope="package", autouse=True)
def one_exact_thread() -> Iterator[None]:
    """One thread, and torch's float32 products without shortcuts."""
    products = cast("Any", torch.backends.mkldnn).matmul
    precision, products.fp32_precision = products.fp32_precision, "ieee"
    with one_thread():
        yield
    products.fp32_precision = precision


@pytest.fixture(scope="package")
def base_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3: head norms, untied head, so that every path of the backward is used."""
    return build_hf(tmp_path_factory.mktemp("base") / "m", "qwen3", dtype="float32")


@pytest.fixture(scope="package")
def exact(base_path: Path) -> Decoder:
    """The base in float32 throughout."""
    return load_model(read_checkpoint(base_path), FP32)


@pytest.fixture(scope="package")
def decoder(base_path: Path) -> Decoder:
    """The base in bf16, the usual mode."""
    return load_model(read_checkpoint(base_path), BF16)
