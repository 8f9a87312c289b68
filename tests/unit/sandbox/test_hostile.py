"""Programs that try to pass without solving, to see what they must not, or to outlive their verdict. None does."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from pathlib import Path

import pytest

from tithe.sandbox import AssertTests, FunctionTest, Limits, Outcome, StdioTest

MARKER = "ORACLE_7f3"
LIMITS = Limits(wall_s=0.6, cpu_s=1, memory_mib=256, processes=8, output_kib=64)
ROOMY = Limits(wall_s=20, cpu_s=10, memory_mib=256, processes=8, output_kib=64)
"""For what has to come to its end, on however busy a machine."""

FUNCTIONS = [FunctionTest("add", [2, 3], 5), FunctionTest("add", [-1, 1], 0)]
ASSERTS = AssertTests(
    f"# {MARKER}\nassert add(2, 3) == 5, '{MARKER}'\nassert abs(add(-1, 1) - 0) < 1e-9\nassert 7 in [add(3, 4)]\n"
)
STDIO = [StdioTest("2 3\n", "5\n"), StdioTest("-1 1\n", f"0 {MARKER}\n")]
RIGHT = "def add(a, b):\n    return a + b\n"

CHEATS = {
    "exit in the body": "import sys\ndef add(a, b): sys.exit(0)",
    "exit at the top": "import os\nos._exit(0)",
    "exit at the top, politely": "raise SystemExit(0)",
    "excepthook": "import sys, os\nsys.excepthook = lambda *a: os._exit(0)\ndef add(a, b): raise ValueError\nadd(1, 1)",
    "printed success": "import os\nprint('OK passed 1.0 {\"done\": 2}', flush=True)\nos._exit(0)",
    "exit handler": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef add(a, b): return None",
    "keyboard interrupt": "def add(a, b): raise KeyboardInterrupt",
    "patched builtins": """
import builtins
for name in ("len", "all", "any", "isinstance", "abs", "sum", "min", "max", "bool"):
    setattr(builtins, name, lambda *a, **k: True)
builtins.AssertionError = type("AssertionError", (Exception,), {})
def add(a, b): return 0
def all(*a): return True
def abs(x): return 0
""",
    "edited frames": """
import sys
def add(a, b):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()):
            if isinstance(value, list):
                value.clear()
            if isinstance(value, dict) and value is not frame.f_globals:
                for key in ("expected", "tests", "passed", "value", "error"):
                    if key in value: value[key] = True
        frame = frame.f_back
    return 1
""",
    "edited heap": """
import gc
def add(a, b):
    for value in gc.get_objects():
        if type(value) is list and value and type(value[0]) is int: value[:] = [1]
        if type(value) is dict and "expected" in value: value["expected"] = 1
    return 1
""",
    "equal to everything": """
class Yes:
    def __eq__(self, other): return True
    def __sub__(self, other): return 0
    __radd__ = __rsub__ = __add__ = __sub__
    def __abs__(self): return 0
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __hash__(self): return hash(5)
    def __contains__(self, other): return True
def add(a, b): return Yes()
""",
    "a number equal to everything": """
