"""
Settings from config files and --key=value overrides, applied from left to right:

    python train.py config/wikitext103.py config/method3_2.py --seed=2

A config file is Python that assigns keys; it is executed, so read a stranger's before you use it. The known keys, their
types, defaults and comments are the fields of dataclasses. Anything else is refused, in files too.
"""

import difflib
import enum
import inspect
import math
import re
import shutil
import sys
import textwrap
import traceback
from dataclasses import fields
from pathlib import Path
from types import ModuleType, NoneType
from typing import get_args

from lib.errors import UserError, refuse
from lib.files import read_limited

CONFIG_DIR = Path(__file__).resolve().parent / "config"
MAX_FILE_BYTES = 1_000_000


class Settings:
    """
    The value of every key as an attribute; `given` holds the keys that were set, `files` the config files, `folders`
    the folders that were named.
    """

    def __init__(self, *dataclasses):
        self.types, self.given, self.files, self.folders = {}, set(), [], []
        for field in (field for cls in dataclasses for field in fields(cls)):
            self.types[field.name] = field.type
            setattr(self, field.name, field.default)

    def as_dict(self):
        return {key: getattr(self, key) for key in self.types}

    def set(self, key, value, where):
        self.check_known(key, where)
        setattr(self, key, checked(f"{where}: {key}", value, self.types[key]))
        self.given.add(key)

    def check_known(self, key, where):
        if key not in self.types:
            near = difflib.get_close_matches(key, self.types, n=1)
            hint = f"did you mean {near[0]}?" if near else "--help lists the known ones"
            raise UserError(f"{where}: unknown key {shorten(key)}: {hint}")


def kinds_of(expected):
    """The types that a field's annotation, such as int | None, allows."""
    return get_args(expected) or (expected,)


def checked(name, value, expected):
    """value as one of the expected types, or a UserError that speaks of it by its name."""
    kinds = kinds_of(expected)
    try:
        return convert(value, kinds)
    except ValueError as error:
        raise UserError(f"{name} must be {str(error) or kind_names(kinds)}, not {shorten(value)}") from None


def convert(value, kinds):
    """value as one of the kinds; a ValueError says what it must be, where the kinds' names do not."""
    if type(value) in (list, tuple) and tuple in kinds:
        return tuple(convert(number, (float,)) for number in value)
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ValueError("less than 2^63")
    if type(value) is int and float in kinds:
        value = float(value)
    if type(value) not in kinds or (type(value) is float and not math.isfinite(value)):
        raise ValueError
    return value


def configure(argv, *dataclasses, folders=""):
    """
    The dataclasses' fields as Settings, after the files and overrides of argv. folders: where other arguments are
    allowed, how the usage line of --help shows them. --help also shows the docstring of the first dataclass's module.
    """
    settings = Settings(*dataclasses)
    if "--help" in argv or "-h" in argv:
        print_help(dataclasses, folders)
        sys.exit(0)
    for argument in argv:
        if argument.startswith("-"):
            refuse(not re.match("--.*=", argument), f"{shorten(argument)}: write --key=value")
            key, text = argument[2:].split("=", 1)
            settings.check_known(key, where="command line")
            settings.set(key, parse(text, kinds_of(settings.types[key])), where="command line")
        elif folders and not argument.endswith(".py"):
            settings.folders.append(argument)
        else:
            for key, value in read_file(argument).items():
                settings.set(key, value, where=argument)
            settings.files.append(argument)
    return settings


def read_file(path):
    """What a config file assigns. Modules and names that start with _ are its own business."""
    if not Path(path).exists():
        near = difflib.get_close_matches(Path(path).stem, [file.stem for file in CONFIG_DIR.glob("*.py")], n=1)
        hint = f"did you mean config/{near[0]}.py?" if near else "settings are written --key=value"
        raise UserError(f"there is no config file {shorten(path)}: {hint}")
    try:
        source = read_limited(path, MAX_FILE_BYTES).decode()
    except UnicodeDecodeError:
        raise UserError(f"config file {path} is not UTF-8 text") from None
    names = {}
    try:
        exec(compile(source, path, "exec"), names)
    except (Exception, SystemExit) as error:  # the file's own code may raise anything
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = getattr(error, "lineno", None) or (lines or ["?"])[-1]
        raise UserError(f"config file {path}, line {line}: {type(error).__name__}: {error}") from None
    return {k: v for k, v in names.items() if not k.startswith("_") and not isinstance(v, ModuleType)}


def parse(text, kinds):
    """The value that a command line text stands for; where it stands for none of the kinds, the text itself."""
    if text == "None" and NoneType in kinds:
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        if tuple in kinds:
            return tuple(float(number) for number in text.split(","))
        if int in kinds or float in kinds:
            return int(text) if int in kinds else float(text)
    except ValueError:
        pass
    return text


def kind_names(kinds):
    names = {NoneType: "None", tuple: "numbers a,b,…"}
    return " or ".join(names.get(kind, kind.__name__) for kind in kinds)


def shorten(value):
    try:
        text = repr(value)
    except ValueError:  # an int with more digits than Python prints
        text = "a huge number"
    return text if len(text) <= 80 else text[:77] + "..."


# --- --help -----------------------------------------------------------------------------------------------------------


def print_help(dataclasses, folders):
    about = inspect.getdoc(sys.modules[dataclasses[0].__module__])
    command = re.search(r"python (-m )?\S+", about)[0]
    print(f"usage: {command} {folders or '[config/FILE.py …]'} [--key=value …]\n\n{about}")
    width = shutil.get_terminal_size((120, 24)).columns
    for title, keys in (group for cls in dataclasses for group in help_groups(cls)):
        print(f"\n{title}")
        for field, comment in keys:
            start = f"  --{field.name + '=' + str(field.default):32} {kind_names(kinds_of(field.type)):13} "
            print(textwrap.fill(start + comment, width, subsequent_indent=" " * 51, break_on_hyphens=False))


def help_groups(cls):
    """[(title, [(field, comment), …]), …]: a comment line of its own in the dataclass's source is a title."""
    known = {field.name: field for field in fields(cls)}
    groups = [("settings", [])]
    for line in inspect.getsource(cls).splitlines():
        name = re.match(r"    (\w*):? ", line)
        if line.startswith("    # "):
            groups.append((line.removeprefix("    # "), []))
        elif name and name[1] in known:
            groups[-1][1].append((known[name[1]], with_choices(line.partition("  # ")[2], cls)))
    return [group for group in groups if group[1]]


def with_choices(comment, cls):
    """For the name of a collection in the class's module, such as ACTIVATIONS, the values that it holds."""

    def choices(name):
        found = getattr(sys.modules[cls.__module__], name[0], None)
        if isinstance(found, enum.EnumMeta):
            found = [member.value for member in found]
        return ", ".join(map(str, found)) if isinstance(found, (dict, list, tuple)) else name[0]

    return re.sub(r"\b[A-Z]\w+", choices, comment)
