"""The lm-evaluation-harness on a run: equal to a computation by hand, and to the harness's own model on the export."""

import json
import math
import shutil

import lm_eval
import pytest
import torch
from helpers import check_error, good, run, snapshot, tiny
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from lib.checkpoint import read_run, save_checkpoint
from lib.machine import Machine
from lib.run import load_run
from model import GPT, GPTConfig
from tools.export import export
from tools.harness import Harness

QUESTIONS = [
    {"question": "the cat sat on", "choices": [" a mat", " home, slowly", "x"], "answer": 0},
    {"question": "and then,", "choices": [" slowly", " it went", " naïve café 😀"], "answer": 2},
    {"question": "", "choices": ["it", "on", "the cat"], "answer": 1},
    {"question": "the cat sat on a mat and then, slowly", "choices": [" it", " on"], "answer": 1},
]
TEXTS = [{"text": "the cat sat on a mat, slowly, and then it went home. on and on it went"}, {"text": "é"}]
TASKS = {
    "choose": {
        "data": QUESTIONS,
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "score": {
        "data": TEXTS,
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "write": {
        "data": [{"question": q["question"] or "x", "answer": ""} for q in QUESTIONS],
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"max_gen_toks": 6, "until": ["a", "\n"], "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}
NAMES = [f"tiny_{name}" for name in TASKS]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    for name, task in TASKS.items():
        lines = [json.dumps(line) for line in task["data"]]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        description = {key: value for key, value in task.items() if key != "data"} | {
            "task": f"tiny_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}},
            "test_split": "test",
        }
        (folder / f"{name}.yaml").write_text(json.dumps(description))  # JSON is YAML
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Models that are not sure of anything: a baseline, and a mode with a tied head."""
    base = tmp_path_factory.mktemp("runs")
    good("train.py", *tiny(base / "trained", block_size=24, batch_tokens=96))
    about = read_run(base / "trained/best.safetensors")
    for name, settings in {"baseline": {}, "mode": {"residual_mode": "method3_2", "tie_weights": True}}.items():
        shutil.copytree(base / "trained", base / name)
        torch.manual_seed(1)
        model = GPT(GPTConfig(**about["config"] | settings))
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape)
        save_checkpoint(base / name / "best.safetensors", model, None, about | {"best_loss": 1.0})
    return base


@torch.no_grad()
def log_probability(model, context, continuation):
    """One token after the other, each from the last block_size tokens; and whether each is the most likely one."""
    total, greedy = 0.0, True
    whole = (context + continuation)[-model.config.block_size - 1 :]
    start = len(whole) - len(continuation)
    for end in range(start, len(whole)):
        logits, _ = model(torch.tensor([whole[:end]]))
        total += logits[0, -1].log_softmax(dim=0)[whole[end]].item()
        greedy &= logits[0, -1].argmax().item() == whole[end]
    return total, greedy


def by_hand(folder):
    checkpoint, tokenizer = load_run(folder)
    model, size, eot = checkpoint.model.eval(), checkpoint.config.block_size, tokenizer.eot_id
    right, right_norm = 0, 0
    for q in QUESTIONS:
        context = tokenizer.encode(q["question"]) or [eot]
        scores = [log_probability(model, context, tokenizer.encode(choice))[0] for choice in q["choices"]]
        right += max(range(len(scores)), key=scores.__getitem__) == q["answer"]
        norm = [score / len(choice) for score, choice in zip(scores, q["choices"], strict=True)]
        right_norm += max(range(len(norm)), key=norm.__getitem__) == q["answer"]
    total = 0.0
    for text in TEXTS:  # windows of block_size predictions; the last one reaches back to be full
        ids = [eot, *tokenizer.encode(text["text"])]
        for start in range(1, len(ids), size):
            end = min(start + size, len(ids))
            first = max(0, end - size - 1) if start > 1 else 0
            total += log_probability(model, ids[first:start], ids[start:end])[0]
    n_bytes = sum(len(text["text"].encode()) for text in TEXTS)
    return {
        "tiny_choose": {"acc": right / len(QUESTIONS), "acc_norm": right_norm / len(QUESTIONS)},
        "tiny_score": {"byte_perplexity": math.exp(-total / n_bytes), "bits_per_byte": -total / n_bytes / math.log(2)},
    }


def assert_figures(results, expected):
    for task, metrics in expected.items():
        for metric, value in metrics.items():
            assert results[task][f"{metric},none"] == pytest.approx(value, rel=1e-5), (task, metric)


def simple(harness, tasks, **options):
    """The harness called directly; also what it was answered."""
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return lm_eval.simple_evaluate(harness, tasks=NAMES, task_manager=manager, bootstrap_iters=0, **options)


def numbers_in(answer):
    """Of nested lists: log-probabilities, and 1 for the most likely continuation."""
    return [n for part in answer for n in numbers_in(part)] if isinstance(answer, (list, tuple)) else [float(answer)]


def answers(results, task):
    return [sample["resps"] for sample in sorted(results["samples"][task], key=lambda sample: sample["doc_id"])]


def test_figures(runs, tasks):
    """Through the real command, which writes its results beside the model and touches nothing else."""
    folder = runs / "mode"
    before = snapshot(folder)
    args = (folder, f"--tasks={','.join(NAMES)}", f"--include_path={tasks}", "--device=cpu", "--batch=2")
    stdout = good("tools.evaluate", *args)
    results = json.loads((folder / "harness.json").read_text())["results"]
    assert_figures(results, by_hand(folder))
    assert stdout.strip() == (folder / "harness.md").read_text().strip()
    assert all(task in stdout for task in NAMES)
    after = snapshot(folder)
    assert all(after[path] == before[path] for path in before)


def test_the_harness_own_model(runs, tasks, tmp_path):
    """transformers' Llama on the export: the same numbers and the same texts, answer by answer."""
    export(runs / "baseline", tmp_path / "exported", "best")
    checkpoint, tokenizer = load_run(runs / "baseline")
    ours = simple(Harness(checkpoint.model.eval(), tokenizer, Machine("cpu"), batch=3), tasks)
    theirs = simple(HFLM(str(tmp_path / "exported"), device="cpu", batch_size=1, dtype="float32"), tasks)
    assert_figures(ours["results"], by_hand(runs / "baseline"))
    for task in ("tiny_choose", "tiny_score"):
        for ours_one, theirs_one in zip(answers(ours, task), answers(theirs, task), strict=True):
            assert numbers_in(ours_one) == pytest.approx(numbers_in(theirs_one), abs=1e-4)
    texts = answers(ours, "tiny_write")
    assert texts == answers(theirs, "tiny_write") and len({str(text) for text in texts}) > 1


def test_mistakes(runs, tasks, tmp_path):
    folder = runs / "baseline"
    for args, words in (
        ((folder,), "name the tasks"),
        (("--tasks=tiny_score",), "name the run's folder"),
        ((folder, f"--init_from={folder}", "--tasks=x"), "name the model once"),
        ((folder, "--tasks=tiny_score", "--batch=0"), "batch must be at least 1"),
        ((tmp_path, "--tasks=lambada_openai"), "there is no best.safetensors"),
        ((folder, "--tasks=no_such_task"), "the harness has no task no_such_task"),
        ((folder, "--tasks=lambada_openai"), "the data of lambada_openai cannot be had"),
    ):
        check_error(run("tools.evaluate", *args), words)
    missing = "import sys; sys.modules['lm_eval'] = None"
    check_error(run("tools.evaluate", folder, "--tasks=x", before=missing), "pip install lm_eval")


def test_an_exported_mode(runs, tasks, tmp_path):
    """--init_from takes a folder, and writes beside it."""
    export(runs / "mode", tmp_path / "exported", "best")
    good("tools.evaluate", f"--init_from={tmp_path / 'exported'}", "--tasks=tiny_score", f"--include_path={tasks}")
    results = json.loads((tmp_path / "exported/harness.json").read_text())["results"]
    assert_figures(results, {"tiny_score": by_hand(runs / "mode")["tiny_score"]})
