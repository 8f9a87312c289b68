"""Cached keys and values in pages of 16 positions, and who owns which page."""

from __future__ import annotations

import torch

from tithe.arch import ArchSpec
from tithe.errors import EngineError
from tithe.models import kernels
from tithe.quant import Launch

PAGE = kernels.PAGE


class KVPages:
    """Keys [L, pages, Hkv, D, 16] and values [L, pages, Hkv, 16, D] of one dtype."""

    def __init__(self, spec: ArchSpec, pages: int, dtype: torch.dtype) -> None:
        shape = (spec.n_layers, pages, spec.n_kv_heads)
        # Zeroed: a page is read whole, and 0 · NaN would leak from rows that are masked.
        self.keys = torch.zeros(*shape, spec.head_dim, PAGE, dtype=dtype)
        self.values = torch.zeros(*shape, PAGE, spec.head_dim, dtype=dtype)
        self.pages = pages

    @staticmethod
    def page_bytes(spec: ArchSpec, dtype: torch.dtype) -> int:
        """Bytes of one page over all layers, keys and values."""
        element = torch.empty(0, dtype=dtype).element_size()
        return 2 * spec.n_layers * spec.n_kv_heads * spec.head_dim * PAGE * element

    @property
    def n_bytes(self) -> int:
        """Resident bytes."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole pages in every layer."""
        if not sources:
            return
        layers, pages = self.keys.shape[:2]
        words = self.keys[0, 0].numel() * self.keys.element_size()
        source, target = (torch.tensor(x, dtype=torch.int32) for x in (sources, targets))
        args = [source.data_ptr(), target.data_ptr(), layers, words, words * pages]
        args += [self.keys.data_ptr(), self.values.data_ptr()]
        kernels.copy_pages.bind(len(sources) * layers, args, (source, target)).run()

    def copy_step(self, layer: int, source: torch.Tensor, target: torch.Tensor) -> Launch:
        """A launch that copies int32 page lists in one layer."""
        words = self.keys[0, 0].numel() * self.keys.element_size()
        args = [source.data_ptr(), target.data_ptr(), 1, words, 0]
        args += [self.keys[layer].data_ptr(), self.values[layer].data_ptr()]
        return kernels.copy_pages.bind(len(source), args, (source, target))


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
