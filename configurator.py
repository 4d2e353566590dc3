"""
Settings from config files and --key=value overrides, applied from left to right:

    python train.py config/wikitext103.py config/method3_2.py --seed=2

A config file is Python that assigns keys; it is executed, so read a stranger's before you use it. The known keys, their
types, defaults and comments are the fields of dataclasses. Anything else is refused, in files too.
"""

import difflib
import inspect
import math
import os
import signal
import sys
import time
import traceback
from dataclasses import fields
from pathlib import Path
from types import ModuleType, NoneType
from typing import get_args


class UserError(Exception):
    """Something the user can put right: one line `error: …` and an exit status, no traceback."""

    def __init__(self, message, status=2):
        text = " ".join(str(message).split())  # one line, whatever the message quotes
        super().__init__(text if len(text) <= 1000 else f"{text[:500]} … {text[-500:]}")
        self.status = status


def run_main(main):
    """Call a script's main(); a UserError ends it with one line on stderr."""
    sys.stdout.reconfigure(errors="replace")  # a name or text that this terminal cannot show is no reason to end
    try:
        main()
    except UserError as error:
        if os.environ.get("RANK", "0") != "0":  # if all processes have this error, torchrun ends us with rank 0
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(2)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.status)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output, such as head, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:  # a folder that may not be written, a full disk
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


class Settings:
    """The value of every key as an attribute; `given` holds the keys that were set, `files` the config files."""

    def __init__(self, *dataclasses):
        self.types, self.given, self.files = {}, set(), []
        for field in (field for cls in dataclasses for field in fields(cls)):
            self.types[field.name] = field.type
            setattr(self, field.name, field.default)

    def as_dict(self):
        return {key: getattr(self, key) for key in self.types}

    def set(self, key, value, where):
        self.check_known(key, where)
        kinds = get_args(self.types[key]) or (self.types[key],)
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise UserError(f"{where}: {key} must be less than 2^63, not {shorten(value)}")
        if type(value) is int and float in kinds:
            value = float(value)
        if type(value) not in kinds or (type(value) is float and not math.isfinite(value)):
            raise UserError(f"{where}: {key} must be {type_name(kinds)}, not {shorten(value)}")
        setattr(self, key, value)
        self.given.add(key)

    def check_known(self, key, where):
        if key not in self.types:
            near = difflib.get_close_matches(key, self.types, n=1)
            hint = f"did you mean {near[0]}?" if near else "--help lists the known ones"
            raise UserError(f"{where}: unknown key {shorten(key)}: {hint}")


def configure(argv, *dataclasses):
    """The dataclasses' fields as Settings, after the files and overrides of argv."""
    settings = Settings(*dataclasses)
    if "--help" in argv or "-h" in argv:
        print_help(dataclasses)
        sys.exit(0)
    for argument in argv:
        if not argument.startswith("--"):
            for key, value in read_file(argument).items():
                settings.set(key, value, where=argument)
            settings.files.append(argument)
        elif "=" not in argument:
            raise UserError(f"{shorten(argument)}: write --key=value")
        else:
            key, text = argument[2:].split("=", 1)
            settings.check_known(key, where="command line")
            settings.set(key, parse(text, settings.types[key]), where="command line")
    return settings


def read_file(path):
    """What a config file assigns. Modules and names that start with _ are its own business."""
    try:
        source = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"config file {shorten(path)} cannot be read: {reason}") from None
    names = {}
    try:
        exec(compile(source, path, "exec"), names)
    except (Exception, SystemExit) as error:  # the file's own code may raise anything
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = getattr(error, "lineno", None) or (lines or ["?"])[-1]
        raise UserError(f"config file {path}, line {line}: {type(error).__name__}: {error}") from None
    return {k: v for k, v in names.items() if not k.startswith("_") and not isinstance(v, ModuleType)}


def parse(text, expected):
    """The value that a command line text stands for; where it stands for none of the type, the text itself."""
    kinds = get_args(expected) or (expected,)
    if text == "None" and NoneType in kinds:
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in {int, float}.intersection(kinds):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def type_name(kinds):
    return " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)


def shorten(value):
    try:
        text = repr(value)
    except ValueError:  # an int with more digits than Python prints
        text = "a huge number"
    return text if len(text) <= 80 else text[:77] + "..."


def print_help(dataclasses):
    print(f"usage: python {os.path.basename(sys.argv[0])} [config/FILE.py …] [--key=value …]\n")
    for cls in dataclasses:
        lines = inspect.getsource(cls).splitlines()
        for field in fields(cls):
            declaration = next(line for line in lines if line.strip().startswith(f"{field.name}:"))
            comment = declaration.partition("  # ")[2]
            kind = type_name(get_args(field.type) or (field.type,))
            print(f"  --{field.name + '=' + str(field.default):38} {kind:14} {comment}")
