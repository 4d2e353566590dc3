"""Your own text: the files named, and all .txt, .md and .rst files in the folders named. A file is a document."""

import hashlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.prepare import PrepareParser, read_text, write_dataset
from lib.errors import UserError, run_main, user_error_from_os

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
                found = {file.resolve(): file.relative_to(path).as_posix() for file in walk(path)}
            elif path.is_file():
                found = {path.resolve(): path.name}
            else:
                raise UserError(f"{path} is neither a file nor a folder")
            files |= {file: name for file, name in found.items() if file.stat().st_size}
    if not files:
        raise UserError(f"there is no text in {', '.join(map(str, paths))} (in folders: {', '.join(SUFFIXES)})")
    return files


def split_document(path, val_fraction):
    """Cut a single document at the end of a line, about val_fraction of it before its end."""
    text = read_text(path)
    cut = text.find("\n", int(len(text) * (1 - val_fraction))) + 1
    if cut in (0, len(text)):  # no later line: cut before the last one
        cut = text.rfind("\n", 0, len(text) - 1) + 1
    if cut == 0:
        raise UserError(f"{path} has only one line: give several lines, or several files, to split into train and val")
    return {"train": [text[:cut]], "val": [text[cut:]]}


def split_documents(files, val_fraction):
    """Whole documents up to val_fraction of the bytes go to val, in an order that only their names decide."""
    sizes = {file: file.stat().st_size for file in files}
    room = val_fraction * sum(sizes.values())
    val = set()
    for file in sorted(files, key=lambda file: hashlib.sha256(os.fsencode(files[file])).digest()):
        if sizes[file] <= room:
            room -= sizes[file]
            val.add(file)
    if not val:  # all are larger than that
        val.add(min(files, key=lambda file: (sizes[file], files[file])))
    return {
        "train": (read_text(file) for file in files if file not in val),
        "val": (read_text(file) for file in files if file in val),
    }


def main():
    parser = PrepareParser("text", __doc__, tokenizer="bytes")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="text files (UTF-8) and folders")
    parser.add_argument(
        "--val-fraction",
        type=fraction,
        default=0.1,
        metavar="X",
        help="share of the text for validation, between 0 and 1: whole files, or the end of a single one; default 0.1",
    )
    args = parser.parse()
    files = find_files(args.paths)
    if len(files) == 1:
        documents = split_document(next(iter(files)), args.val_fraction)
    else:
        documents = split_documents(files, args.val_fraction)
    write_dataset(args.folder, documents, args.tokenizer, source=f"{len(files)} text files")


if __name__ == "__main__":
    run_main(main)
