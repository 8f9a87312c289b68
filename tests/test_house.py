"""The rules of the house that no linter knows: sizes, broad excepts, machine paths, a light core, honest documents."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CODE = sorted(
    path
    for folder in ("src", "benchmarks", "examples", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_LINES_IN_ONE_PIECE = 80
IN_ONE_PIECE = {"src/tithe/models/vector_tile.py:_make", "src/tithe/quant/tile.py:make_tile"}
"""Functions (`file:function`) that may have up to 80 lines because they read best in one piece: long-running loops, and
generators of LLVM code, whose closures share what is known when they are made. The tests' fakes may, too."""

MAY_CATCH_EVERYTHING = {"src/tithe/errors.py", "src/tithe/metrics/sinks.py", "src/tithe/models/lane.py"}
MAY_CATCH_EVERYTHING |= {"src/tithe/sandbox/inside/attempt.py"}
"""`errors.boundary`, the metric sinks, the lane, which hands a job's exception to the future that waits for it, and the
sandbox's own boundary, in processes that do not import the house.
Anywhere else a broad `except` must end in `raise`: it cleans up or translates."""

TORCH_FREE = ("errors", "types", "config", "arch", "advantages", "staleness", "metrics", "renderers", "rewards")
TORCH_FREE += ("sandbox", "pool", "planner", "envs", "simulator", "monitoring", "cli.main")
HEAVY = ("torch", "transformers", "numba")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def nodes(path: Path) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef | ast.ExceptHandler, ...]:
    """Functions and handlers of a file, parsed once for all rules."""
    wanted = ast.FunctionDef | ast.AsyncFunctionDef | ast.ExceptHandler
    return tuple(node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, wanted))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in nodes(path) if not isinstance(node, ast.ExceptHandler))


def test_a_file_has_at_most_500_lines():
    lengths = {name(path): len(path.read_text().splitlines()) for path in CODE}
    assert {path: n for path, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_a_function_fits_on_a_screen():
    too_long = []
    for path in CODE:
        for node in functions(path):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            longer = f"{name(path)}:{node.name}" in IN_ONE_PIECE or name(path).startswith("tests/")
            bound = MAX_LINES_IN_ONE_PIECE if longer else MAX_FUNCTION_LINES
            if lines > bound:
                too_long.append(f"{name(path)}:{node.lineno} {node.name} has {lines} lines")
    assert too_long == []


def test_every_listed_long_function_exists():
    present = {f"{name(path)}:{node.name}" for path in CODE for node in functions(path)}
    assert present >= IN_ONE_PIECE


def is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or getattr(kind, "id", "") in {"Exception", "BaseException"} for kind in kinds)


def reraises(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise)


def test_nothing_else_swallows_every_exception():
    broad = [
        f"{name(path)}:{node.lineno}"
        for path in CODE
        if name(path) not in MAY_CATCH_EVERYTHING and not name(path).startswith("tests/")
        for node in nodes(path)
        if isinstance(node, ast.ExceptHandler) and is_broad(node) and not reraises(node)
    ]
    assert broad == []


def test_no_path_of_one_machine_is_in_the_tree():
    pattern = re.compile(r"(?<![\w.])/(?:work|root|home|Users|opt)/\w")
    documents = [*ROOT.glob("*"), *(ROOT / "docs").rglob("*"), *(ROOT / ".ci").rglob("*"), *(ROOT / "src").rglob("*")]
    texts = {path for path in documents if path.suffix in {".md", ".toml", ".txt", ".yaml", ".yml", ".html", ".css"}}
    texts |= {ROOT / "Makefile", ROOT / ".ci" / "run", *CODE}
    found = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in sorted(texts)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


ASSERTS = re.compile(r"Assert\(|raises|warns|assert_|check|suppress")


