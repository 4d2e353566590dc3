"""Which code made a run: the hash of all that can change its numbers."""

import ast
import functools
import hashlib
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WITHOUT_INFLUENCE = {"code.py", "generation.py", "hf.py", "plots.py"}  # of lib/


@functools.cache  # a run keeps the code that it was started with
def code_hash():
    """Of the files on which a run's numbers depend, without their comments."""
    files = [ROOT / name for name in ("model.py", "rivals.py", "train.py", "configurator.py", "data/dataset.py")]
    files += sorted(path for path in (ROOT / "lib").glob("*.py") if path.name not in WITHOUT_INFLUENCE)
    return hashlib.sha256("".join(map(bare_code, files)).encode()).hexdigest()


def bare_code(path):
    """A file's lines without comments, docstrings and empty ones: the same text under every version of Python."""
    source = path.read_text(encoding="utf-8")
    lines = source.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            first, last = node.body[0].lineno, node.body[0].end_lineno
            lines[first - 1 : last] = [""] * (last - first + 1)
    return "".join(line.rstrip() + "\n" for line in lines if line.strip())
