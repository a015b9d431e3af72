"""Real text that comes with Python: the language reference (as `help()` shows it) and the library's docstrings."""

import ast
import inspect
import re
import sysconfig
from functools import cache
from pathlib import Path

import torch


@cache
def language_reference() -> str:
    from pydoc_data.topics import topics

    return printable("\n\n".join(topics[name] for name in sorted(topics)))


@cache
def docstrings() -> list[str]:
    """The docstrings of the standard library's modules, classes and functions, in the order of the files."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                found.append(printable(inspect.cleandoc(text)))
    return found


def printable(text: str) -> str:
    return re.sub(r"[^\n -~]", "?", text)  # printable ASCII keeps the vocabulary small


@cache
def sentences(longest: int = 64) -> list[str]:
    """Sentences of running text, 12 to `longest` characters long."""
    texts = [*docstrings(), language_reference()]
    paragraphs = [" ".join(p.split()) for text in texts for p in text.split("\n\n") if not p.startswith(" ")]
    found = (s.strip() for p in paragraphs for s in re.split(r"(?<=[.!?]) ", p))
    plain = r"[A-Z][A-Za-z0-9 ,;:'\"()-]*[.!?]"
    return list(dict.fromkeys(s for s in found if 12 <= len(s) <= longest and re.fullmatch(plain, s)))


class Characters:
    """A vocabulary of single characters behind three special tokens."""

    pad, start, end = 0, 1, 2

    def __init__(self, characters: str):
        self.characters = characters
        self.index = {c: i + 3 for i, c in enumerate(characters)}

    def __len__(self) -> int:
        return len(self.characters) + 3

    def encode(self, text: str) -> list[int]:
        return [self.index[c] for c in text]

    def decode(self, ids) -> str:
        return "".join(self.characters[i - 3] for i in map(int, ids) if i >= 3)

    def padded(self, texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token rows of different lengths as one tensor, and their lengths."""
        lengths = torch.tensor([len(t) for t in texts])
        rows = torch.full((len(texts), int(lengths.max())), self.pad)
        for row, ids in zip(rows, texts, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        return rows, lengths