def test_every_test_asserts_something():
    """By itself, or through a helper of its own file that does."""
    silent = []
    for path in CODE:
        if not path.name.startswith("test_"):
            continue
        texts = {node.name: ast.dump(node) for node in functions(path)}
        helpers = [called for called, text in texts.items() if not called.startswith("test_") and ASSERTS.search(text)]
        for called, text in texts.items():
            through_helper = any(f"Name(id='{helper}'" in text for helper in helpers)
            if called.startswith("test_") and not (ASSERTS.search(text) or through_helper):
                silent.append(f"{name(path)}: {called}")
    assert silent == []


def loaded_after(statement: str, packages: tuple[str, ...] = HEAVY) -> set[str]:
    """The heavy packages that a fresh interpreter has loaded after `statement`."""
    code = f"import sys\n{statement}\nprint('loaded:', *(m for m in {packages!r} if m in sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT / "src")}
    )
    return set(run.stdout.splitlines()[-1].split()[1:])


def test_light_rooms_are_imported_without_torch():
    """All in one process, one after another: what none of them loads, none loads alone."""
    statement = f"""
import importlib
for room in {TORCH_FREE!r}:
    importlib.import_module("tithe." + room)
    heavy = [m for m in {HEAVY!r} if m in sys.modules]
    assert not heavy, (room, heavy)
"""
    assert loaded_after(statement) == set()


@pytest.mark.timeout(1200)  # after a change of any kernel it compiles them all, for minutes on a busy machine
def test_a_run_needs_no_part_of_torchs_compiler():
    """Each costs 100 MB or more and seconds of every process that trains."""
    statement = """
import torch, tithe.build
from tithe.models import AdamW
AdamW({"a": torch.ones(2)}, betas=(0.9, 0.95), weight_decay=0.1).step({"a": torch.ones(2)}, 0.1)
"""
    packages = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "transformers")
    assert loaded_after(statement, packages) == set()


def test_help_is_printed_without_torch():
    statement = """
from tithe.cli.main import main
try:
    main(["--help"])
except SystemExit as end:
    assert not end.code
"""
    assert loaded_after(statement) == set()


def test_the_configuration_page_is_what_the_schema_says():
    from tithe.config.docs import render

    page = ROOT / "docs" / "configuration.md"
    assert page.read_text() == render(), "run: python -m tithe.config.docs > docs/configuration.md"


def test_the_run_file_in_the_readme_loads(tmp_path):
    from tithe.config import load_config

    block = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block, "README.md shows no run file"
    run_file = tmp_path / "mine.yaml"
    run_file.write_text(block[1])
    assert len(block[1].splitlines()) <= 10
    assert load_config(run_file, ["optimizer.lr=1e-4"]).optimizer.lr == 1e-4


NOT_IN_THE_TREE = re.compile(
    r"^(\.git|\.venv|\.bench|runs|build|dist|trl_out|__pycache__|\..*_cache|\.hypothesis|.*egg-info)$"
)


def drawn_tree() -> set[str]:
    """Paths of README's annotated tree: two spaces a level, the path, then what it is for."""
    block = re.search(r"<!-- tree -->\n```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block, "README.md has no annotated tree"
    paths: set[str] = set()
    parents: list[str] = []
    for line in block[1].splitlines():
        indent, entry, purpose = re.fullmatch(r"( *)(\S+)\s{2,}(\S.*)", line).groups()
        assert purpose
        del parents[len(indent) // 2 :]
        parents.append(entry.rstrip("/"))
        paths.add("/".join(parents))
    return paths


def entries(folder: Path) -> set[str]:
    """What lies in a folder, without caches and what .gitignore names."""
    return {
        name(path)
        for path in folder.iterdir()
        if not NOT_IN_THE_TREE.match(path.name) and (path.is_file() or any(p.is_file() for p in path.rglob("*")))
    }


def test_the_annotated_tree_matches_the_tree():
    drawn = drawn_tree()
    assert {path for path in drawn if not (ROOT / path).exists()} == set()
    for folder in (ROOT, ROOT / "src" / "tithe", ROOT / "docs", ROOT / "tests"):
        wanted = entries(folder) - {"src/tithe/__init__.py"}
        assert wanted - drawn == set(), f"README's tree leaves out part of {name(folder)}"
