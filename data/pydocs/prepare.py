"""
The built-in corpus: English prose that every Python carries, so it needs no network. train.py makes it by itself.

    python data/pydocs/prepare.py
    python data/pydocs/prepare.py --tokenizer gpt2 --out pydocs-gpt2

A document is one topic of Python's language reference (pydoc_data.topics), or all docstrings of one module of the
standard library, each under its name. The modules are parsed, never imported: importing can do anything.
The text depends on the Python version; meta.json's source and source_sha256 say which one it was.
"""

import ast
import hashlib
import platform
import sys
import sysconfig
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.prepare import PrepareParser, write_dataset
from lib.errors import UserError, run_main

TEST_FOLDERS = {"test", "tests", "idle_test"}


def topics():
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UserError("this Python lacks pydoc_data.topics: use a full installation") from error
    # A chapter's sections come again as topics of their own: a topic that mostly repeats longer ones is left out.
    kept, seen = {}, set()
    for name, text in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0])):
        paragraphs = text.split("\n\n")
        if sum(len(paragraph) for paragraph in paragraphs if paragraph not in seen) > len(text) / 2:
            kept[f"topic {name}"] = text
            seen.update(paragraphs)
    return kept


def modules():
    """(dotted name, source) of every standard library module that is written in Python."""
    root = Path(sysconfig.get_path("stdlib"))
    for name in sorted(sys.stdlib_module_names):
        for path in [root / f"{name}.py", *sorted((root / name).rglob("*.py"))]:
            parts = path.relative_to(root).with_suffix("").parts
            if path.is_file() and not TEST_FOLDERS.intersection(parts):
                yield ".".join(parts).removesuffix(".__init__"), path.read_bytes()


def docstrings(node, name):
    """(heading, docstring) of a module, class or function and of all that it defines, in the source's order."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        if isinstance(node, ast.Module):
            heading = name
            name = ""
        else:
            name = f"{name}.{node.name}" if name else node.name
            heading = f"class {name}" if isinstance(node, ast.ClassDef) else f"{name}({ast.unparse(node.args)})"
        docstring = ast.get_docstring(node)
        if docstring:
            yield heading, docstring
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.ExceptHandler)):  # definitions also stand under if and try
            yield from docstrings(child, name)


def all_documents():
    """{name: text}, every docstring once: what modules share is left to the first."""
    documents = topics()
    seen = set()
    for name, source in modules():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old escape sequences
                tree = ast.parse(source)
        except (SyntaxError, ValueError):  # a template or another Python's syntax, not a module of this Python
            continue
        parts = []
        for heading, docstring in docstrings(tree, name):
            if docstring not in seen:
                seen.add(docstring)
                parts.append(f"{heading}\n\n{docstring}\n")
        if parts:
            documents[f"module {name}"] = "\n".join(parts).encode(errors="replace").decode()  # no lone surrogates
    if not seen:
        raise UserError("this Python lacks the source of its standard library: use a full installation")
    return documents


def is_val(name):
    return hashlib.sha256(name.encode()).digest()[0] % 10 == 0


def prepare(folder, tokenizer):
    documents = all_documents()
    write_dataset(
        folder,
        {
            "train": [text for name, text in documents.items() if not is_val(name)],
            "val": [text for name, text in documents.items() if is_val(name)],
        },
        tokenizer,
        source=f"topics and docstrings of Python {platform.python_version()}",
    )


def main():
    args = PrepareParser("pydocs", __doc__, tokenizer="bytes").parse()
    prepare(args.folder, args.tokenizer)


if __name__ == "__main__":
    run_main(main)
