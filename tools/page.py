"""
A page to look at runs, without a server: a folder of three files, or one file to send to somebody.

    python -m tools.page --watch=3                     # all runs below out/ and results/; the open page follows
    python -m tools.page out/compare --save=page.html  # those below one folder, everything in one file

The page itself is page.html beside this file; its charts need plotly (pip install -r requirements-page.txt). Runs are
only read, of metrics.jsonl only what was appended since the last look, and a run's lock is never touched.
"""

import json
import math
import os
import socket
import stat
import sys
import time
from array import array
from dataclasses import dataclass
from pathlib import Path

from configurator import configure
from lib.errors import UserError, refuse, run_main, user_error_from_os
from lib.files import read_json, write_whole

FOLDERS = "out", "results"
POINTS = 600  # of a curve at most: a point is the mean of as many lines as it takes
SILENCE = 600  # seconds without a line after which a run that should be training is called silent
CURVES = {  # of metrics.jsonl; the last key tells the kind of line
    "train": ("step", "tokens", "seconds", "loss"),
    "val": ("step", "tokens", "seconds", "eval_bits_per_byte", "eval_loss"),
}
ROW_NUMBERS = "learning_rate n_layer loops tokens parameters relative_flops relative_training_flops".split()
ROW_NUMBERS += "relative_speed tokens_per_second memory bits_per_byte".split()
ORDER = ["training", "failed", "damaged", "stopped", "finished"]  # of the table's rows
TITLE = b"<title>reGPT runs</title>"  # by which a page of ours is known
LIBRARY, DATA = b'<script src="plotly.min.js"></script>', b'<script src="data.js"></script>'


@dataclass
class PageConfig:
    out_dir: str = "out/page"  # the page's own folder
    watch: float | None = None  # seconds between two looks at the runs, until Ctrl-C; None: one look
    save: str | None = None  # one file that holds everything, instead of the folder


# --- what the files hold, checked -------------------------------------------------------------------------------------


def number(value):
    return value if type(value) in (int, float) and -1e300 < value < 1e300 else None


def text(value):
    return value[:500] if isinstance(value, str) else ""


def signature(path):
    """What changes when a file changes; None where there is no regular file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def view(path, make, notes):
    """What make makes of a JSON file's object; None without a file, or with a damaged one, which notes then say."""
    if not signature(path):
        return None
    try:
        return make(read_json(path))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        if signature(path):  # it has not disappeared meanwhile
            notes.append(str(error) if isinstance(error, UserError) else f"{path} is damaged")


def depth_mixing(content):
    matrix = [[number(value) for value in row] for row in content["matrix"]]
    return {key: [str(label)[:40] for label in content[key]] for key in ("rows", "columns")} | {"matrix": matrix}


def encode(entry):
    """JSON that is also JavaScript inside of HTML: ASCII, without <."""
    return json.dumps(entry, allow_nan=False).replace("<", "\\u003c")


def thin(column):
    stride = 1
    while len(column) > POINTS * stride:
        stride *= 2
    slices = (column[i : i + stride] for i in range(0, len(column), stride))
    means = (sum(values) / len(values) for values in slices)
    return [float(f"{mean:.7g}") if math.isfinite(mean) else None for mean in means]


class Metrics:
    """The numbers of a growing metrics.jsonl."""

    def __init__(self, path):
        self.path, self.inode, self.offset, self.tail = path, None, 0, b""
        self.lines, self.damaged, self.last = 0, None, {}
        self.curves = {name: {key: array("d") for key in keys} for name, keys in CURVES.items()}

    def read_appended(self):
        with open(self.path, "rb") as file:
            file.seek(self.offset - len(self.tail))
            inode, tail = os.fstat(file.fileno()).st_ino, file.read(len(self.tail))
            if self.offset and (inode, tail) != (self.inode, self.tail):  # replaced, or cut by a run that resumed
                self.__init__(self.path)
                file.seek(0)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]  # behind it is nothing, or a line being written
        self.inode, self.offset, self.tail = inode, self.offset + len(whole), (self.tail + whole)[-200:]
        lines = whole.split(b"\n")[:-1]
        if not self.add(lines):
            for i, line in enumerate(lines, start=self.lines + 1):
                if not self.add([line]):
                    self.damaged = self.damaged or i
        self.lines += len(lines)

    def add(self, lines):
        """All of them, or none and False if one is damaged. Parsed as one array: twice as fast as line by line."""
        try:
            entries = json.loads(b"[" + b",".join(lines) + b"]")
            kinds = {name: [entry for entry in entries if keys[-1] in entry] for name, keys in CURVES.items()}
            new = [
                (self.curves[name][key], array("d", [entry.get(key, math.nan) for entry in kinds[name]]))
                for name, keys in CURVES.items()
                for key in keys
            ]
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            return False
        if len(entries) != len(lines) or not all(type(entry) is dict for entry in entries):
            return False
        for column, values in new:
            column.extend(values)
        for last in sorted((kind[-1] for kind in kinds.values() if kind), key=lambda entry: entry.get("step", 0)):
            self.last |= last
        return True


