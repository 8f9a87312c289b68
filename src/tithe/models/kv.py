"""Cached keys and values in pages of 16 positions, and who owns which page."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tithe.arch import ArchSpec, kv_bytes_per_token
from tithe.errors import EngineError
from tithe.models.attention_kernels import PAGE, copy_slots
from tithe.models.latent_kernels import copy_positions
from tithe.quant import Launch
from tithe.utils.memory import give_back


class KVPages:
    """Keys [pages, L, Hkv, D, 16] and values [pages, L, Hkv, 16, D] of one dtype.

    In latent attention `keys` is [pages, L, 16, C + E], latents and rotated keys of all heads together, and `values`
    are the same latents once more (a view).

    A page holds all layers: memory is touched by the page that is used, also where the system gives it out in large
    pieces.
    """

    def __init__(self, spec: ArchSpec, pages: int, dtype: torch.dtype) -> None:
        shape = (pages, spec.n_layers)
        self.pages, self._latent = pages, spec.latent
        if spec.latent is not None:
            self.keys = _lazy_zeros((*shape, PAGE, spec.latent.cached_per_token), dtype)
            self.values = self.keys[..., : spec.latent.kv_lora_rank]
            self._stored = (self.keys,)
            return
        self.keys = _lazy_zeros((*shape, spec.n_kv_heads, spec.head_dim, PAGE), dtype)
        self.values = _lazy_zeros((*shape, spec.n_kv_heads, PAGE, spec.head_dim), dtype)
        self._stored = (self.keys, self.values)

    @staticmethod
    def page_bytes(spec: ArchSpec, dtype: torch.dtype) -> int:
        """Bytes of one page over all layers, keys and values."""
        return PAGE * kv_bytes_per_token(spec, dtype.itemsize)

    @property
    def blocks(self) -> int:
        """Blocks (one layer, one kv head; latents: one layer) from one page to the next."""
        return self.keys.shape[1] * (1 if self._latent is not None else self.keys.shape[2])

    def addresses(self, layer: int) -> tuple[int, int]:
        """Where the keys and the values of a layer begin in page 0."""
        return self.keys[0, layer].data_ptr(), self.values[0, layer].data_ptr()

    @property
    def n_bytes(self) -> int:
        """Bytes when every page is in use."""
        return sum(t.numel() * t.element_size() for t in self._stored)

    def give_back(self, pages: list[int]) -> None:
        """Return the memory of pages that nobody holds; they are zeros when they are used again."""
        ordered = sorted(pages)
        starts = [i for i, page in enumerate(ordered) if i == 0 or page != ordered[i - 1] + 1]
        for i, j in zip(starts, [*starts[1:], len(ordered)], strict=True):
            for t in self._stored:
                stride = t.stride(0) * t.element_size()
                give_back(t.data_ptr() + ordered[i] * stride, (j - i) * stride)

    def fork(self, sources: list[int], targets: list[int], slots: list[int]) -> None:
        """Copy the first slots of whole pages, page by page, in every layer."""
        if sources:
            source, target, count = (torch.tensor(x, dtype=torch.int32) for x in (sources, targets, slots))
            self._copy(source, target, count, 0, self.keys.shape[1]).run()

    def fork_step(self, layer: int, source: Tensor, target: Tensor, slots: Tensor) -> Launch:
        """A launch that does the same in one layer; int32 lists."""
        return self._copy(source, target, slots, layer, 1)

    def _copy(self, source: Tensor, target: Tensor, slots: Tensor, first: int, layers: int) -> Launch:
        if self._latent is not None:
            return self._copy_latents(source, target, slots, first, layers)
        kv_heads, dim = self.keys.shape[2:4]
        layer = kv_heads * dim * PAGE * self.keys.element_size()
        args = [source.data_ptr(), target.data_ptr(), slots.data_ptr(), kv_heads, dim, layers]
        args += [layer * self.keys.shape[1], layer, *self.addresses(first), int(self.keys.dtype == torch.bfloat16)]
        return copy_slots.bind(len(source) * layers, args, (source, target, slots))

    def _copy_latents(self, source: Tensor, target: Tensor, slots: Tensor, first: int, layers: int) -> Launch:
        bytes_of = [stride * self.keys.element_size() for stride in self.keys.stride()[:2]]
        args = [source.data_ptr(), target.data_ptr(), slots.data_ptr(), self.keys.shape[3], layers, *bytes_of]
        args += [self.addresses(first)[0], int(self.keys.dtype == torch.bfloat16)]
        return copy_positions.bind(len(source) * layers, args, (source, target, slots))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory page by page as they are written. (Zeroed at all: a page is read whole, and 0 · NaN
    would leak from rows that are masked.)"""
    element = np.uint16 if dtype == torch.bfloat16 else np.float32
    return torch.from_numpy(np.zeros(shape, element)).view(dtype)


class PageAllocator:
    """Counts references to pages; a prompt's pages are shared by its group."""

    def __init__(self, pages: int) -> None:
        self.total = pages
        self._free = list(range(pages - 1, -1, -1))
        self._references: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def free_pages(self) -> list[int]:
        """Their numbers."""
        return list(self._free)

    def take(self, count: int) -> list[int]:
        """`count` fresh pages with one reference each. Raises `EngineError` when there are too few."""
        if count > len(self._free):
            raise EngineError(f"{count} KV pages wanted, {len(self._free)} of {self.total} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        """One more reference to each page."""
        for page in pages:
            self._references[page] += 1

    def release(self, pages: list[int]) -> None:
        """One reference fewer; a page without references is free again."""
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                del self._references[page]
                self._free.append(page)
