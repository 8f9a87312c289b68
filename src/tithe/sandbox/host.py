"""The sandbox: runs a program against tests it cannot see and says what became of it.

    run_tests ──▶ slot ──▶ zygote forks ──▶ supervisor ──▶ program     consumes: code, tests, limits
        ▲                                       │             │        produces: a `Verdict`
        └── verdict ◀── compared out here ◀── report ◀── output        waits for: a slot; the report
                                                                       unblocked by: the program's end, or its limits

Right answers stay in this process (standard input, functions), or in a second program of their own that calls the
judged one across a connection (asserts). So no exit code, no printed word and no patched built-in can pass a test.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

from tithe.sandbox.boxes import Box, HarnessError, finish
from tithe.sandbox.cases import AssertTests, FunctionTest, StdioTest, Tests
from tithe.sandbox.inside import syscalls
from tithe.sandbox.judging import LIMITS_HIT, judge_asserts, judge_functions, judge_script, judge_stdio, together
from tithe.sandbox.launch import Zygote
from tithe.sandbox.limits import Limits, Outcome, Verdict
from tithe.sandbox.rooms import REMEDY, SandboxUnavailableError, has_bubblewrap, survey

FIRST_UID: Final = 1_879_048_192
"""Where root's programs get their user numbers from: above everything that distributions hand out."""

_PROOF: Final = Path(__file__).with_name("proof.py")