# --- runs and comparisons as the page shows them ----------------------------------------------------------------------


class Run:
    """A folder of train.py. look() reads what is new; entry is what the page shows, None once the run is gone."""

    def __init__(self, path):
        self.path, self.metrics, self.seen, self.entry = path, Metrics(path / "metrics.jsonl"), None, None

    def look(self):
        files = [self.path / name for name in ("run.json", "metrics.jsonl", "depth_mixing.json", "eval_results.json")]
        signatures, notes = [signature(file) for file in files], []
        if not any(signatures[:2]):
            self.seen = self.entry = None
            return
        run = view(files[0], dict, notes) or {}
        state, silent_since = text(run.get("state")) or "damaged", None
        if state == "training":
            heard = max(found[2] for found in signatures[:2] if found) / 1e9
            if run.get("host") == socket.gethostname() and not is_alive(run.get("pid")):
                state = "stopped"
            elif time.time() - heard > SILENCE:
                silent_since = heard
        if self.seen != (signatures, state, silent_since):
            self.seen = signatures, state, silent_since
            self.entry = self.read(run, state, files, notes) | {"silent_since": silent_since}
            self.json = encode(self.entry)

    def read(self, run, state, files, notes):
        try:
            if signature(files[1]):
                self.metrics.read_appended()
        except FileNotFoundError:  # it has just disappeared
            pass
        except OSError as error:
            notes.append(f"cannot read {files[1]} ({error.strerror})")
        if self.metrics.damaged:
            notes.append(f"line {self.metrics.damaged} of {files[1]} is damaged")
        if not run and not notes:
            notes.append(f"{files[0]} is missing")
        mixing = view(files[2], depth_mixing, notes)
        # on the way an evaluation may be one of a part of the text, the last one is of all of it
        whole = view(files[3], dict, notes) if state == "finished" else None
        last, steps = {k: number(v) for k, v in (self.metrics.last | (whole or {})).items()}, number(run.get("steps"))
        train, val = self.metrics.curves["train"], self.metrics.curves["val"]
        return {
            "name": str(self.path),
            "state": state,
            "note": "; ".join(filter(None, [text(run.get("error")), *notes])),
            "mode": text(run.get("mode")),
            "dataset": text(run.get("dataset")),
            "started": number(run.get("started")),
            "parameters": number(run.get("parameters")),
            "flops_per_token": number(run.get("flops_per_token")),
            "progress": min(1, last["step"] / steps) if last.get("step") and steps else None,
            "seconds": last.get("seconds"),
            "train_loss": last.get("loss"),
            "loss": last.get("eval_loss"),
            "best_loss": number(min(val["eval_loss"], default=None)),
            "bits_per_byte": last.get("eval_bits_per_byte"),
            "tokens_per_second": last.get("tokens_per_sec"),
            "memory": last.get("memory"),
            "train": {key: thin(column) for key, column in train.items()},
            "val": {key.removeprefix("eval_"): thin(column) for key, column in val.items()},
            "mixing": mixing,
        }


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except PermissionError:  # somebody else's
        return True
    except (OSError, OverflowError, TypeError):
        return False
    return True


class File:
    """A JSON file of tools/compare, read again whenever it has changed."""

    def __init__(self, path):
        self.path, self.seen, self.entry = path, None, None

    def look(self):
        found, notes = signature(self.path), []
        if self.seen != found:
            self.seen, self.entry = found, view(self.path, self.read, notes)
            if notes:
                texts = {"name": str(self.path), "state": "damaged", "note": notes[0], "mode": "", "dataset": ""}
                self.entry = texts | {"rows": []}
            self.json = encode(self.entry)


class Record(File):
    """results/NAME/runs/ROW-seedN.json: a finished run, or one of runs/tuning that diverged."""

    def read(self, content):
        entry = {"name": str(self.path.with_suffix("")), "mode": text(content["row"]), "dataset": "", "note": ""}
        if "diverged" in content:
            return entry | {"state": "failed", "note": text(content["diverged"])}
        data, batch_tokens = content["data"], content["settings"]["batch_tokens"]
        bits = (data["val_tokens"] - 1) / math.log(2) / data["val_bytes"]  # every token but the first is predicted
        curve = {key: [number(value) for value in content["curve"][key]] for key in ("tokens", "seconds", "loss")}
        curve["step"] = [round(tokens / batch_tokens) for tokens in curve["tokens"]]
        curve["bits_per_byte"] = [number(loss * bits) for loss in curve["loss"]]
        return entry | {
            "state": "finished",
            "dataset": text(data["source"]),
            "parameters": number(content["parameters"]),
            "flops_per_token": number(content["flops_per_token"]),
            "progress": 1,
            "loss": number(content["loss"]),
            "best_loss": number(content["best_loss"]),
            "bits_per_byte": number(content["bits_per_byte"]),
            "val": curve,
            "mixing": depth_mixing(content["depth_mixing"]) if content["depth_mixing"] else None,
        }


