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
from train import (
    ROOT,
    RUNTIME_KEYS,
    Machine,
    TrainConfig,
    check_settings,
    dataset_folder,
    load_checkpoint,
    new_model,
    write_json,
)


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
ROWS |= {
    f"{mode.value}-fast": ROWS[mode.value] | {"residual_lr_scale": 10.0}
    for mode in ResidualMode
    if mode.weights == "learned"
}
ROWS |= {"deeper": None, "longer": None}
STORED = ["method3_1-stored", "method4_1-stored", "method3_2-stored"]  # the notes' second version
DEFAULT_ROWS = [mode.value for mode in ResidualMode] + STORED + ["method3_2-fast", "deeper", "longer"]

OWN_KEYS = [field.name for field in fields(CompareConfig)]
SET_HERE = "init_from overwrite stop_at eval_only seed residual_mode recompute".split()
# records of one comparison differ in none of these but by their row and seed; data is compared by its content
DEFAULTS = Settings(TrainConfig, GPTConfig).as_dict()
SAME_KEYS = [key for key in DEFAULTS if key not in RUNTIME_KEYS and key != "dataset"]
SAME_KEYS += ["epochs", "max_steps", "eval_every", "dtype"]
STUDENT = 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26  # standard errors in 95 %, for 2, 3 … 10 pairs
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
        check_settings(self.settings)
        self.cost = scale.flops_per_token(changes) * (self.settings.max_steps or self.settings.epochs)

    def check_same(self, made, where):
        """Refuse what was made under other settings; a key that was not there then had its default."""
        then, now = DEFAULTS | made["settings"], self.settings.as_dict()
        different = [f"{key} is {then[key]} there and {now[key]} here" for key in SAME_KEYS if then[key] != now[key]]
        if made["data"] | {"source": None} != self.data | {"source": None}:  # a file's name and an address may differ
            different.append("its data is another")
        if different:
            raise UserError(
                f"{where} was made under other settings: {', '.join(different)}; choose another --name or remove it"
            )

    def start(self, s, slot):
        if (self.folder / "ckpt.pt").exists():  # train.py would go on from a shorter schedule's end
            checkpoint = load_checkpoint(self.folder / "ckpt.pt")
            self.check_same(checkpoint | {"settings": checkpoint["settings"].as_dict()}, self.folder)
        return start_training(self.options, s, slot, self.log)

    def finish(self):
        """Keep of the finished run what table and pictures need."""
        record = read_run(self.folder) | {"row": self.row, "seed": self.seed}
        record["settings"] = {key: record["settings"][key] for key in SAME_KEYS}
        del record["training"]
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
    text = os.environ.get("OMP_NUM_THREADS") or str(max(1, os.cpu_count() // (s.jobs * s.nproc)))
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"the environment's OMP_NUM_THREADS must be a whole number of threads, not {text!r}")
    return int(text)


def start_training(options, s, slot, log):
    """train.py in a process of its own, or several, on job number slot's share of the machine."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads(s))}
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    if len(gpus) >= s.jobs * s.nproc > 1:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[slot * s.nproc : (slot + 1) * s.nproc])
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={s.nproc}"] if s.nproc > 1 else []
    command = [sys.executable, *torchrun, str(ROOT / "train.py"), *options]
    with open(log, "wb") as file:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, env=environment)


def stop(processes):
    for process in processes:
        process.terminate()  # train.py writes a checkpoint first
    for process in processes:
        process.wait()


def last_words(log):
    lines = [line.strip() for line in log.read_text(errors="replace").replace("\r", "\n").split("\n") if line.strip()]
    return ([line for line in lines if line.startswith("error: ")] or lines or ["no message"])[-1]


def train_all(runs, s, failed, on_record):
    """All runs, s.jobs at a time; on_record gets what finishes, failed the last words of what does not."""
    waiting, running, slots = list(runs), {}, list(range(s.jobs))
    done = {run: run.part_done() for run in runs}

    def progress():  # counted in FLOPs: rows differ in length, so a count of runs would say little about the time left
        return sum(run.cost * done[run] for run in runs) / sum(run.cost for run in runs)

    bar = tqdm(
        total=1.0,
        initial=progress(),
        smoothing=0,  # the mean speed so far
        bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left",
        mininterval=1 if sys.stderr.isatty() else 30,
    )

    def end(run, slot, error=None):
        slots.append(slot)
        done[run] = 1.0
        try:
            record = None if error else run.finish()
        except (UserError, OSError) as finish_error:
            error = finish_error
        if error:
            failed[run.name] = str(error)
            bar.write(f"{run.name} failed: {error}", file=sys.stderr)
            return
        on_record(record)
        bar.write(f"{run.name}: validation loss {record['loss']:.4f}, best {record['best_loss']:.4f}")

    try:
        while waiting or running:
            while waiting and slots:
                run, slot = waiting.pop(0), slots.pop()
                failed.pop(run.name, None)  # of an earlier sitting
                try:
                    running[run] = run.start(s, slot), slot
                except UserError as error:
                    end(run, slot, error)
            time.sleep(0.1)
            for run, (process, slot) in list(running.items()):
                if process.poll() is not None:
                    del running[run]
                    status = process.returncode
                    end(run, slot, f"exit status {status}, {last_words(run.log)}" if status else None)
            if time.time() - bar.last_print_t > bar.mininterval or not running:
                done |= {run: run.part_done() for run in running}
                bar.set_description_str(f"{len(runs) - len(waiting) - len(running)}/{len(runs)} runs", refresh=False)
                bar.update(max(0.0, progress() - bar.n))
    finally:
        bar.close()
        if running:
            stop([process for process, _ in running.values()])
            print("stopped: the same command goes on from here", file=sys.stderr)


def measure(scale, rows, seed, s, path):
    """A few steps of each row alone, in rounds and relative to the round's baseline: a machine's speed wanders."""
    if os.getloadavg()[0] > 1:
        print(f"warning: the machine is busy, load {os.getloadavg()[0]:.1f}: speeds will be wrong", file=sys.stderr)
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
                stop([process])
            lines = [line for line in read_metrics(folder) if "tokens_per_sec" in line]
        warm = lines[len(lines) // 4 :]
        rates[row].append(statistics.median(line["tokens_per_sec"] for line in warm))
        memory[row] = max(memory[row], lines[-1]["memory"])
    speeds = read_json(path)
    for row in rows:
        settings = scale.settings(scale.changes(row)).as_dict()
        ratios = [rate / base for rate, base in zip(rates[row], rates["baseline"], strict=True)]
        speeds[row] = {
            "tokens_per_second": statistics.median(rates[row]),
            "relative": statistics.median(ratios),
            "memory": memory[row],
            "threads": threads(s),
            "settings": {key: settings[key] for key in SAME_KEYS if key != "seed"},
        }
    write_json(path, speeds)


def read_json(path):
    """What an earlier sitting wrote, if there was one."""
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        raise UserError(f"{path} is damaged: remove it") from None


# --- table and pictures -----------------------------------------------------------------------------------------------


def read_records(scale, results_dir):
    """All records there are, each checked to belong to this comparison."""
    records = []
    for path in sorted((results_dir / "runs").glob("*.json")):
        try:
            record = json.loads(path.read_bytes())
            Run(scale, record["row"], record["seed"], Path(), results_dir).check_same(record, path)
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is damaged or not a record: remove it, and its run is made again") from None
        records.append(record)
    return records


def mean_sd(values):
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None


def difference(records, baseline, key):
    """To the baseline, paired by seed, with its standard error; noise if the 95 % interval holds 0 or for one pair."""
    pairs = [record[key] - baseline[record["seed"]][key] for record in records if record["seed"] in baseline]
    if not pairs or records[0]["row"] == "baseline":
        return None
    mean, sd = mean_sd(pairs)
    error = None if sd is None else sd / math.sqrt(len(pairs))
    noise = error is None or abs(mean) <= STUDENT[min(len(pairs), len(STUDENT) + 1) - 2] * error
    return {"mean": mean, "error": error, "pairs": len(pairs), "noise": noise}


def summarize(records, speeds):
    """One entry a row, in the order of ROWS; what is relative is so to the baseline."""
    groups = {row: [record for record in records if record["row"] == row] for row in ROWS}
    baseline = {record["seed"]: record for record in groups["baseline"]}
    base = next(iter(baseline.values()), None)
    summary = []
    for row, group in groups.items():
        if not group:
            continue
        one, speed = group[0], speeds.get(row)
        if not speed or not speed["settings"].items() <= one["settings"].items():  # none, or of another scale
            speed = dict.fromkeys(("tokens_per_second", "relative", "memory", "threads"))
        summary.append(
            {
                "row": row,
                "seeds": sorted(record["seed"] for record in group),
                "n_layer": one["settings"]["n_layer"],
                "tokens": one["curve"]["tokens"][-1],
                "parameters": one["parameters"],
                "relative_flops": base and one["flops_per_token"] / base["flops_per_token"],
                "relative_training_flops": base and one["curve"]["flops"][-1] / base["curve"]["flops"][-1],
                "tokens_per_second": speed["tokens_per_second"],
                "relative_speed": speed["relative"],
                "memory": speed["memory"],
                "threads": speed["threads"],
                **{key: mean_sd([r[key] for r in group]) for key in ("loss", "best_loss", "perplexity", "accuracy")},
                "difference": difference(group, baseline, "loss"),
                "best_difference": difference(group, baseline, "best_loss"),
            }
        )
    return summary


def show(value, form, error=None):
    if value is None:
        return "–"
    return format(value, form) + ("" if error is None else f" ± {error:.4f}")


def show_difference(entry):
    return "–" if entry is None else "≈ " * entry["noise"] + show(entry["mean"], "+.4f", entry["error"])


HEADER = "row,parameters,FLOPs/token,training FLOPs,tokens/s,peak MB,loss,best loss,perplexity,accuracy".split(",")
HEADER += ["Δ loss", "Δ best loss"]


def table_row(entry):
    return [
        entry["row"] + f" ({entry['n_layer']} layers)" * (entry["row"] == "deeper"),
        f"{entry['parameters']:,}",
        *(show(entry[f"relative_{key}"], ".2f") for key in ("flops", "training_flops", "speed")),
        show(entry["memory"] and entry["memory"] / 2**20, ",.0f"),
        *(show(mean, ".4f", sd) for mean, sd in (entry["loss"], entry["best_loss"])),
        show(entry["perplexity"][0], ".3f"),
        show(entry["accuracy"][0], ".4f"),
        *(show_difference(entry[key]) for key in ("difference", "best_difference")),
    ]


def write_table(records, failed, s, results_dir):
    """README.md and results.json."""
    summary = summarize(records, read_json(results_dir / "speed.json"))
    rows, seeds = [entry["row"] for entry in summary], sorted({record["seed"] for record in records})
    own = tuple(f"--{key}=" for key in [*OWN_KEYS, "out_dir"])
    shared = [argument for argument in sys.argv[1:] if not argument.startswith(own)]
    which = [f"--modes={','.join(rows)}", f"--seeds={','.join(map(str, seeds))}", f"--name={s.name}"]
    command = shlex.join(["python", "compare.py", *shared, *which])
    table = markdown_table(HEADER, [table_row(entry) for entry in summary])
    # not the deeper one's: that says its own depth
    one = next((r for r in records if r["row"] != "deeper"), records[0])["settings"]
    data, codes = records[0]["data"], len({record["code"] for record in records})
    at_threads = sorted({entry["threads"] for entry in summary if entry["threads"]})
    threads_text = f" with {' and '.join(map(str, at_threads))} threads" if at_threads else ""
    text = f"""# {s.name}

{table}

{one["n_layer"]} layers × {one["n_embd"]}, {one["n_head"]} heads, length {one["block_size"]}; {summary[0]["tokens"]:,} \
tokens a run in batches of {one["batch_tokens"]:,}, learning rate {one["learning_rate"]:g}; data: {data["source"]}, \
{data["train_tokens"]:,} tokens; seeds {", ".join(map(str, seeds))}. Made by

    {command}

Losses are validation losses in nats, last and best of a run: mean ± standard deviation over seeds; perplexity and \
accuracy are of the last. FLOPs/token (forward), training FLOPs and tokens/s are relative to the baseline; tokens/s \
and the process's peak memory are measured one run at a time{threads_text} (`--measure=True`). Δ is the difference to \
the baseline, paired by seed (the same data in the same order) ± its standard error; ≈ marks noise: the 95 % interval \
of Student's t holds zero (with 3 seeds it reaches 4.3 standard errors to each side), or a single seed.

![validation loss against tokens](loss_tokens.png)
![validation loss against training FLOPs](loss_flops.png)
![validation loss against time](loss_time.png)
![learned weights in per cent](weights.png)
"""
    if codes > 1:
        text += f"\nThe runs were made by {codes} versions of the code: each record names its own.\n"
    if failed:
        text += "\nFailed:\n\n" + "".join(f"- {name}: {words}\n" for name, words in failed.items())
    write_file_atomically(results_dir / "README.md", text.encode())
    write_json(results_dir / "results.json", {"command": command, "rows": summary, "failed": failed})
    return summary, table


def draw(records, summary, results_dir):
    groups = {entry["row"]: [r for r in records if r["row"] == entry["row"]] for entry in summary}
    base = next((entry["tokens_per_second"] for entry in summary if entry["row"] == "baseline"), None)
    speeds = {entry["row"]: base and entry["relative_speed"] and base * entry["relative_speed"] for entry in summary}

    def draw_against(key, label, path, rows=tuple(groups), x_unit=lambda row: 1.0):
        curves = []
        for row in rows:
            x = np.mean([r["curve"][key] for r in groups[row]], axis=0) / x_unit(row)
            curves.append((row, row, x, [r["curve"]["loss"] for r in groups[row]]))
        draw_losses(curves, label, results_dir / path)

    same_tokens = [row for row in groups if row != "longer"] or list(groups)  # it would press the others together
    draw_against("tokens", "tokens", "loss_tokens.png", same_tokens)
    draw_against("flops", "training FLOPs", "loss_flops.png")
    if all(speeds.values()):  # a busy machine's clock says little
        label = "minutes of training at the speed measured one run at a time"
        draw_against("tokens", label, "loss_time.png", x_unit=lambda row: 60 * speeds[row])
    else:
        draw_against("seconds", "minutes of training, as it ran", "loss_time.png", x_unit=lambda row: 60)
    panels = []
    for row, group in groups.items():
        if group[0]["weights"]:
            squares = [normalized(record["weights"]) for record in group]
            panels.append((f"{row}, %, mean of {len(squares)}", np.mean(squares, axis=0)))
    panels.append(("the notes' run (method3_2-stored), %", notes_weights()))
    draw_weights(panels, results_dir / "weights.png")


def listed(text, what, kind):
    try:
        return list(dict.fromkeys(kind(item.strip()) for item in text.split(",")))
    except ValueError:
        raise UserError(f"{what} must be {kind.__name__}s separated by commas, not {text!r}") from None


def main():
    s = configure(sys.argv[1:], CompareConfig, TrainConfig, GPTConfig)
    for key in ("jobs", "nproc"):
        if getattr(s, key) < 1:
            raise UserError(f"{key} must be at least 1, not {getattr(s, key)}")
    rows, seeds = DEFAULT_ROWS if s.modes == "all" else listed(s.modes, "modes", str), listed(s.seeds, "seeds", int)
    for row in rows:
        if row not in ROWS:
            raise UserError(f"modes: {row!r} is not known: choose from {', '.join(ROWS)}")
    s.name = s.name or "-".join(Path(file).stem for file in s.files) or "default"
    if Path(s.name).name != s.name or s.name == "..":
        raise UserError(f"name {s.name!r} must be a plain folder name; --results_dir and --out_dir choose places")
    results_dir = Path(s.results_dir or ROOT / "results" / s.name)
    out_dir = Path(s.out_dir or ROOT / "out" / "compare" / s.name)
    scale = Scale(s)
    records = read_records(scale, results_dir)
    runs = [Run(scale, row, seed, out_dir, results_dir) for seed in seeds for row in rows]  # whole seeds first
    if (results_dir / "README.md").exists() and not (results_dir / "results.json").exists():
        raise UserError(f"{results_dir} holds a README.md that is not compare.py's: choose another results_dir")
    for folder in (results_dir / "runs", out_dir):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be made: {error.strerror}") from None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as orderly as Ctrl-C

    missing = [run for run in runs if not run.record.exists()]
    failed = read_json(results_dir / "results.json").get("failed", {})
    failed = {name: words for name, words in failed.items() if not (results_dir / f"runs/{name}.json").exists()}

    def show_results():
        summary, table = write_table(records, failed, s, results_dir)
        draw(records, summary, results_dir)
        return table

    def on_record(record):  # an interrupted comparison has its table and pictures, too
        records.append(record)
        show_results()

    if s.measure:
        measure(scale, rows, seeds[0], s, results_dir / "speed.json")
    elif missing:
        train_all(missing, s, failed, on_record)
    if records:
        print(f"{show_results()}\n\n{results_dir}/README.md")
    now_failed = [run.name for run in missing if run.name in failed]
    if now_failed and not s.measure:
        raise UserError(f"{len(now_failed)} of {len(runs)} runs failed: {', '.join(now_failed)}", status=1)


if __name__ == "__main__":
    run_main(main)
