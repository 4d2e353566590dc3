"""
The lm-evaluation-harness on a run, or on Hugging Face weights (pip install lm_eval):

    python -m tools.evaluate out/wikitext103-method3_2 --tasks=lambada_openai,hellaswag
    python -m tools.evaluate --init_from=gpt2 --tasks=lambada_openai --limit=100

The results are printed, and written beside the model as harness.json and harness.md.
"""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from configurator import configure
from lib.errors import UserError, one_line, refuse, run_main
from lib.files import write_json, write_whole
from lib.hf import load_with_tokenizer
from lib.machine import Machine
from lib.run import load_run

PACKAGE = "lm_eval==0.4.13"


@dataclass
class EvaluateConfig:
    # model
    checkpoint: str = "best"  # best, latest
    init_from: str | None = None  # instead of a run: a Hugging Face name or folder
    # tasks
    tasks: str = ""  # names of the harness's tasks, with commas
    include_path: str | None = None  # a folder with tasks of your own
    num_fewshot: int | None = None  # examples in the prompt; None: what the task says
    limit: int | None = None  # questions of each task; None: all
    batch: int = 32  # sequences of one forward pass; has no influence on the results
    # machine; None: by what it has
    device: str | None = None  # cuda, mps, cpu
    dtype: str | None = None  # bfloat16, float16, float32


def load_model(s):
    """Model, tokenizer, and the folder for the results, if there is one."""
    if s.init_from:
        refuse(s.folders, "name the model once: as a run's folder, or with --init_from")
        return *load_with_tokenizer(s.init_from), Path(s.init_from)
    refuse(len(s.folders) != 1, "name the run's folder: python -m tools.evaluate out/NAME --tasks=…")
    refuse(s.checkpoint not in ("best", "latest"), f"checkpoint '{s.checkpoint}' is not known: choose best or latest")
    checkpoint, tokenizer = load_run(s.folders[0], s.checkpoint)
    return checkpoint.model, tokenizer, Path(s.folders[0])


def main():
    s = configure(sys.argv[1:], EvaluateConfig, folders="[RUN]")
    refuse(not s.tasks, "name the tasks: --tasks=lambada_openai,hellaswag")
    for name in ("num_fewshot", "limit", "batch"):
        least = 0 if name == "num_fewshot" else 1
        value = getattr(s, name)
        refuse(value is not None and value < least, f"{name} must be at least {least}, not {value}")
    model, tokenizer, folder = load_model(s)
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager

        from tools.harness import Harness
    except ImportError as error:
        raise UserError(f"the lm-evaluation-harness is missing ({error}): pip install {PACKAGE}") from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its warnings are about defaults that it takes itself
    machine = Machine(s.device, s.dtype)
    model.to(machine.device).eval()
    names = s.tasks.split(",")
    manager = TaskManager(include_path=s.include_path)
    unknown = [name for name in names if name not in manager.all_tasks]
    refuse(unknown, f"the harness has no task {', '.join(unknown)}: lm-eval ls tasks lists them")
    try:
        manager.load(names)
    except Exception as error:  # of many libraries: no network, a moved dataset, a broken file
        raise UserError(
            f"the data of {s.tasks} cannot be had ({one_line(error)}): connect once, or choose others"
        ) from None
    results = lm_eval.simple_evaluate(
        Harness(model, tokenizer, machine, s.batch),
        tasks=names,
        num_fewshot=s.num_fewshot,
        limit=s.limit,
        log_samples=False,
        task_manager=manager,
    )
    table = lm_eval.utils.make_table(results)
    print(table)
    if folder.is_dir():
        kept = {key: results[key] for key in ("results", "versions", "n-shot", "n-samples", "higher_is_better")}
        write_json(folder / "harness.json", kept | {"settings": s.as_dict()})
        write_whole(folder / "harness.md", table.encode())


if __name__ == "__main__":
    run_main(main)
