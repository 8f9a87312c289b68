"""The ranks of a run: which one this is, and what it can tell the others.

A value that is handed to whoever needs it; there is no default group. With one rank nothing is sent and nothing waits.
Every rank calls the same methods in the same order: a call returns when all ranks have made it. When one has ended, or
keeps silent for `timeout_s`, the others' calls raise `RanksLost`. A patient broadcast waits for as long as all live.

Sums are taken in ascending rank, each element on one rank that then tells the others: every rank has the same bits, and
so has every run on as many ranks.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tithe.arch import Shard
from tithe.errors import (
    AdapterError,
    ConfigError,
    EngineError,
    PublishRefused,
    RanksLost,
    RunError,
    TitheError,
    UserError,
)

BUCKET_BYTES = 32 << 20
"""Tensors are summed together up to this size."""

TIMEOUT_S = 600.0
"""How long a rank may be silent while others wait for it."""

_PATIENCE = timedelta(days=365)
_ANSWERS: tuple[type[TitheError], ...] = (AdapterError, EngineError, PublishRefused)
"""Errors that ranks agree on, and after which they go on."""


class Agreed(Exception):
    """All ranks have refused an order alike: an answer, after which they are still in step. `error` is what rank 0
    raises."""

    def __init__(self, error: TitheError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(eq=False)
class Ranks:
    """One rank of `size`; `group` connects it to the others (gloo; None for one rank), and so does `patient`, for
    waiting without a bound. `why` says what it knows of a rank that is lost.

    Example: ``Ranks.join(rank, 4, run_dir / "ranks")`` in each of four processes.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    timeout_s: float = 0.0
    patient: dist.ProcessGroup | None = None
    why: Callable[[], str | None] = lambda: None
    store: dist.Store | None = None
    """Where the ranks met."""
    here: bool = False
    """Whether they are of one machine, by its own file."""
    _is_default: bool = field(default=False, init=False)

    @staticmethod
    def join(rank: int, size: int, meeting: Path | tuple[str, int, bool], timeout_s: float = TIMEOUT_S) -> Ranks:
        """Meet the others on this machine through a file that does not exist before the first comes, or at (host,
        port, whether this process is the host).

        Ranks of one machine connect through its loopback, others through the interface that GLOO_SOCKET_IFNAME names,
        else the host's own. `RunError` when not all come within `timeout_s`, `UserError`
        when the port is taken.
        """
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} of {size}: ranks count from 0 to {size - 1}")
        if size == 1:
            return Ranks()
        bound = timedelta(seconds=timeout_s)
        try:
            if isinstance(meeting, Path):
                store = dist.FileStore(str(meeting), size)
            else:
                host, port, is_host = meeting
                store = dist.TCPStore(host, port, None, is_host, bound, wait_for_workers=False)
            store.set_timeout(bound)
            groups = [
                _group(dist.PrefixStore(name, store), rank, size, patience, here=isinstance(meeting, Path))
                for name, patience in (("work", bound), ("orders", _PATIENCE))
            ]
        except RuntimeError as error:
            if not isinstance(meeting, Path) and "address already in use" in str(error).lower():
                raise UserError(
                    f"port {meeting[1]} of {meeting[0]} is used by another program: give the launcher another"
                    " (MASTER_PORT)"
                ) from error
            raise RunError(f"rank {rank} did not meet the other {size - 1} within {timeout_s:g} s: {error}") from error
        return Ranks(rank, size, groups[0], timeout_s, groups[1], store=store, here=isinstance(meeting, Path))

    @property
    def shard(self) -> Shard:
        """Which experts this rank holds."""
        return Shard(self.rank, self.size)

    def close(self) -> None:
        """Leave; calls of the others fail from now on."""
        if self._is_default:
            self._is_default = False
            dist.destroy_process_group()
        self.group = self.patient = None

    def default_group(self) -> dist.ProcessGroup:
        """The same ranks as torch's default group, which its sharding wants; all make it together, at the first call.

        The one place where a process has a group of its own: nothing else reads it.
        """
        assert self.store is not None, "one rank shards nothing"
        if not self._is_default:
            self.barrier()  # who has ended is noticed here, while torch would wait for it
            store = dist.PrefixStore("sharding", self.store)
            bound = timedelta(seconds=self.timeout_s)
            with self.watched(), _loopback(self.here):
                dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=bound)
            self._is_default = True
        group = dist.group.WORLD
        assert group is not None
        return group

    # ------------------------------------------------------------------ messages

    def _meet(self, call: Callable[[dist.ProcessGroup], Any], *, patiently: bool = False) -> None:
        group = self.patient if patiently else self.group
        if group is None:
            raise RanksLost(f"rank {self.rank} of {self.size} has left the others")
        try:
            call(group).wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> RanksLost:
        known = self.why() or (
            f"one has ended, or was silent for {self.timeout_s:g} s; look into its output "
            f"({str(error).splitlines()[0][:120]})"
        )
        return RanksLost(
            f"rank {self.rank} of {self.size} lost the others: {known}. Go on with `tithe resume`, on as many "
            "ranks or others"
        )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A block in which torch itself exchanges: what its messages fail with (gloo names itself), or its store where
        ranks meet, is `RanksLost`."""
        try:
            yield
        except RuntimeError as error:
            is_of_ranks = isinstance(error, dist.DistError) or "gloo" in str(error).lower()
            if self.size == 1 or not is_of_ranks:
                raise
            raise self._lost(error) from error

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """rows [Σ send, …]: the first send[0] go to rank 0, and so on. Returns [Σ receive, …], by rank they come from.

        Rows are bits: any dtype.
        """
        out = torch.empty(sum(receive), *rows.shape[1:], dtype=rows.dtype)
        if self.size == 1:
            return out.copy_(rows)
        width = rows.element_size() * rows[:1].numel() if len(rows) else out.element_size() * out[:1].numel()
        sizes = [[n * width for n in counts] for counts in (receive, send)]
        sent, got = (t.contiguous().view(torch.uint8).view(-1) for t in (rows, out))
        self._meet(lambda group: group.alltoall_base(got, sent, sizes[0], sizes[1]))
        return out

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, which has one shape and dtype on all ranks."""
        if self.size == 1:
            return [x]
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._meet(lambda group: group.allgather([found], [x.contiguous()]))
        return found

    def gather_blocks(self, own: Tensor, sizes: Sequence[int]) -> Tensor:
        """[Σ sizes, …] from each rank's [sizes[rank], …], in the order of ranks."""
        padded = own.new_zeros(max(sizes), *own.shape[1:])
        padded[: len(own)] = own
        return torch.cat([part[:n] for part, n in zip(self.all_gather(padded), sizes, strict=True)])

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace float tensors, alike on all ranks, by their sums over ranks."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([t.reshape(-1) for t in bucket])
            total = self._sum_flat(flat)
            for t, part in zip(bucket, total.split([t.numel() for t in bucket]), strict=True):
                t.copy_(part.view(t.shape))

    def _sum_flat(self, flat: Tensor) -> Tensor:
        """Each rank sums a slice, in ascending rank, and all tell theirs."""
        each = -(-flat.numel() // self.size)
        slices = torch.nn.functional.pad(flat, (0, each * self.size - flat.numel())).view(self.size, each)
        parts = self.all_to_all(slices, [1] * self.size, [1] * self.size)
        mine = parts[0].clone()
        for part in parts[1:]:
            mine += part
        return torch.cat(self.all_gather(mine))[: flat.numel()]

    def broadcast(self, data: bytes = b"", root: int = 0, *, patiently: bool = False) -> bytes:
        """The root's bytes, on every rank. `patiently`: however long the root takes to call."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)])
        self._meet(lambda group: group.broadcast(length, root), patiently=patiently)
        body = _bytes(data) if self.rank == root else torch.empty(int(length), dtype=torch.uint8)
        self._meet(lambda group: group.broadcast(body, root), patiently=patiently)
        return body.numpy().tobytes()

    def scatter(self, parts: Sequence[bytes], sizes: Sequence[int]) -> bytes:
        """This rank's part of what rank 0 has; all know the parts' sizes, rank 0 alone gives the parts."""
        if self.size == 1:
            return parts[0]
        nothing = [0] * self.size
        send = sizes if self.rank == 0 else nothing
        return self.all_to_all(_bytes(b"".join(parts)), send, [sizes[self.rank], *nothing[1:]]).numpy().tobytes()

    def collect(self, data: bytes, sizes: Sequence[int] = ()) -> list[bytes]:
        """On rank 0, which alone knows how much each has: every rank's bytes. Elsewhere nothing."""
        if self.size == 1:
            return [data]
        is_first, nothing = self.rank == 0, [0] * self.size
        found = self.all_to_all(_bytes(data), [len(data), *nothing[1:]], sizes if is_first else nothing)
        return [part.numpy().tobytes() for part in found.split(list(sizes))] if is_first else []

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, of any length."""
        if self.size == 1:
            return [data]
        return self.gather_known(data, [int(n) for n in self.all_gather(torch.tensor([len(data)]))])

    def gather_known(self, data: bytes, lengths: Sequence[int]) -> list[bytes]:
        """Every rank's bytes, of lengths that all know."""
        if not any(lengths):
            return [b""] * self.size
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(data)] = _bytes(data)
        found = self.all_gather(padded)
        return [part.numpy()[:n].tobytes() for part, n in zip(found, lengths, strict=True)]

    def agree(self, problem: TitheError | None) -> None:
        """Go on together, or not: raises when any rank has a problem, the same on all (`Agreed`, where there are
        others). An `AdapterError`, `EngineError` or `PublishRefused`: others are no answer."""
        if self.size == 1:
            if problem is not None:
                raise problem
            return
        kind = next((one for one in _ANSWERS if isinstance(problem, one)), None)
        if problem is not None and kind is None:
            raise problem
        told = self.gather(b"" if kind is None else f"{kind.__name__}\n{problem}".encode())
        for rank, said in enumerate(told):
            if said:
                name, _, message = said.decode().partition("\n")
                kind = next(one for one in _ANSWERS if one.__name__ == name)
                raise Agreed(kind(message if rank == 0 else f"rank {rank}: {message}"))

    def wait_for_all(self) -> None:
        """Wait until all have come here, however long that takes: loading a base may take one rank much longer."""
        for root in range(self.size):
            self.broadcast(b"", root, patiently=True)

    def barrier(self) -> None:
        """Wait until all have come here."""
        if self.size > 1:
            self.all_gather(torch.zeros(1, dtype=torch.uint8))


def _group(store: dist.Store, rank: int, size: int, timeout: timedelta, *, here: bool) -> dist.ProcessGroup:
    gloo: Any = dist.ProcessGroupGloo  # its options have private names; it has the methods of a group
    if not here or "GLOO_SOCKET_IFNAME" in os.environ:
        return gloo(store, rank, size, timeout)
    options = gloo._Options()  # noqa: SLF001
    options._devices, options._timeout = [gloo.create_device(hostname="127.0.0.1")], timeout  # noqa: SLF001
    return gloo(store, rank, size, options)


@contextmanager
def _loopback(here: bool) -> Iterator[None]:
    """Groups that are made in the block connect through this machine's loopback, unless an interface is named."""
    names = {name for _, name in socket.if_nameindex()}
    if not here or "GLOO_SOCKET_IFNAME" in os.environ or "lo" not in names:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


ALONE = Ranks()
"""The only rank."""


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, up to `BUCKET_BYTES` (a larger tensor is alone)."""
    bucket: list[Tensor] = []
    size = 0
    for t in tensors:
        n_bytes = t.numel() * t.element_size()
        if bucket and (size + n_bytes > BUCKET_BYTES or t.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(t)
        size += n_bytes
    if bucket:
        yield bucket
