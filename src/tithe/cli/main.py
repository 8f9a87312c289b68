"""Entry point: parse, dispatch, and turn every ending into one exit code.

0 success · 1 the run failed · 2 bad input · 130 interrupted. An exception that is none of these is a fault of Tithe and
keeps its traceback (exit code 1).
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Sequence

import tithe
from tithe.cli.answer import Answer
from tithe.cli.parser import UsageError, parse

OK, RUN_FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

_DISK = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EFBIG,
        errno.ENAMETOOLONG,
        errno.ENOTDIR,
        errno.EISDIR,
    }
)
"""System errors whose remedy is the user's: space, quota, permission, a path that cannot be one."""

_EXTRAS = {
    "torch": "train",
    "transformers": "train",
    "tokenizers": "train",
    "safetensors": "train",
    "numba": "train",
    "tensorboardX": "train",
    "reasoning_gym": "tasks",
}
"""Optional package → the extra of `pip install` that brings it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        print(f"tithe {tithe.__version__}")
        return OK
    try:
        args = parse(given)
    except UsageError as error:
        with Answer(as_json="--json" in given) as answer:
            answer.fail(error)
        return BAD_INPUT
    with Answer(as_json=args.json) as answer:
        return _run(args, answer)


def _run(args: argparse.Namespace, answer: Answer) -> int:
    # Imported after parsing: the exception tree brings asyncio, which would cost `--help` a third of its time.
    from tithe.cli.commands import HANDLERS
    from tithe.errors import RunError, UserError
    from tithe.utils.durable import explain

    try:
        result = HANDLERS[args.command](args)
    except UserError as error:
        answer.fail(error)
        return BAD_INPUT
    except RunError as error:
        answer.fail(error)
        return RUN_FAILED
    except KeyboardInterrupt as error:
        answer.fail(error, "interrupted")
        return INTERRUPTED
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        answer.fail(error, f"this needs the package {package}: pip install -e '.[{_EXTRAS[package]}]'")
        return BAD_INPUT
    except OSError as error:
        if error.errno not in _DISK:
            raise
        answer.fail(error, f"{error.filename}: {explain(error)}" if error.filename else explain(error))
        return BAD_INPUT
    return OK if answer.give(result) else RUN_FAILED