class Comparison(File):
    """results/NAME/results.json: the table."""

    def read(self, content):
        failed = [f"failed: {name}: {words}" for name, words in content["failed"].items()]
        notes = [text(line) for line in content["left_out"] + failed]
        commands = [text(line) for line in content["commands"]]
        rows = [self.row(row) for row in content["rows"]]
        return {"name": str(self.path.parent), "note": "\n".join(notes), "command": "\n".join(commands), "rows": rows}

    def row(self, row):
        entry = {key: number(row.get(key)) for key in ROW_NUMBERS}
        entry |= {key: [number(value) for value in row[key]] for key in ("loss", "accuracy")}  # mean, deviation
        difference = row["difference"] or {}
        entry["difference"] = [number(difference.get("mean")), number(difference.get("half"))]
        for key in ("worth_flops", "worth_time"):
            worth = row.get(key) or {}
            entry[key] = [number(worth.get("mean")), text(worth.get("bound"))]
        return entry | {"row": text(row["row"]), "seeds": len(row["seeds"]), "noise": bool(difference.get("noise"))}


# --- the page ---------------------------------------------------------------------------------------------------------


class Watcher:
    """All that lies below some folders, remembered from look to look."""

    def __init__(self, folders):
        self.folders, self.known = folders, {}

    def find(self):
        """(path, what reads it) of every run, record and comparison."""
        for path, folders, files in (place for folder in self.folders for place in os.walk(folder)):
            path = Path(path)
            if "run.json" in files or "metrics.jsonl" in files:
                yield path, Run
            elif path.name == "runs" or path.parts[-2:] == ("runs", "tuning"):
                yield from ((path / name, Record) for name in files if name.endswith(".json"))
            elif "results.json" in files and "runs" in folders:
                yield path / "results.json", Comparison

    def look(self):
        """What the page shows, as JavaScript."""
        self.known = {path: self.known.get(path) or reader(path) for path, reader in self.find()}
        for item in self.known.values():
            item.look()

        def found(kind):
            return [item for item in self.known.values() if type(item) is kind and item.entry]

        runs = found(Run)
        # of a comparison's run the folder says more than the record, once it is finished
        finished = {comparison_and_name(run) for run in runs if run.entry["state"] == "finished"}
        runs += [record for record in found(Record) if comparison_and_name(record) not in finished]
        runs, comparisons = (
            ",\n".join(item.json for item in items) for items in (sorted(runs, key=rank), found(Comparison))
        )
        return f'"runs":[{runs}],"comparisons":[{comparisons}]'


def comparison_and_name(run):
    """(NAME, ROW-seedN) of out/compare/NAME/ROW-seedN and of results/NAME/runs/ROW-seedN, and so in their tuning."""
    *folders, name = Path(run.entry["name"]).parts
    return [None, *(folder for folder in folders if folder not in ("runs", "tuning"))][-1], name


def rank(run):
    state, started = run.entry["state"], run.entry.get("started") or 0
    return ORDER.index(state) if state in ORDER else len(ORDER), -started, run.entry["name"]


def data_js(shown, watch):
    return f'receive({{"written":{time.time():.3f},"watch":{watch or 0},{shown}}});\n'.encode()


def check_own(path):
    """Refuse to replace what is not a page of ours; a link is replaced, not followed."""
    if signature(path) and not path.is_symlink():
        with open(path, "rb") as file:
            refuse(TITLE not in file.read(1000), f"{path} is not a page of this tool: choose another place")


def main():
    s = configure(sys.argv[1:], PageConfig, folders="[FOLDER …]")
    refuse(s.watch is not None and s.watch <= 0, f"watch must be above 0 seconds, not {s.watch}")
    refuse(s.watch and s.save, "a saved page is one look: leave out --watch or --save")
    for name in s.folders:
        refuse(not Path(name).is_dir(), f"there is no folder {name}")
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("the page's charts need plotly: pip install -r requirements-page.txt") from None
    html, plotly = Path(__file__).with_name("page.html").read_bytes(), get_plotlyjs().encode()
    watcher = Watcher(s.folders or FOLDERS)
    folder = Path(s.out_dir)
    page = Path(s.save) if s.save else folder / "index.html"
    refuse(folder.is_symlink() and not s.save, f"{folder} is a link: choose another --out_dir")
    with user_error_from_os(f"write {page}"):
        check_own(page)
        shown = watcher.look()
        if s.save:
            for tag, script in ((LIBRARY, plotly), (DATA, data_js(shown, None))):
                html = html.replace(tag, b"<script>" + script + b"</script>")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / "plotly.min.js", plotly)
            write_whole(folder / "data.js", data_js(shown, s.watch))
        write_whole(page, html)
        print(page.resolve().as_uri(), flush=True)
        while s.watch:
            time.sleep(s.watch)
            before, shown = shown, watcher.look()
            if shown != before:
                write_whole(folder / "data.js", data_js(shown, s.watch))


if __name__ == "__main__":
    run_main(main)
