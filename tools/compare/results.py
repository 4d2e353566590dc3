"""A folder of results: the records in it, and the tables and pictures that are made from them."""

from collections import Counter
from pathlib import Path

from lib.errors import refuse
from lib.files import read_json, write_json, write_whole
from tools.compare.analysis import by_row, contrasts, kind, leads, one_kind, paired_deviation, record_name, summarize
from tools.compare.pictures import PICTURES, plot_all
from tools.compare.records import DEFAULTS, check_same, is_list, read_records, read_speeds, text
from tools.compare.tables import full_table, rate_table, readme_text, terminal_table, write_csv
from tools.compare.tuning import tuning_losses


class Results:
    def __init__(self, folder, name):
        self.folder, self.name, self.runs = Path(folder), name, Path(folder) / "runs"
        self.records, self.unknown = read_records(self.runs)
        self.check_rows()
        self.speeds = read_speeds(self.folder / "speed.json")
        before = read_results(self.folder / "results.json")
        self.commands, self.contrasts = before["commands"], before["named_contrasts"]  # None: not named yet
        self.failed = {name: words for name, words in before["failed"].items() if not self.has(name)}

    def check_rows(self):
        """Refuse records of one row that cannot be of one comparison."""
        for row, group in by_row(self.records).items():
            one, twice = group[0], [item for item, n in Counter((r["seed"], kind(r)) for r in group).items() if n > 1]
            refuse(twice, f"{self.runs} holds two records of {row} with one seed: remove one of them")
            for record in group:
                where = self.path(record)
                check_same(record, DEFAULTS | one["settings"], self.records[0]["data"], where, ignore=["seed"])
                same = record["curve"]["tokens"] == one["curve"]["tokens"]
                refuse(not same, f"{where} was evaluated at other steps than seed {one['seed']}: remove one of them")

    def name_contrasts(self, names, asked):
        """Before the first record; later ones are the same, since they would be chosen by what is seen."""
        if self.contrasts is None:
            self.contrasts = names
        other = asked and self.contrasts != names
        refuse(other, f"the contrasts of {self.folder} are named already, in its results.json: leave --contrasts out")

    def path(self, record):
        return self.runs / f"{record_name(record)}.json"

    def has(self, name):
        return any((folder / f"{name}.json").exists() for folder in (self.runs, self.runs / "tuning"))

    def add(self, record, command):
        """... and show it at once: an interrupted comparison has its tables, too."""
        self.records.append(record)
        self.commands = list(dict.fromkeys([*self.commands, command]))
        self.write()

    def write(self):
        """README.md, results.json and results.csv. Returns what results.json holds."""
        records, lines = one_kind(self.records)
        results = {
            "commands": self.commands,
            "rows": summarize(records, self.speeds),
            "paired_deviation": paired_deviation(by_row(records)),
            "leads": leads(by_row(records)),
            "named_contrasts": self.contrasts,
            "contrasts": contrasts(by_row(records), self.contrasts or []),
            "left_out": self.unknown + lines,
            "failed": self.failed,
        }
        pictures = {name: words for name, words in PICTURES.items() if (self.folder / f"{name}.png").exists()}
        readme = readme_text(self.name, results, records, self.tuning(), pictures)
        write_whole(self.folder / "README.md", readme.encode())
        write_json(self.folder / "results.json", results)
        write_csv(self.folder / "results.csv", results["rows"])
        return results

    def tuning(self):
        """Losses and divergences of the rates that were tried."""
        return tuning_losses(read_records(self.runs / "tuning", may_diverge=True)[0])

    def show(self):
        """Everything anew, and the table for the terminal."""
        if not self.records:
            search = self.tuning()
            rates = f"the search for learning rates, so far:\n\n{rate_table(*search)}" if search[0] else ""
            print(rates or "no records yet")
            return
        records = one_kind(self.records)[0]
        plot_all(records, summarize(records, self.speeds), self.speeds, self.folder)
        results = self.write()
        print(terminal_table(*full_table(results["rows"])) + "\n")
        lines = list(results["left_out"])
        if any(entry["relative_speed"] is None for entry in results["rows"]):
            lines.append("tokens/s, peak MB and time are missing: --measure=True fills them in")
        print(*lines, f"{self.folder}/README.md", sep="\n")


def read_results(path):
    """What results.json said before: commands, contrasts and failures; the rest is made anew."""
    results = {"commands": [], "named_contrasts": None, "failed": {}}
    if path.exists():
        results |= {"named_contrasts": []} | read_json(path)
    failed, named = results["failed"], results["named_contrasts"]
    good = is_list(text)(results["commands"]) and isinstance(failed, dict) and all(map(text, failed.values()))
    good = good and (named is None or (is_list(is_list(text))(named) and {len(pair) for pair in named} <= {2}))
    refuse(not good, f"{path} is damaged: remove it, and it is made again from the records")
    results["named_contrasts"] = named and [tuple(pair) for pair in named]
    return results
