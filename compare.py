"""
The experiment: residual modes × seeds under one budget, through the real train.py.

    python compare.py config/shakespeare.py --modes=baseline,method3_2,deeper --seeds=1,2,3 --jobs=2
    python compare.py config/shakespeare.py --measure=True     # speed and memory, on an otherwise idle machine

Keys of train.py may be given too, for all rows. A finished run leaves a small record in results/NAME/runs, and table
and pictures are made from the records; the same command again makes what is missing. Rows are every mode by its name,
and

    MODE-stored     recompute=False
    MODE-fast       the raw weights learn 10 times faster: in a short run they cannot travel far otherwise
    deeper          the baseline whose depth comes nearest to method3_2's forward FLOPs per token
    longer          the baseline with its schedule stretched to method3_2's training FLOPs
"""

import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from configurator import Settings, UserError, configure, run_main
from data.common import load_meta, write_file_atomically
from model import GPTConfig, ResidualMode
from report import draw_losses, draw_weights, markdown_table, normalized, notes_weights, read_metrics, read_run
from train import ROOT, RUNTIME_KEYS, Machine, TrainConfig, dataset_folder, load_checkpoint, new_model, write_json


@dataclass
class CompareConfig:
    name: str | None = None  # of results/NAME and out/compare/NAME; None: the config files' names
    modes: str = "all"  # rows, separated by commas; all: the modes, three of them stored, and the controls
    seeds: str = "1,2,3"  # a seed is the same data in the same order for every row
    jobs: int = 1  # runs side by side, each with its share of the cores and GPUs
    nproc: int = 1  # processes of one run, started by torchrun
    measure: bool = False  # measure each row's speed and memory instead of training
    results_dir: str | None = None  # None: results/NAME. Likewise out_dir: what holds the runs' own folders


# what a row changes in the settings; of the controls, Scale computes it
ROWS = {mode.value: {"residual_mode": mode.value} for mode in ResidualMode}
ROWS |= {f"{mode.value}-stored": ROWS[mode.value] | {"recompute": False} for mode in ResidualMode if mode.site}
for _mode in ("method3_2", "method4_2"):
    ROWS[f"{_mode}-fast"] = ROWS[_mode] | {"residual_lr_scale": 10.0}
ROWS |= {"deeper": None, "longer": None}
STORED = ["method3_1-stored", "method4_1-stored", "method3_2-stored"]  # the notes' second version
DEFAULT_ROWS = [mode.value for mode in ResidualMode] + STORED + ["method3_2-fast", "deeper", "longer"]

OWN_KEYS = [field.name for field in fields(CompareConfig)]
SET_HERE = "init_from overwrite stop_at eval_only seed residual_mode recompute".split()
# records of one comparison differ in none of these but by their row and seed; data is compared by its content
DEFAULTS = Settings(TrainConfig, GPTConfig).as_dict()
SAME_KEYS = [key for key in DEFAULTS if key not in RUNTIME_KEYS and key != "dataset"]
SAME_KEYS += ["epochs", "max_steps", "eval_every", "dtype"]
MEASURED_STEPS, MEASURED_ROUNDS = 8, 3


class Scale:
    """The settings that all rows share, and each row's own."""

    def __init__(self, s):
        for key in SET_HERE:
            if key in s.given:
                raise UserError(f"compare.py sets {key} itself: choose rows with --modes and seeds with --seeds")
        self.common = {key: getattr(s, key) for key in s.types if key in s.given - {*OWN_KEYS, "out_dir"}}
        one_process = Machine(configure(["--device=cpu"], TrainConfig))  # leaves GPUs to the runs
        self.data = asdict(load_meta(dataset_folder(s, one_process)))

    def options(self, changes):
        """The command line of train.py."""
        return [f"--{key}={value}" for key, value in (self.common | changes).items()]

    def settings(self, changes):
        return configure(self.options(changes), TrainConfig, GPTConfig)

    def flops_per_token(self, changes):
        s = self.settings(changes)
        try:
            with torch.device("meta"):  # shapes only
                return new_model(s, self.data["vocab_size"]).flops_per_token(s.block_size)
        except ValueError as error:
            raise UserError(f"{s.residual_mode}: {error}") from None

    def changes(self, row):
        s, target = self.settings({}), ROWS["method3_2"]
        if row == "deeper":
            here, next_depth = (self.flops_per_token({"n_layer": n}) for n in (s.n_layer, s.n_layer + 1))
            return {"n_layer": s.n_layer + round((self.flops_per_token(target) - here) / (next_depth - here))}
        if row == "longer":
            factor = self.flops_per_token(target) / self.flops_per_token({})
            return {"max_steps": round(s.max_steps * factor)} if s.max_steps else {"epochs": s.epochs * factor}
        return ROWS[row]


