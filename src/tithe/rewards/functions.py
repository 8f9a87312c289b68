"""Finds a user's function from its name in the configuration."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tithe.errors import ConfigError, FailureCause, boundary


def load_function(reference: str, key: str) -> Callable[..., Any]:
    """The function named by ``module:function`` or ``file.py:function``; its module is imported, so its code runs.

    Raises `ConfigError` for `key` when the name is malformed, the module cannot be imported (with its own error), or
    there is no such function (with the nearest name).
    """
    where, _, name = reference.rpartition(":")
    if not where or not name:
        raise ConfigError(f"{key}: {reference!r} is not of the form module:function or file.py:function", key)
    with boundary(FailureCause.ENVIRONMENT) as slot:
        module = _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    if slot.failure is not None:
        raise ConfigError(f"{key}: {reference} cannot be imported: {slot.failure.message}", key)
    function = getattr(module, name, None)
    if not callable(function):
        near = difflib.get_close_matches(name, [n for n in dir(module) if callable(getattr(module, n))], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{key}: {where} has no function {name!r}{hint}", key)
    return function


def _import_file(path: Path) -> ModuleType:
    """Import one file under a name of its own; its neighbours can be imported by it as when it is run."""
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    name = f"tithe_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
