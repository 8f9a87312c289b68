"""Peak proportional set size of a process tree, sampled from ``/proc/*/smaps_rollup``.

PSS counts a page shared by n processes as 1/n of a page in each, so that the sum over a tree counts it once.
Reading it walks the page tables: `interval_s` is short while nothing is timed and long while something is.
"""

from __future__ import annotations

import threading
from pathlib import Path

PROC = Path("/proc")


def children_by_parent() -> dict[int, list[int]]:
    """Process ids of the machine by their parent's id."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The name in parentheses may hold spaces: the parent's id is the second field after it.
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it ended meanwhile
        children.setdefault(parent, []).append(int(entry.name))
    return children


def process_tree(root: int) -> list[int]:
    """`root` and all its descendants."""
    children, tree = children_by_parent(), [root]
    for pid in tree:
        tree.extend(children.get(pid, ()))
    return tree


def pss_bytes(pid: int) -> int:
    """PSS of one process; 0 when it has ended."""
    try:
        text = (PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)


def tree_pss_bytes(root: int) -> int:
    """PSS of a whole process tree."""
    return sum(pss_bytes(pid) for pid in process_tree(root))


class PssSampler:
    """Samples a process tree in a thread from construction until `stop`.

    `peak_bytes` is the largest sample; `interval_s` may be changed at any time.
    """

    def __init__(self, root: int, interval_s: float = 0.05) -> None:
        self.interval_s = interval_s
        self.peak_bytes = 0
        self._root = root
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="pss-sampler", daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stopped.wait(self.interval_s)
            self.peak_bytes = max(self.peak_bytes, tree_pss_bytes(self._root))

    def stop(self) -> int:
        """Take a last sample, end the thread and return the peak."""
        self._stopped.set()
        self._thread.join()
        return self.peak_bytes