class Run:
    """One row with one seed."""

    def __init__(self, scale, row, seed, out_dir, results_dir):
        self.row, self.seed, self.name, self.data = row, seed, f"{row}-seed{seed}", scale.data
        self.folder, self.log = out_dir / self.name, out_dir / f"{self.name}.log"
        self.record = results_dir / "runs" / f"{self.name}.json"
        changes = scale.changes(row) | {"seed": seed, "out_dir": self.folder, "sample_tokens": 0}
        self.options, self.settings = scale.options(changes), scale.settings(changes)
        self.cost = scale.flops_per_token(changes) * (self.settings.max_steps or self.settings.epochs)

    def check_same(self, settings, data, where):
        """Refuse what was made under other settings; a key that was not there then had its default."""
        then, now = DEFAULTS | settings, self.settings.as_dict()
        different = [f"{key} is {then[key]} there and {now[key]} here" for key in SAME_KEYS if then[key] != now[key]]
        if data["source_sha256"] != self.data["source_sha256"] or data["train_tokens"] != self.data["train_tokens"]:
            different.append("its data is another")
        if different:
            raise UserError(
                f"{where} was made under other settings: {', '.join(different)}; choose another --name or remove it"
            )

    def start(self, s, slot):
        if (self.folder / "ckpt.pt").exists():  # train.py would go on from a shorter schedule's end
            checkpoint = load_checkpoint(self.folder / "ckpt.pt")
            self.check_same(checkpoint["settings"].as_dict(), checkpoint["data"], self.folder)
        return start_training(self.options, s, slot, self.log)

    def finish(self):
        """Keep of the finished run what table and pictures need."""
        record = read_run(self.folder) | {"row": self.row, "seed": self.seed}
        record["settings"] = {key: record["settings"][key] for key in SAME_KEYS}
        del record["training"]
        self.record.parent.mkdir(parents=True, exist_ok=True)
        write_file_atomically(self.record, json.dumps(record).encode() + b"\n")
        return record

    def part_done(self):
        try:
            last = read_metrics(self.folder)[-1]
        except (UserError, IndexError):
            return 0.0
        s = self.settings
        return min(1.0, last["step"] / s.max_steps if s.max_steps else last["epoch"] / s.epochs)


# --- processes --------------------------------------------------------------------------------------------------------


def threads(s):
    """Of each process; an OMP_NUM_THREADS that is set is obeyed."""
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, os.cpu_count() // (s.jobs * s.nproc)))