class Sandbox:
    """Runs up to `slots` programs at once. Thread-safe; `close` (or a `with` block) ends everything in it.

    `mode`: `bubblewrap`, `namespaces`, or `auto`, which takes the first that passes its proof: a program that tries
    what must not work. Construction blocks for about a second and raises `SandboxUnavailableError` when none does.
    """

    def __init__(self, slots: int = 2, mode: Literal["auto", "bubblewrap", "namespaces"] = "auto") -> None:
        if sys.platform != "linux" or not syscalls.is_known_machine():
            raise SandboxUnavailableError("the sandbox needs Linux on x86_64 or aarch64")
        self._lock = threading.Lock()
        self._zygote: Zygote | None = None
        self._is_closed = False
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(slots):
            self._slots.put(number)
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix="sandbox")
        self._room = survey()
        self.mode = self._choose(mode)

    def run_tests(self, code: str, tests: Tests, limits: Limits | None = None) -> Verdict:
        """Run `code` against `tests` in this thread. Blocks while all slots are taken; limits count from the program's
        own start. Raises nothing for what the program does: a failure of the harness is an abstention."""
        return self._in_slot(lambda uid: self._judge(code, tests, limits or Limits(), uid))

    def submit(self, code: str, tests: Tests, limits: Limits | None = None) -> Future[Verdict]:
        """As `run_tests`, in a thread of the sandbox; never blocks."""
        return self._threads.submit(self.run_tests, code, tests, limits)

    async def run_tests_async(self, code: str, tests: Tests, limits: Limits | None = None) -> Verdict:
        """As `run_tests`, for coroutines of any event loop."""
        return await asyncio.wrap_future(self.submit(code, tests, limits))

    def run_script(self, code: str, stdin: str = "", limits: Limits | None = None) -> tuple[Verdict, str]:
        """Run a script without judging its output, which is returned: standard output, and standard error after it when
        the script failed. PASSED means that it ended well. Blocks as `run_tests` does."""
        printed = ""

        def run(uid: int) -> Verdict:
            nonlocal printed
            with self._box(limits or Limits(), uid, {"kind": "script", "code": code}, stdin=stdin) as box:
                finish([box])
            verdict = judge_script(box)
            printed = box.stdout.text + ("" if verdict.outcome is Outcome.PASSED else box.stderr.text)
            return verdict

        return self._in_slot(run), printed

    def close(self) -> None:
        """End the zygote and all programs. Idempotent."""
        with self._lock:
            self._is_closed = True
            zygote = self._zygote
        self._drop(zygote)
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ judging

    def _judge(self, code: str, tests: Tests, limits: Limits, uid: int) -> Verdict:
        if isinstance(tests, AssertTests):
            return self._judge_asserts(code, tests, limits, uid)
        functions = [test for test in tests if isinstance(test, FunctionTest)]
        if functions:
            calls = [{"name": t.name, "args": list(t.args), "kwargs": dict(t.kwargs)} for t in functions]
            job = {"kind": "calls", "code": code, "calls": calls}
            with self._box(limits, uid, job, has_results=True) as box:
                finish([box])
            return judge_functions(box, functions)
        return self._judge_stdio(code, [test for test in tests if isinstance(test, StdioTest)], limits, uid)

    def _judge_stdio(self, code: str, tests: Sequence[StdioTest], limits: Limits, uid: int) -> Verdict:
        verdicts: list[Verdict] = []
        deadline_s = time.monotonic() + limits.total_s
        for number, test in enumerate(tests, start=1):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                detail = f"test {number}: not run, all of them together took {limits.total_s:g} s"
                verdicts.append(Verdict(Outcome.TIMEOUT, 0, 1, detail))
                break
            own = replace(limits, wall_s=min(limits.wall_s, left_s))
            with self._box(own, uid, {"kind": "script", "code": code}, stdin=test.stdin) as box:
                finish([box])
            verdicts.append(judge_stdio(box, test, number))
            if verdicts[-1].outcome in LIMITS_HIT:
                break
        return together(verdicts, len(tests))

    def _judge_asserts(self, code: str, tests: AssertTests, limits: Limits, uid: int) -> Verdict:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            serve = {"kind": "serve", "code": code}
            check = {
                "kind": "check",
                "tests": tests.source,
                "entry_point": tests.entry_point,
                "module": tests.module,
            }
            with (
                self._box(limits, uid, serve, channel=ours.fileno()) as program,
                self._box(limits, uid + 1, check, channel=theirs.fileno(), has_results=True) as checker,
            ):
                ours.close()
                theirs.close()
                finish([checker, program])
        return judge_asserts(program, checker)

    # ------------------------------------------------------------------ the zygote

    def _in_slot(self, judge: Callable[[int], Verdict]) -> Verdict:
        slot = self._slots.get()
        began = time.monotonic()
        try:
            verdict = judge(FIRST_UID + 2 * slot)
        except (HarnessError, OSError) as error:
            verdict = Verdict(Outcome.HARNESS, 0, 0, f"{type(error).__name__}: {error}")
        finally:
            self._slots.put(slot)
        return replace(verdict, seconds=time.monotonic() - began)

    @contextmanager
    def _box(self, limits: Limits, uid: int, job: Mapping[str, Any], **given: Any) -> Iterator[Box]:
        zygote = self._living()
        try:
            with closing(Box(zygote.order, limits, uid, job, **given)) as box:
                yield box
        except HarnessError:
            self._drop(zygote)
            raise

    def _living(self) -> Zygote:
        """The zygote; a new one when the old one failed."""
        with self._lock:
            if self._is_closed:
                raise HarnessError("the sandbox is closed")
            if self._zygote is None:
                self._zygote = Zygote(self._room, self.mode)
            return self._zygote

    def _drop(self, zygote: Zygote | None) -> None:
        with self._lock:
            if self._zygote is zygote:
                self._zygote = None
        if zygote is not None:
            zygote.close()

    def _choose(self, wanted: str) -> str:
        """The first mode whose proof holds."""
        candidates = ["bubblewrap"] if has_bubblewrap() else []
        candidates = [*candidates, "namespaces"] if wanted == "auto" else [wanted]
        problems: list[str] = []
        for mode in candidates:
            try:
                self._zygote = Zygote(self._room, mode)
                self.mode = mode
                self._prove()
            except SandboxUnavailableError as error:
                problems.append(str(error))
                self._drop(self._zygote)
            else:
                return mode
        self._threads.shutdown()
        raise SandboxUnavailableError("\n".join(problems))

    def _prove(self) -> None:
        """Run a program that tries what must not work, on this very machine and kernel."""
        secret = str(Path(__file__).resolve())
        verdict, printed = self.run_script(_PROOF.read_text(), secret, Limits(processes=8))
        if verdict.outcome is not Outcome.PASSED or printed.strip() != "confined":
            problem = printed.strip() or verdict.detail
            raise SandboxUnavailableError(f"the sandbox by {self.mode} does not hold here ({problem[-300:]}): {REMEDY}")
