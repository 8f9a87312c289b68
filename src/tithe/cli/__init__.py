"""The command line: parse first, import heavy things second.

`main` answers `--help` and usage errors with the standard library alone; a handler imports the configuration, and only
what really runs imports `tithe.build` and with it torch.
"""

from tithe.cli.main import main

__all__ = ["main"]
