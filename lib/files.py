"""Files written whole or not at all, and read within limits. A symbolic link is replaced, never written through."""

import contextlib
import json
import os
from pathlib import Path

from lib.errors import UserError, refuse, user_error_from_os


@contextlib.contextmanager
def open_whole(path):
    """A binary file that appears under its name, complete and on disk, when the block ends, and never before."""
    path = Path(path)
    temporary = temporary_name(path)
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the new name is safe only once the folder is; Windows cannot open folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def temporary_name(path):
    """Beside path, free to be made. A process that is killed leaves it behind: NAME.PID.tmp."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # of another process that had our number
    return temporary


def write_whole(path, content):
    with open_whole(path) as file:
        file.write(content)


def write_json(path, content):
    write_whole(path, json.dumps(content, indent=2).encode() + b"\n")


def replace_with_link(path, target):
    """Make path a second name of target, a hard link."""
    temporary = temporary_name(Path(path))
    os.link(target, temporary)
    os.replace(temporary, path)
    temporary.unlink(missing_ok=True)  # it is still there if path was the same file already


def read_limited(path, most_bytes):
    """The bytes of a regular file of at most that size: a device may have no end."""
    with user_error_from_os(f"read {path}"):
        refuse(Path(path).exists() and not Path(path).is_file(), f"{path} is not a regular file")
        with open(path, "rb") as file:
            content = file.read(most_bytes + 1)
    refuse(len(content) > most_bytes, f"{path} is too large: more than {most_bytes:,} bytes")
    return content


def read_json(path, most_bytes=1 << 26):
    """The object in a JSON file."""
    try:
        content = json.loads(read_limited(path, most_bytes))
    except UserError:
        raise
    except (ValueError, RecursionError):
        content = None
    refuse(not isinstance(content, dict), f"{path} is damaged: it holds no JSON object")
    return content
