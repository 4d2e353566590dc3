"""
Your own text: the files named, and all .txt, .md and .rst files in the folders named. A file is a document.

    python data/text/prepare.py book.txt notes/
    python data/text/prepare.py ~/papers --out papers --tokenizer gpt2 --val-fraction 0.05

Then: python train.py --dataset=text (or the name after --out).
"""

import hashlib
import itertools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.prepare import PrepareParser, read_text, write_dataset
from lib.errors import UserError, refuse, run_main, user_error_from_os

SUFFIXES = (".txt", ".md", ".rst")


def fraction(text):
    value = float(text)
    if not 0 < value < 1:
        raise ValueError
    return value


def walk(folder):
    def stop(error):
        raise error

    for place, folders, names in os.walk(folder, onerror=stop):
        folders[:] = sorted(name for name in folders if not name.startswith("."))  # not into .git or .venv
        for name in sorted(names):
            if name.lower().endswith(SUFFIXES) and not name.startswith("."):
                yield Path(place, name)


def find_files(paths):
    """{file: name}, every file once, empty ones left out; the name does not depend on where the folders lie."""
    files = {}
    for path in paths:
        with user_error_from_os(f"read {path}"):
            if path.is_dir():
                found = {file: file.relative_to(path).as_posix() for file in walk(path)}
            elif path.is_file():
                found = {path: path.name}
            else:
                raise UserError(f"{path} is neither a file nor a folder")
        for file, name in found.items():
            with user_error_from_os(f"read {file}"):  # a link may lead nowhere, or to itself
                if file.stat().st_size:
                    files[file.resolve()] = name
    if not files:
        raise UserError(f"there is no text in {', '.join(map(str, paths))} (in folders: {', '.join(SUFFIXES)})")
    return files


def split_documents(files, val_fraction):
    """
    {"train": texts, "val": texts}. Whole files go to val, in an order that only their names decide; where they cannot
    come near val_fraction of the bytes, the end of the largest other file goes there as well.
    """
    sizes = {file: file.stat().st_size for file in files}
    asked = room = val_fraction * sum(sizes.values())
    val = set()
    for file in sorted(files, key=lambda file: hashlib.sha256(os.fsencode(files[file])).digest()):
        if sizes[file] <= room:
            room -= sizes[file]
            val.add(file)
    cut, start, end = None, "", ""
    if room > asked / 2:
        others = sorted(files.keys() - val, key=lambda file: (sizes[file], files[file]))
        if len(others) > 1 and sizes[others[0]] <= room + asked / 2:  # somewhat more is near, too
            val.add(others[0])
        else:
            cut = others[-1]
            start, end = cut_at_line(read_text(cut), room / sizes[cut])
            if not start and not val:
                refuse(len(others) == 1, f"{cut} has only one line: give several lines, or several files, to split")
                val.add(others[0])
    train = [file for file in files if file not in val and not (start and file == cut)]
    return {
        "train": itertools.chain([start], map(read_text, train)),
        "val": itertools.chain([end], map(read_text, filter(val.__contains__, files))),
    }


def cut_at_line(text, fraction):
    """The text in two at the end of a line, about that fraction before its end; two empty ones if it is one line."""
    cut = text.find("\n", int(len(text) * (1 - fraction))) + 1
    if cut in (0, len(text)):  # no later line: cut before the last one
        cut = text.rfind("\n", 0, len(text) - 1) + 1
    return (text[:cut], text[cut:]) if cut else ("", "")


def main():
    parser = PrepareParser("text", __doc__, tokenizer="bytes")
    parser.usage += " PATH …"
    parser.source.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="text files (UTF-8) and folders")
    parser.source.add_argument(
        "--val-fraction",
        type=fraction,
        default=0.1,
        metavar="X",
        help="share of the text for validation, between 0 and 1: whole files where they come near it, otherwise also "
        "the end of one; default 0.1",
    )
    args = parser.parse()
    files = find_files(args.paths)
    documents = split_documents(files, args.val_fraction)
    write_dataset(args.folder, documents, args.tokenizer, source=f"{len(files)} text files")


if __name__ == "__main__":
    run_main(main)
