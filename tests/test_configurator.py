"""Config files and --key=value, their --help, and how a script ends; tests/test_faults.py has thousands of odd ones."""

import importlib
import itertools
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import helpers
import pytest

import configurator
from configurator import configure
from lib.errors import UserError

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Keys:
    n_layer: int = 2  # how many
    rate: float = 0.5
    name: str = "x"  # a name = a text
    flag: bool = False
    maybe: bool | None = None
    limit: int | None = None
    title: str | None = None
    scale: tuple | None = None


def parse(*argv, **options):
    return configure(argv, Keys, **options)


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
        ("--scale=8,1,4.5,8192", (8.0, 1.0, 4.5, 8192.0)),
        ("--scale=7", (7.0,)),
        ("--scale=None", None),
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
    two = write(tmp_path / "two.py", "import math\n_half = 5\nn_layer = 2 * _half + 10\ntitle = None\nscale = [1, 2]\n")
    settings = parse(one, "--rate=0.25", two)
    assert settings.as_dict() == Keys(n_layer=20, rate=0.25, scale=(1.0, 2.0)).__dict__
    assert settings.given == {"n_layer", "rate", "title", "scale"}
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
        ("--scale=1,x", "scale must be numbers a,b,… or None, not '1,x'"),
        ("--scale=1,inf", "scale must be numbers a,b,… or None, not (1.0, inf)"),
        ("--scale=", "scale must be numbers"),
        ("--flag", "write --key=value"),
        ("-n_layer=3", "write --key=value"),
        ("no_such_file.py", "there is no config file 'no_such_file.py': settings are written --key=value"),
        ("method3_2", "there is no config file 'method3_2': did you mean config/method3_2.py?"),
        ("config/method32.py", "did you mean config/method3_2.py?"),
        ("/", "/ is not a regular file"),
        ("/dev/zero", "/dev/zero is not a regular file"),
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
        ("scale = [1, 'x']", ": scale must be numbers a,b,… or None, not [1, 'x']"),
        ("scale = [1, True]", ": scale must be numbers"),
        ("scale = [10 ** 30]", ": scale must be less than 2^63"),
        ("scale = 8", ": scale must be numbers"),
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


def test_large_file(tmp_path):
    path = write(tmp_path / "config.py", "n_layer = 3\n#" + "x" * 1_000_000)
    assert f"{path} is too large: more than 1,000,000 bytes" in refused(path)


def test_folders(tmp_path):
    one = write(tmp_path / "one.py", "n_layer = 10\n")
    settings = parse("out/a", one, "--rate=1", "out/b", folders="[FOLDER …]")
    assert settings.folders == ["out/a", "out/b"] and settings.files == [one] and settings.n_layer == 10
    assert parse(one).folders == []
    with pytest.raises(UserError, match="there is no config file 'absent"):
        parse("absent.py", folders="[FOLDER …]")


def test_mistakes_of_the_real_command(tmp_path):
    large = write(tmp_path / "large.py", "#" * 1_000_001)
    for argument, words in {
        "method3_2": "did you mean config/method3_2.py?",
        "/dev/zero": "/dev/zero is not a regular file",
        large: "too large",
        "--n_layr=3": "did you mean n_layer?",
    }.items():
        helpers.check_error(helpers.run("train.py", argument), words)


# --- --help -----------------------------------------------------------------------------------------------------------

CHOICES = {"small": 1, "large": 2}


@dataclass
class Documented:
    # what is made
    size: str = "small"  # one of CHOICES
    colour: str = "red"  # red, green; a NAME that is none stays
    # how
    limit: int | None = None  # 0: none


def test_help_of_a_class():
    assert configurator.help_groups(Documented) == [
        (
            "what is made",
            [
                (fields(Documented)[0], "one of small, large"),
                (fields(Documented)[1], "red, green; a NAME that is none stays"),
            ],
        ),
        ("how", [(fields(Documented)[2], "0: none")]),
    ]


# every command, by the module that holds its main()
FILES = [ROOT / "train.py", ROOT / "sample.py", *(ROOT / "tools").glob("*.py"), *(ROOT / "tools").glob("*/__main__.py")]
COMMANDS = [".".join(f.relative_to(ROOT).with_suffix("").parts) for f in sorted(FILES) if "run_main(" in f.read_text()]