def start_training(options, s, slot, log):
    """train.py in a process of its own, or several, on job number slot's share of the machine."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads(s))}
    if "CUDA_VISIBLE_DEVICES" not in os.environ and torch.cuda.device_count() >= s.jobs * s.nproc:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(slot * s.nproc + n) for n in range(s.nproc))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={s.nproc}"] if s.nproc > 1 else []
    command = [sys.executable, *torchrun, str(ROOT / "train.py"), *options]
    with open(log, "wb") as file:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, env=environment)


def last_words(log):
    lines = [line.strip() for line in log.read_text(errors="replace").replace("\r", "\n").split("\n") if line.strip()]
    return ([line for line in lines if line.startswith("error: ")] or lines or ["no message"])[-1]


def train_all(runs, s, on_record):
    """All runs, s.jobs at a time. Returns the failed ones' last words."""
    waiting, running, failed = list(runs), {}, {}
    costs = sum(run.cost for run in runs)
    done = {run: run.part_done() for run in runs}
    slots = list(range(s.jobs))
    bar = tqdm(
        total=1.0,
        initial=sum(run.cost * done[run] for run in runs) / costs,
        smoothing=0,  # time left by the mean speed: cost is counted in FLOPs, so rows pass about equally fast
        bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left",
        mininterval=1 if sys.stderr.isatty() else 30,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        while waiting or running:
            while waiting and slots:
                run, slot = waiting.pop(0), slots.pop()
                try:
                    running[run] = run.start(s, slot), slot
                except UserError as error:
                    failed[run.name] = f"error: {error}"
                    slots.append(slot)
            time.sleep(0.1)
            for run, (process, slot) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[run]
                slots.append(slot)
                done[run] = 1.0
                if process.returncode:
                    failed[run.name] = f"exit status {process.returncode}: {last_words(run.log)}"
                    bar.write(f"{run.name} failed, {failed[run.name]}", file=sys.stderr)
                else:
                    record = run.finish()
                    on_record(record)
                    bar.write(f"{run.name}: validation loss {record['loss']:.4f}, best {record['best_loss']:.4f}")
            if time.time() - bar.last_print_t > bar.mininterval:
                done |= {run: run.part_done() for run in running}
                bar.set_description_str(f"{len(runs) - len(waiting) - len(running)}/{len(runs)} runs", refresh=False)
                bar.update(max(0.0, sum(run.cost * done[run] for run in runs) / costs - bar.n))
    finally:
        bar.close()
        for process, _ in running.values():
            process.terminate()  # it writes a checkpoint first
        for process, _ in running.values():
            process.wait()
        if running:
            print("stopped: the same command goes on from here", file=sys.stderr)
    return failed


def measure(scale, rows, seed, s, path):
    """A few steps of each row alone, round after round, since a machine's speed changes with the hours."""
    rows = list(dict.fromkeys(["baseline", *rows]))
    rates, memory = {row: [] for row in rows}, dict.fromkeys(rows, 0)
    for row in tqdm(rows * MEASURED_ROUNDS, unit="run", desc="measuring"):
        with tempfile.TemporaryDirectory() as folder:
            changes = {"seed": seed, "out_dir": folder, "stop_at": MEASURED_STEPS, "eval_every": 10**9, "log_every": 1}
            log = Path(folder) / "log"
            process = start_training(scale.options(scale.changes(row) | changes), s, 0, log)
            try:
                if process.wait():
                    raise UserError(f"{row} could not be measured: {last_words(log)}", status=1)
            finally:
                process.terminate()
                process.wait()
            lines = [line for line in read_metrics(folder) if "tokens_per_sec" in line]
        rates[row].append(statistics.median(line["tokens_per_sec"] for line in lines[2:]))  # the first ones warm up
        memory[row] = max(memory[row], lines[-1]["memory"])
    speeds = json.loads(path.read_text()) if path.exists() else {}
    for row in rows:
        settings = scale.settings(scale.changes(row)).as_dict()
        speeds[row] = {
            "tokens_per_second": statistics.median(rates[row]),
            "relative": statistics.median(np.divide(rates[row], rates["baseline"]).tolist()),
            "memory": memory[row],
            "threads": threads(s),
            "settings": {key: settings[key] for key in SAME_KEYS if key != "seed"},
        }
    write_json(path, speeds)


# --- table and pictures -----------------------------------------------------------------------------------------------


def mean_sd(values):
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None


def difference(records, baseline, key):
    """To the baseline, paired by seed, with its standard error; noise is less than two of these, or a single pair."""
    pairs = [record[key] - baseline[record["seed"]][key] for record in records if record["seed"] in baseline]
    if not pairs:
        return None
    mean, sd = mean_sd(pairs)
    error = None if sd is None else sd / math.sqrt(len(pairs))
    return {"mean": mean, "error": error, "pairs": len(pairs), "noise": error is None or abs(mean) < 2 * error}


def summarize(records, speeds):
    """One entry a row, in the order of ROWS; what is relative is so to the baseline."""
    baseline = {record["seed"]: record for record in records if record["row"] == "baseline"}
    base = next(iter(baseline.values()), None)
    summary = []
    for row in ROWS:
        mine = [record for record in records if record["row"] == row]
        if not mine:
            continue
        one = mine[0]
        speed = speeds.get(row)
        if speed and speed["settings"] != {key: one["settings"][key] for key in speed["settings"]}:
            speed = None  # of another scale
        summary.append(
            {
                "row": row,
                "seeds": sorted(record["seed"] for record in mine),
                "n_layer": one["settings"]["n_layer"],
                "parameters": one["parameters"],
                "tokens": one["curve"]["tokens"][-1],
                "relative_flops": base and one["flops_per_token"] / base["flops_per_token"],
                "relative_training_flops": base and one["curve"]["flops"][-1] / base["curve"]["flops"][-1],
                "tokens_per_second": speed and speed["tokens_per_second"],
                "relative_speed": speed and speed["relative"],
                "memory": speed and speed["memory"],
                **{key: mean_sd([r[key] for r in mine]) for key in ("loss", "best_loss", "perplexity", "accuracy")},
                "difference": difference(mine, baseline, "loss"),
                "best_difference": difference(mine, baseline, "best_loss"),
            }
        )
    return summary


def show(value, form):
    return "–" if value is None else format(value, form)


def show_mean(mean_and_sd, form=".4f"):
    mean, sd = mean_and_sd
    return f"{mean:{form}}" if sd is None else f"{mean:{form}} ± {sd:{form}}"


def show_difference(entry, row):
    if entry is None or row == "baseline":
        return "–"
    return (
        "≈ " * entry["noise"]
        + show_mean((entry["mean"], None), "+.4f")
        + ("" if entry["error"] is None else f" ± {entry['error']:.4f}")
    )


HEADER = "row,parameters,FLOPs/token,training FLOPs,tokens/s,memory,loss,best loss,perplexity,accuracy".split(",")
HEADER += ["Δ loss", "Δ best loss"]


def table_row(entry):
    return [
        entry["row"] + f" ({entry['n_layer']} layers)" * (entry["row"] == "deeper"),
        f"{entry['parameters']:,}",
        show(entry["relative_flops"], ".2f"),
        show(entry["relative_training_flops"], ".2f"),
        show(entry["relative_speed"], ".2f"),
        "–" if entry["memory"] is None else f"{entry['memory'] / 2**20:,.0f} MB",
        show_mean(entry["loss"]),
        show_mean(entry["best_loss"]),
        f"{entry['perplexity'][0]:.3f}",
        f"{entry['accuracy'][0]:.4f}",
        show_difference(entry["difference"], entry["row"]),
        show_difference(entry["best_difference"], entry["row"]),
    ]


def write_table(records, failed, s, results_dir):
    """README.md and results.json. Returns the table."""
    path = results_dir / "speed.json"
    summary = summarize(records, json.loads(path.read_text()) if path.exists() else {})
    rows, seeds = [entry["row"] for entry in summary], sorted({record["seed"] for record in records})
    own = tuple(f"--{key}=" for key in [*OWN_KEYS, "out_dir"])
    given = [argument for argument in sys.argv[1:] if not argument.startswith(own)]
    command = ["python", "compare.py", *given, f"--modes={','.join(rows)}", f"--seeds={','.join(map(str, seeds))}"]
    command = shlex.join([*command, f"--name={s.name}"])
    table = markdown_table(HEADER, [table_row(entry) for entry in summary])
    one = records[0]["settings"]
    text = f"""# {s.name}

{table}

{one["n_layer"]} layers × {one["n_embd"]}, {one["n_head"]} heads, length {one["block_size"]}; \
{summary[0]["tokens"]:,} tokens a run in batches of {one["batch_tokens"]:,}, learning rate {one["learning_rate"]:g}; \
data: {records[0]["data"]["source"]}, {records[0]["data"]["train_tokens"]:,} tokens; seeds {", ".join(map(str, seeds))}.

Losses are validation losses in nats, the last and the best of a run: mean ± standard deviation over seeds; perplexity \
and accuracy are of the last. FLOPs/token (forward), training FLOPs and tokens/s are relative to the baseline; memory \
is the peak of the process. Speed and memory are measured one run at a time (`--measure=True`). Δ is the difference to \
the baseline, paired by seed (same data in the same order), ± its standard error; ≈ marks noise: less than two standard \
errors, or a single seed.

    {command}

![validation loss against tokens](loss_tokens.png)
![validation loss against training FLOPs](loss_flops.png)
![validation loss against time](loss_time.png)
![learned weights](weights.png)
"""
    if failed:
        text += "\nFailed:\n\n" + "".join(f"- {name}: {words}\n" for name, words in failed.items())
    write_file_atomically(results_dir / "README.md", text.encode())
    write_json(results_dir / "results.json", {"command": command, "rows": summary, "failed": failed})
    return table, summary


def draw(records, summary, results_dir):
    groups = {entry["row"]: [r for r in records if r["row"] == entry["row"]] for entry in summary}
    losses = {row: [r["curve"]["loss"] for r in group] for row, group in groups.items()}

    def curves(x_of, rows=tuple(groups)):
        return [(row, row, x_of(row), losses[row]) for row in rows]

    def mean_of(key):
        return lambda row: np.mean([r["curve"][key] for r in groups[row]], axis=0)

    same_tokens = [row for row in groups if row != "longer"] or list(groups)  # it would press the others together
    draw_losses(curves(mean_of("tokens"), same_tokens), "tokens", results_dir / "loss_tokens.png")
    draw_losses(curves(mean_of("flops")), "training FLOPs", results_dir / "loss_flops.png")
    speed = {entry["row"]: entry["tokens_per_second"] for entry in summary}
    if all(speed.values()):  # a busy machine's clock says little: take the speed that was measured alone
        minutes = curves(lambda row: mean_of("tokens")(row) / speed[row] / 60)
        label = "minutes of training, at the speed measured one run at a time"
    else:
        minutes = curves(lambda row: mean_of("seconds")(row) / 60)
        label = "minutes of training, as it ran"
    draw_losses(minutes, label, results_dir / "loss_time.png")
    panels = []
    for row, group in groups.items():
        squares = [normalized(r["weights"]) for r in group if r["weights"]]
        if squares:
            panels.append((f"{row}, mean of {len(squares)}", np.mean(squares, axis=0)))
    draw_weights(
        [*panels, ("the notes' run: method3_2-stored, 12 layers", notes_weights())], results_dir / "weights.png"
    )


def read_records(scale, results_dir):
    """All records there are, each checked to belong to this comparison."""
    records = []
    for path in sorted((results_dir / "runs").glob("*.json")):
        try:
            record = json.loads(path.read_bytes())
            run = Run(scale, record["row"], record["seed"], Path(), results_dir)
            run.check_same(record["settings"], record["data"], path)
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is damaged or not a record: remove it and its run is made again") from None
        records.append(record)
    return records


def listed(text, what, convert=str):
    try:
        return list(dict.fromkeys(convert(item.strip()) for item in text.split(",")))
    except ValueError:
        raise UserError(f"{what} must be {convert.__name__}s separated by commas, not {text!r}") from None


def main():
    s = configure(sys.argv[1:], CompareConfig, TrainConfig, GPTConfig)
    for key in ("jobs", "nproc"):
        if getattr(s, key) < 1:
            raise UserError(f"{key} must be at least 1, not {getattr(s, key)}")
    rows, seeds = DEFAULT_ROWS if s.modes == "all" else listed(s.modes, "modes"), listed(s.seeds, "seeds", int)
    for row in rows:
        if row not in ROWS:
            raise UserError(f"modes: {row!r} is not known: choose from {', '.join(ROWS)}")
    s.name = s.name or "-".join(Path(file).stem for file in s.files) or "default"
    if Path(s.name).name != s.name:
        raise UserError(f"name {s.name!r} must be a plain folder name; --results_dir and --out_dir choose places")
    results_dir = Path(s.results_dir or ROOT / "results" / s.name)
    out_dir = Path(s.out_dir or ROOT / "out" / "compare" / s.name)
    scale = Scale(s)
    records = read_records(scale, results_dir)
    runs = [Run(scale, row, seed, out_dir, results_dir) for seed in seeds for row in rows]  # whole seeds first
    for folder in (results_dir, out_dir):
        folder.mkdir(parents=True, exist_ok=True)

    failed = {}
    if s.measure:
        measure(scale, rows, seeds[0], s, results_dir / "speed.json")
    else:

        def on_record(record):
            records.append(record)
            write_table(records, {}, s, results_dir)

        failed = train_all([run for run in runs if not run.record.exists()], s, on_record)
    if records:
        records.sort(key=lambda record: (record["row"], record["seed"]))
        table, summary = write_table(records, failed, s, results_dir)
        draw(records, summary, results_dir)
        print(f"{table}\n\n{results_dir}/README.md")
    for name, words in failed.items():
        print(f"{name} failed, {words}", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    run_main(main)
