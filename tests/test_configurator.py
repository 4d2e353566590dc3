"""Config files and --key=value, in this process; tests/test_faults.py throws thousands of odd ones at it."""

from dataclasses import dataclass, fields

import helpers
import pytest

from configurator import UserError, configure
from model import GPTConfig
from sample import SampleConfig
from train import TrainConfig


@dataclass
class Keys:
    n_layer: int = 2  # how many
    rate: float = 0.5
    name: str = "x"  # a name = a text
    flag: bool = False
    maybe: bool | None = None
    limit: int | None = None
    title: str | None = None


def parse(*argv):
    return configure(argv, Keys)


def refused(*argv):
    with pytest.raises(UserError) as info:
        parse(*argv)
    assert info.value.status == 2
    return str(info.value)


def write(path, text):
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    "argument, value",
    [
        ("--n_layer=7", 7),
        ("--n_layer=-7", -7),
        ("--rate=1e-3", 1e-3),
        ("--rate=3", 3.0),
        ("--name=a=b=c", "a=b=c"),
        ("--name=", ""),
        ("--name=7", "7"),
        ("--name=None", "None"),
        ("--name=--flag=True", "--flag=True"),
        ("--name=naïve 😀", "naïve 😀"),
        ("--flag=True", True),
        ("--flag=false", False),
        ("--maybe=None", None),
        ("--maybe=true", True),
        ("--limit=None", None),
        ("--limit=5", 5),
        ("--title=None", None),
        ("--title=none", "none"),
    ],
)
def test_command_line_values(argument, value):
    key = argument[2:].split("=")[0]
    settings = parse(argument)
    assert getattr(settings, key) == value and type(getattr(settings, key)) is type(value)
    assert settings.given == {key}
    others = {field.name: field.default for field in fields(Keys) if field.name != key}
    assert settings.as_dict() == others | {key: value}


def test_left_to_right(tmp_path):
    one = write(tmp_path / "one.py", "n_layer = 10\nrate = 1\n")
    two = write(tmp_path / "two.py", "import math\n_half = 5\nn_layer = 2 * _half + 10\ntitle = None\n")
    settings = parse(one, "--rate=0.25", two)
    assert settings.as_dict() == Keys(n_layer=20, rate=0.25).__dict__
    assert settings.given == {"n_layer", "rate", "title"}
    assert settings.files == [one, two]
    assert parse(two, one).n_layer == 10
    assert type(parse(one).rate) is float


@pytest.mark.parametrize(
    "argument, words",
    [
        ("--n_layr=3", "command line: unknown key 'n_layr': did you mean n_layer?"),
        ("--zzz=3", "command line: unknown key 'zzz': --help lists"),
        ("--=3", "unknown key ''"),
        ("--n_layer=abc", "command line: n_layer must be int, not 'abc'"),
        ("--n_layer=2.5", "n_layer must be int, not '2.5'"),
        ("--n_layer=True", "n_layer must be int, not 'True'"),
        ("--n_layer=None", "n_layer must be int, not 'None'"),
        ("--n_layer=", "n_layer must be int, not ''"),
        ("--rate=fast", "rate must be float, not 'fast'"),
        ("--rate=nan", "rate must be float, not nan"),
        ("--rate=inf", "rate must be float, not inf"),
        ("--flag=1", "flag must be bool, not '1'"),
        ("--maybe=perhaps", "maybe must be bool or None, not 'perhaps'"),
        ("--limit=x", "limit must be int or None, not 'x'"),
        ("--n_layer=" + "9" * 30, "n_layer must be less than 2^63"),
        ("--n_layer=" + "9" * 9000, "n_layer must be int"),
        ("--flag", "write --key=value"),
        ("no_such_file.py", "no_such_file.py' cannot be read: No such file"),
        ("/", "'/' cannot be read: Is a directory"),
    ],
)
def test_command_line_mistakes(argument, words):
    message = refused(argument)
    assert words in message and len(message) < 300


@pytest.mark.parametrize(
    "text, words",
    [
        ("n_layr = 3", ": unknown key 'n_layr': did you mean n_layer?"),
        ("n_layer = '3'", ": n_layer must be int, not '3'"),
        ("n_layer = 3.0", ": n_layer must be int, not 3.0"),
        ("n_layer = True", ": n_layer must be int, not True"),
        ("n_layer = 10 ** 5000", ": n_layer must be less than 2^63"),
        ("rate = 10 ** 400", ": rate must be less than 2^63"),
        ("rate = float('nan')", ": rate must be float, not nan"),
        ("rate = None", ": rate must be float, not None"),
        ("name = 3", ": name must be str, not 3"),
        ("name = ['a'] * 1000", ": name must be str, not ['a', 'a'"),
        ("flag = 1", ": flag must be bool, not 1"),
        ("def n_layer(): pass", ": n_layer must be int, not <function"),
        ("from math import pi", ": unknown key 'pi'"),
        ("n_layer = 3\nrate = = 4", ", line 2: SyntaxError"),
        ("n_layer = 3\n\nrate = 1 / 0", ", line 3: ZeroDivisionError: division by zero"),
        ("n_layer = layers", ", line 1: NameError"),
        ("raise SystemExit(5)", ", line 1: SystemExit"),
        ("open('nowhere')", ", line 1: FileNotFoundError"),
        ("raise ValueError('two\\nlines')", "ValueError: two lines"),
    ],
)
def test_file_mistakes(text, words, tmp_path):
    path = write(tmp_path / "config.py", text + "\n")
    message = refused(path)
    assert path in message and words in message


def test_files_that_are_no_text(tmp_path):
    for content in (b"\xff\xfe", b"n_layer = 3\0"):
        (tmp_path / "config.py").write_bytes(content)
        assert str(tmp_path / "config.py") in refused(str(tmp_path / "config.py"))


def test_wrong_value_before_a_right_one(tmp_path):
    """A mistake is one, even if something later puts another value in its place."""
    path = write(tmp_path / "config.py", "n_layer = 'many'\n")
    assert "n_layer must be int" in refused(path, "--n_layer=3")


@pytest.mark.parametrize("script, classes", [("train.py", (TrainConfig, GPTConfig)), ("sample.py", (SampleConfig,))])
def test_help(script, classes):
    """Every key, with its default, type and comment; nothing is run."""
    lines = helpers.good(script, "--n_layer=nonsense", "--help").splitlines()
    assert lines[0].startswith(f"usage: python {script}")
    for field in (field for cls in classes for field in fields(cls)):
        (line,) = (line for line in lines if line.split("=")[0] == f"  --{field.name}")
        assert line.startswith(f"  --{field.name}={field.default} ")
        assert getattr(field.type, "__name__", "None") in line
    assert len(lines) == 2 + sum(len(fields(cls)) for cls in classes)
    if script == "train.py":
        (line,) = (line for line in lines if "--n_kv_head=" in line)
        assert line.split() == "--n_kv_head=None int or None grouped-query attention; None: n_head".split()