@pytest.mark.parametrize("script", COMMANDS)
def test_help(script, monkeypatch, capsys):
    """Usage, at least two examples that work, and under titles every key with its default, kind and a word."""
    asked = []
    monkeypatch.setattr(configurator, "print_help", lambda *args: asked.append(args))
    monkeypatch.setattr(sys, "argv", [script, "--n_layer=nonsense", "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(script).main()
    assert not end.value.code
    monkeypatch.undo()
    [(classes, folders)] = asked
    configurator.print_help(classes, folders)
    text = capsys.readouterr().out
    lines = text.splitlines()
    command = f"python -m {script.removesuffix('.__main__')}" if script.startswith("tools.") else f"python {script}.py"
    assert lines[0].startswith(f"usage: {command} ")
    examples = [line for line in lines if re.match(r"    (python|torchrun) ", line)]
    assert len(examples) >= 2
    monkeypatch.chdir(ROOT)
    for example in examples:
        words = shlex.split(example, comments=True)
        at = next(i for i, word in enumerate(words) if word == f"{script}.py" or word.startswith("tools."))
        configure(words[at + 1 :], *classes, folders=folders)
    for field in (field for cls in classes for field in fields(cls)):
        (line,) = (line for line in lines if line.startswith(f"  --{field.name}="))
        kind = configurator.kind_names(configurator.kinds_of(field.type))
        rest = line.removeprefix(f"  --{field.name}={field.default} ").strip()
        assert rest.startswith(kind) and rest != kind, f"{field.name} has no word in --help"
    titles = [before for before, line in itertools.pairwise(lines) if line.startswith("  --")]
    titles = [title for title in titles if not title.startswith(" ")]
    assert "" not in titles and len(titles) == sum(len(configurator.help_groups(cls)) for cls in classes)


def test_help_of_the_real_command():
    """Nothing is run, and the allowed values are there."""
    command = [sys.executable, "train.py", "--help", "--n_layer=nonsense"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert text.startswith("usage: python train.py ") and "python train.py config/method3_2.py" in text
    text = " ".join(text.split())
    assert "--n_kv_head=None int or None grouped-query attention; None: n_head" in text
    for choice in ("swiglu, geglu", "layernorm, rmsnorm", "baseline, method1", "bfloat16, float16, float32"):
        assert choice in text


# --- how a script ends ------------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys
sys.path.insert(0, {root!r})
from lib.errors import UserError, run_main
def main():
    with open("work", "wb", buffering=0) as file:
        for i in range({lines}):
            print("x" * 100)
        print("y" * 100, file=sys.stderr)
        {code}
        os.write(1, b"stray"), os.write(2, b"stray")  # as a C library prints
        file.write(b"done")
run_main(main, output_optional={optional})
"""


def run_script(folder, optional, code="pass", stdout=None, stderr=None, closed=(), lines=300):
    """(exit status, what its stderr has beside the 100 y, what it did). stdout, stderr: None, or a file to print to."""
    script = write(folder / "script.py", SCRIPT.format(root=str(ROOT), optional=optional, code=code, lines=lines))
    process = subprocess.run(
        [sys.executable, script],
        stdout=stdout or subprocess.PIPE,
        stderr=stderr or subprocess.PIPE,
        preexec_fn=lambda: [os.close(number) for number in closed],
        cwd=folder,
        text=True,
    )
    return process.returncode, (process.stderr or "").replace("y" * 100 + "\n", ""), (folder / "work").read_text()


@pytest.fixture
def full():
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full; a pipe without a reader stands for it")
    with open("/dev/full", "wb") as file:
        yield file


@pytest.fixture
def unread():
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


QUIET = "os.write = print"  # no stray output into a broken file


@pytest.mark.parametrize("closed", [(1,), (2,), (1, 2), (0, 1, 2)])
def test_training_does_not_need_open_output(closed, tmp_path):
    assert run_script(tmp_path, True, closed=closed) == (1, "" if 2 in closed else "stray", "done")


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("kind", ["full", "unread"])
def test_training_does_not_need_room_or_readers(kind, name, tmp_path, request):
    output = {name: request.getfixturevalue(kind)}
    for lines in (300, 1):  # noticed at once, or when the buffer is emptied
        assert run_script(tmp_path, True, QUIET, lines=lines, **output) == (1, "", "done")
    end = "sys.exit(0)", "sys.exit(130)"  # a status that says more than 1 stays
    assert [run_script(tmp_path, True, f"{QUIET}; {code}", lines=1, **output)[0] for code in end] == [1, 130]


def test_training_with_lost_output(tmp_path):
    """The real one: its checkpoints, metrics and evaluation are those of a run that somebody reads."""
    helpers.good("train.py", *helpers.tiny(tmp_path / "read"))
    unread = "import os; reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1); os.dup2(writer, 2)"
    process = helpers.run("train.py", *helpers.tiny(tmp_path / "unread"), before=unread)
    assert process.status == 1
    helpers.assert_same_run(tmp_path / "read", tmp_path / "unread")


def test_where_output_is_the_work(tmp_path, full):
    for lines in (300, 1):
        status, stderr, _ = run_script(tmp_path, False, QUIET, stdout=full, lines=lines)
        assert (status, stderr) == (2, "error: [Errno 28] No space left on device\n")


def test_readers_that_had_enough(tmp_path, unread):
    for lines in (300, 1):
        assert run_script(tmp_path, False, QUIET, stdout=unread, lines=lines)[:2] == (141, "")


@pytest.mark.parametrize("optional", [True, False])
def test_exit_statuses(optional, tmp_path):
    assert run_script(tmp_path, optional, QUIET) == (0, "", "done")
    assert run_script(tmp_path, optional, "raise UserError('two\\nlines', status=7)") == (7, "error: two lines\n", "")
    assert run_script(tmp_path, optional, "raise KeyboardInterrupt") == (130, "", "")
    status, stderr, _ = run_script(tmp_path, optional, "open('/nowhere/a')")
    assert (status, stderr) == (2, "error: [Errno 2] No such file or directory: '/nowhere/a'\n")
    status, stderr, _ = run_script(tmp_path, optional, "1 / 0")
    assert status == 1 and "ZeroDivisionError" in stderr  # our own mistakes are shown as such
