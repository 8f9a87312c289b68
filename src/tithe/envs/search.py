"""Search in a local folder of text files: BM25 over paragraphs (Robertson and Zaragoza, 2009), in memory."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Final

from tithe.envs.tools import Tool, tool_from_function
from tithe.errors import ConfigError

SUFFIXES: Final = frozenset({".txt", ".md", ".rst"})
MAX_BYTES: Final = 64 << 20
PASSAGES: Final = 3
_K1, _B = 1.2, 0.75


class TextFolder:
    """Paragraphs of all text files under a folder, read once.

    Raises `ConfigError` when there are none, or more than `MAX_BYTES` of them.
    """

    def __init__(self, folder: Path, key: str = "task.tools") -> None:
        files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
        if not files:
            raise ConfigError(f"{key}: {folder} holds no {', '.join(sorted(SUFFIXES))} file to search in", key)
        if sum(path.stat().st_size for path in files) > MAX_BYTES:
            raise ConfigError(f"{key}: {folder} holds more than {MAX_BYTES >> 20} MiB of text", key)
        self._passages: list[tuple[str, str]] = []
        for path in files:
            text = path.read_text(encoding="utf-8", errors="replace")
            name = path.relative_to(folder).as_posix()
            self._passages += [(name, part.strip()) for part in re.split(r"\n\s*\n", text) if part.strip()]
        self._counts = [Counter(_words(text)) for _, text in self._passages]
        self._lengths = [sum(counts.values()) for counts in self._counts]
        self._mean = sum(self._lengths) / max(1, len(self._lengths))
        self._in_passages = Counter(word for counts in self._counts for word in counts)

    def search(self, query: str) -> list[tuple[str, str]]:
        """(file, paragraph) of the best matches, best first; equal ones in the order of the folder."""
        words = set(_words(query))
        scores = [self._score(words, number) for number in range(len(self._passages))]
        best = sorted(range(len(scores)), key=lambda number: (-scores[number], number))[:PASSAGES]
        return [self._passages[number] for number in best if scores[number] > 0]

    def _score(self, words: set[str], number: int) -> float:
        counts, length, n = self._counts[number], self._lengths[number], len(self._passages)
        score = 0.0
        for word in words & counts.keys():
            found = self._in_passages[word]
            rarity = math.log(1 + (n - found + 0.5) / (found + 0.5))
            often = counts[word]
            score += rarity * often * (_K1 + 1) / (often + _K1 * (1 - _B + _B * length / self._mean))
        return score


def search_tool(folder: Path, key: str = "task.tools") -> Tool:
    """The tool `search` over a folder."""
    texts = TextFolder(folder, key)

    def search(query: Annotated[str, "words to look for"]) -> str:
        """Search the library for passages."""
        found = texts.search(query)
        return "\n\n".join(f"[{name}] {text}" for name, text in found) or "nothing was found"

    return tool_from_function(search, key)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