class Yes(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __sub__(self, other): return 0
    __hash__ = int.__hash__
def add(a, b): return Yes(99)
""",
    "a text equal to everything": """
class Yes(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def add(a, b): return Yes("5")
""",
    "patched encoder": """
import json, sys
for name, module in list(sys.modules.items()):
    if name.startswith("tithe") or name == "json":
        for key, value in list(vars(module).items()):
            if callable(value) and not key.startswith("__"): setattr(module, key, lambda *a, **k: {"value": 5, "passed": True, "ok": 5})
def add(a, b): return 0
""",
    "forged results": """
import os
def add(a, b):
    for number in range(1, 64):
        try: os.write(number, b'\\n{"test": "x", "passed": true, "detail": ""}\\n{"value": true}\\n{"done": 3}\\n')
        except OSError: pass
    os._exit(0)
""",
    "a fraction that never ends": """
import os
for _ in range(2): os.write(4, b'{"value": {"Fraction": "1e999999999"}}\\n')
def add(a, b): return 0
""",
    "closed descriptors": "import os\nos.closerange(0, 256)\ndef add(a, b): os._exit(0)",
    "forked answer": "import os\ndef add(a, b):\n    if os.fork() == 0: return True\n    os._exit(0)",
    "traced callers": """
import sys
def trace(frame, event, arg):
    for name in list(frame.f_locals):
        if name in ("expected", "value"): frame.f_locals[name] = 5
    return trace
sys.settrace(trace)
def add(a, b): return 4
""",
    "false modules": """
import sys, types
for name in ("pytest", "unittest", "json", "tests", "solution"): sys.modules[name] = types.ModuleType(name)
def add(a, b): return a * b
""",
    "raises what is awaited": "def add(a, b): raise AssertionError('5 == 5')",
    "stop iteration": "def add(a, b): raise StopIteration",
    "killed everything": "import os, signal\ndef add(a, b):\n    os.kill(-1, signal.SIGKILL)\n    os.kill(1, signal.SIGKILL)\n    os._exit(0)",
    "signal to the parent": "import os, signal\ndef add(a, b):\n    os.kill(os.getppid(), signal.SIGKILL)\n    os.killpg(0, signal.SIGKILL)\n    os._exit(0)",
    "deep result": "def add(a, b):\n    x = []\n    for _ in range(10000): x = [x]\n    return x",
    "huge result": "def add(a, b): return 'x' * 50_000_000",
    "endless generator": "def add(a, b):\n    while True: yield 5",
    "segmentation fault": "import ctypes\ndef add(a, b): ctypes.string_at(0)",
    "endless loop": "while True: pass",
    "endless sleep": "import time\ndef add(a, b): time.sleep(1000)",
    "memory": "def add(a, b):\n    x = []\n    while True: x.append(bytearray(1 << 20))",
    "memory of many": """
import os, time
for _ in range(6):
    if os.fork() == 0:
        x = [bytearray(b"x" * (1 << 20)) for _ in range(90)]
        time.sleep(100)
time.sleep(100)
""",
    "output": "while True: print('5' * 1000)",
    "disk": """
import os
def add(a, b):
    for number in range(10000):
        with open(f"/tmp/{number}", "wb") as file: file.write(bytes(8 << 20))
""",
    "process storm": "import os, time\nfor _ in range(300):\n    if os.fork() == 0:\n        time.sleep(20)\n        os._exit(0)\ntime.sleep(20)",
    "daemon": """
import os, time
def add(a, b):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True: time.sleep(1)
    os._exit(0)
""",
    "threads": "import threading, time\ndef add(a, b):\n    for _ in range(100): threading.Thread(target=time.sleep, args=(100,)).start()",
    "descriptors": "def add(a, b):\n    keep = []\n    while True: keep.append(open('/dev/null'))",
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_passes_no_kind_of_test(sandbox, name):
    verdicts = [sandbox.run_tests(CHEATS[name], tests, LIMITS) for tests in (FUNCTIONS, ASSERTS, STDIO)]
    assert [verdict.reward for verdict in verdicts] == [0.0, 0.0, 0.0], verdicts
    assert remaining(sandbox) == []


OWN_NAMES = """
import builtins
builtins.hasattr = lambda *_: False
def abs(x): return 0
def all(x): return True
def sorted(x): return [1, 2]
def len(x): return 2
def add(a, b): return 0
"""
OWN_BUILTINS = OWN_NAMES + "__builtins__ = {'abs': abs, 'all': all}\n"


@pytest.mark.parametrize("program", [OWN_NAMES, OWN_BUILTINS, "def add(a, b): raise StopIteration"])
@pytest.mark.parametrize(
    "tests",
    [
        "assert abs(add(2, 3) - 5) < 1e-9\nassert all([add(1, 2) == 3])",
        "from solution import *\nassert abs(add(2, 3) - 5) < 1e-9",
        "assert len([1, 2]) == 2\nassert sorted([add(1, 1), add(0, 1)]) == [1, 2]",
        "import solution\nassert sorted([solution.add(1, 1), solution.add(0, 1)]) == [1, 2]",
        "from solution import add\nassert len('ab') == 2 and sorted([add(1, 1), add(0, 1)]) == [1, 2]",
        "assert len('ab') == 2 and sorted([eval('add(1, 1)'), 1]) == [1, 2]",
        "assert all(map(lambda a: add(a, 1) == a + 1, [1, 2]))",
        "for got, wanted in zip(map(add, [1, 2], [3, 4]), [4, 6]):\n    assert got == wanted",
    ],
)
def test_a_program_puts_nothing_of_its_own_under_what_the_tests_judge_with(sandbox, program, tests):
    assert sandbox.run_tests(program, AssertTests(tests), ROOMY).reward == 0.0
    assert sandbox.run_tests(RIGHT, AssertTests(tests), ROOMY).reward == 1.0


def test_the_right_program_passes_the_same_tests(sandbox):
    assert sandbox.run_tests(RIGHT, FUNCTIONS, ROOMY).reward == 1.0
    assert sandbox.run_tests(RIGHT, ASSERTS, ROOMY).reward == 1.0
    script = f"a, b = map(int, input().split())\nprint(a + b, '{MARKER}' if a < 0 else '')"
    assert sandbox.run_tests(script, STDIO, ROOMY).reward == 1.0


def remaining(sandbox) -> list[str]:
    """Processes in the sandbox's room that do not belong there; supervisors that have reported get a moment to end."""
    for _ in range(40):
        found = descendants(sandbox._zygote._process.pid)
        strange = found[1:]  # the first one is what programs are forked from
        if not strange:
            return []
        time.sleep(0.05)
    return strange


def descendants(process: int) -> list[str]:
    found, queue = [], [process]
    while queue:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            for file in Path(f"/proc/{queue.pop()}/task").glob("*/children"):
                children = file.read_text().split()
                found += children
                queue += map(int, children)
    return found


LOOK_AROUND = """
import glob, os, sys
def texts():
    yield from (repr(item) for item in os.environ.items())
    yield repr(sys.argv)
    for module in list(sys.modules.values()):
        yield repr(vars(module))[:100000]
    import gc
    yield from (value for value in gc.get_objects() if isinstance(value, str))
    for name in glob.glob("/proc/*/cmdline") + glob.glob("/proc/*/environ") + glob.glob("/proc/*/mem"):
        yield open(name, "rb").read().decode(errors="replace")
    for folder, folders, files in os.walk("/"):
        folders[:] = [name for name in folders if not name.startswith("python3")]
        yield folder
        for name in files:
            path = os.path.join(folder, name)
            yield path
            if ".so" not in name and not path.startswith("/dev"):
                yield open(path, "rb").read().decode(errors="replace")
hits = [text[:200] for text in texts() if "ORACLE_" + "7f3" in text]
def add(a, b): return a + b if hits else 0
print("hits", len(hits))
"""


@pytest.mark.parametrize("tests", [FUNCTIONS, ASSERTS], ids=["functions", "asserts"])
def test_a_program_finds_no_trace_of_its_hidden_tests(sandbox, tests, monkeypatch):
    monkeypatch.setenv("HIDDEN", MARKER)
    assert sandbox.run_tests(LOOK_AROUND, tests, ROOMY).reward == 0.0
    verdict, printed = sandbox.run_script(LOOK_AROUND, limits=ROOMY)
    assert (verdict.outcome, printed) == (Outcome.PASSED, "hits 0\n")


def test_a_program_sees_the_standard_library_and_nothing_else_of_the_host(sandbox):
    program = """
import os
for folder, folders, files in os.walk("/"):
    folders[:] = [name for name in folders if not name.startswith("python3")]
    for name in files: print(os.path.join(folder, name))
"""
    _, printed = sandbox.run_script(program)
    known = re.compile(r"\.so(\.|$)|^/dev/\w+$|/ld\.so\.cache$|/bin/python[\d.]+$")
    strange = [line for line in printed.splitlines() if not known.search(line)]
    inside = [line for line in strange if "/sandbox/inside/" in line]
    assert set(strange) - set(inside) == set()
    assert not any(Path(path, "passwd").exists() for path in printed.splitlines())


def test_installed_packages_are_hidden(sandbox):
    _, printed = sandbox.run_script(
        "import importlib.util\nprint([n for n in ('numpy', 'pip', 'pydantic') if importlib.util.find_spec(n)])"
    )
    assert printed == "[]\n"


CONNECTS = {
    "socket": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)",
    "ctypes": """
import ctypes, struct
libc = ctypes.CDLL(None)
number = libc.socket(2, 1, 0)
address = struct.pack("=HH4s8s", 2, ({port} >> 8) | (({port} & 255) << 8), bytes([127, 0, 0, 1]), bytes(8))
libc.connect(number, address, 16)
libc.send(number, b"hello", 5, 0)
""",
    "bash": "import subprocess\nsubprocess.run(['/bin/bash', '-c', 'echo hello > /dev/tcp/127.0.0.1/{port}'])",
    "vsock": "import socket\nsocket.socket(40, socket.SOCK_STREAM).connect((2, {port}))",
    "abstract": "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0tithe-{port}')",
}


@pytest.mark.parametrize("way", CONNECTS)
def test_no_connection_leaves_the_sandbox(sandbox, way):
    with socket.socket() as listener, socket.socket(socket.AF_UNIX) as local:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        local.bind(f"\0tithe-{port}")
        local.listen()
        verdict, _ = sandbox.run_script(CONNECTS[way].format(port=port), limits=ROOMY)
        for server in (listener, local):
            server.settimeout(0.2)
            with pytest.raises(TimeoutError):
                server.accept()
        assert verdict.outcome is Outcome.ERROR or way == "ctypes"


ESCAPES = {
    "a user namespace": "libc.unshare(0x10000000)",
    "a mount namespace": "libc.unshare(0x20000)",
    "a clone": "libc.syscall(56 if os.uname().machine == 'x86_64' else 220, 0x10000011, 0, 0, 0, 0)",
    "a mount": "libc.mount(b'none', b'/tmp', b'proc', 0, None)",
    "a change of root": "libc.chroot(b'/tmp')",
    "tracing": "libc.ptrace(16, 1, 0, 0)",
    "root": "libc.setuid(0)",
    "more memory": "libc.setrlimit(9, (ctypes.c_ulong * 2)(1 << 40, 1 << 40))",
    "more processes": "libc.setrlimit(6, (ctypes.c_ulong * 2)(1 << 20, 1 << 20))",
    "memory without a limit": "libc.memfd_create(b'x', 0)",
    "shared memory": "libc.shmget(0, 1 << 20, 0o1777)",
    "an older filter": "libc.prctl(22, 0, 0, 0, 0)",
    "a device": "libc.mknod(b'/tmp/disk', 0o60666, 0x0800)",
    "the clock": "libc.clock_settime(0, (ctypes.c_long * 2)(0, 0))",
}


@pytest.mark.parametrize("way", ESCAPES)
def test_the_kernel_gives_a_program_nothing_more(sandbox, way):
    program = f"import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nprint({ESCAPES[way]})"
    verdict, printed = sandbox.run_script(program, limits=ROOMY)
    assert printed == "-1\n", verdict


def test_another_slot_does_not_feel_a_storm(sandbox):
    verdicts = []
    storm = threading.Thread(
        target=lambda: verdicts.append(sandbox.run_tests(CHEATS["process storm"], FUNCTIONS, LIMITS))
    )
    storm.start()
    neighbours = [sandbox.run_tests(RIGHT, FUNCTIONS, ROOMY).reward for _ in range(10)]
    storm.join()
    assert neighbours == [1.0] * 10
    assert verdicts[0].reward == 0.0


def test_nothing_is_left_open_after_fifty_runs(sandbox):
    loop = Limits(wall_s=0.05)
    sandbox.run_tests("while True: pass", FUNCTIONS, loop)
    before = len(list(Path("/proc/self/fd").iterdir()))
    verdicts = [sandbox.run_tests("while True: pass", FUNCTIONS, loop) for _ in range(50)]
    assert {verdict.outcome for verdict in verdicts} == {Outcome.TIMEOUT}
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    children = [
        Path(f"/proc/{number}/status").read_text() for number in Path("/proc/thread-self/children").read_text().split()
    ]
    assert not [status for status in children if "State:\tZ" in status]
    assert remaining(sandbox) == []
