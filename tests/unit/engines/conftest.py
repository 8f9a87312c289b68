"""One tiny base for the engine's tests, and rigs that close themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.decoders import BF16, tiny_decoder
from support.learning import Rig
from support.threads import one_thread
from tithe.models import Decoder

MakeRig = Callable[..., Rig]


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="package")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Untied, because a tied random head mostly repeats its input."""
    return tiny_decoder(tmp_path_factory.mktemp("base") / "m", "llama", BF16, tie_word_embeddings=False)


@pytest.fixture
def rigs(decoder: Decoder, tmp_path: Path) -> Iterator[MakeRig]:
    """`rigs(**engine options)` makes a rig on the shared base; `threaded=True` gives it a real lane."""
    with ExitStack() as stack:
        made: list[Rig] = []

        def make(*, threaded: bool = False, **options: Any) -> Rig:
            rig = Rig(decoder, tmp_path / f"rig{len(made)}", options=options, threaded=threaded)
            made.append(stack.enter_context(rig))
            return rig

        yield make


@pytest.fixture
def rig(rigs: MakeRig) -> Rig:
    return rigs()
