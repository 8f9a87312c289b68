"""Runs untrusted Python against tests that it can neither see nor fake. What is covered and what is not is written in
docs/sandbox.md. Free of torch; Linux only."""

from tithe.sandbox.cases import AssertTests, FunctionTest, StdioTest, Tests, parse_tests, same_output, same_result
from tithe.sandbox.host import Sandbox
from tithe.sandbox.limits import Limits, Outcome, Verdict
from tithe.sandbox.rooms import SandboxUnavailableError

__all__ = [
    "AssertTests",
    "FunctionTest",
    "Limits",
    "Outcome",
    "Sandbox",
    "SandboxUnavailableError",
    "StdioTest",
    "Tests",
    "Verdict",
    "parse_tests",
    "same_output",
    "same_result",
]
