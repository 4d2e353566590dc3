"""A run as a Hugging Face folder: opened by transformers without this project, equal in every mode, and taken back."""

import ast
import json
import os
import shutil
import subprocess
import sys

import pytest
import tiktoken
import torch
from helpers import ENVIRONMENT, check_error, dataset, good, options, run, snapshot, tiny
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from data.tokenizer import TiktokenTokenizer
from lib.checkpoint import read_run, save_checkpoint
from lib.run import load_run
from model import GPT, GPTConfig, ResidualMode
from tools.export import tokenizer_files
from tools.flat import ROOT, flat

GPT2 = {"norm": "layernorm", "position": "learned", "activation": "gelu_tanh", "bias": True, "tie_weights": True}
MODELS = {mode.value: {"residual_mode": mode.value} for mode in ResidualMode} | {
    "gpt2": GPT2,
    "gpt2 in a mode": GPT2 | {"residual_mode": "method4_2", "recompute": False},
    "llama 3": {"n_head": 4, "n_kv_head": 2, "rope_scaling": (8.0, 1.0, 4.0, 4.0), "tie_weights": True},
    "batchnorm": {"norm": "batchnorm"},
    "deepnorm": {"norm_position": "deepnorm", "norm": "groupnorm", "residual_mode": "method3_2", "reruns": 1},
    "primer": {"dconv": True, "activation": "relu2", "norm_position": "sandwich", "residual_mode": "mudd"},
    "looped": {"loops": 2},
}
NATIVE = {"baseline", "gpt2", "llama 3"}
TEXTS = ["the cat", "naïve café 😀 <|endoftext|>\n\n  x"]
# what somebody does who has the folders and transformers, and nothing else of ours
STRANGER = """
import json, sys, torch, transformers
from safetensors.torch import save_file
folders, texts, out = json.loads(sys.argv[1])
results = {}
for name, folder in folders.items():
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert tokenizer.eos_token_id == model.config.eos_token_id == 256
    results[name + " class"] = torch.tensor(type(model).__name__ == "ReGPTForCausalLM")
    for i, text in enumerate(texts):
        results[f"{name} ids {i}"] = torch.tensor(tokenizer(text).input_ids)
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    idx = torch.randint(257, (2, 5), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        results[name + " logits"] = model(idx).logits
        results[name + " loss"] = model(idx, labels=idx).loss
        results[name + " greedy"] = model.generate(idx, max_new_tokens=3, do_sample=False)
        if name not in ("baseline", "gpt2", "llama 3"):
            padded = torch.cat((idx, torch.zeros(2, 2, dtype=torch.long)), dim=1)
            mask = torch.tensor([[1] * 5 + [0] * 2] * 2)
            results[name + " padded"] = model(padded, attention_mask=mask).logits[:, :5]
            left = torch.tensor([[0] + [1] * 4] * 2)
            for options in ({"num_beams": 2}, {"attention_mask": left}, {"max_new_tokens": 30}):
                try:
                    model.generate(idx, **{"do_sample": False, "max_new_tokens": 2} | options)
                    raise SystemExit(f"{name} does {options}")
                except ValueError as error:
                    words = ("without beams", "pad on the right", "do not fit into")
                    assert any(word in str(error) for word in words), error
assert not {"model", "lib", "rivals"} & set(sys.modules)
save_file({name: tensor.contiguous() for name, tensor in results.items()}, out)
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The runs, their folders, and what a stranger sees of them."""
    base = tmp_path_factory.mktemp("export")
    good("train.py", *tiny(base / "trained"))
    about = read_run(base / "trained/best.safetensors")
    runs, folders = {}, {}
    for name, settings in MODELS.items():
        runs[name], folders[name] = base / "runs" / name, base / name.replace(" ", "_")
        shutil.copytree(base / "trained", runs[name])
        torch.manual_seed(1)
        model = GPT(GPTConfig(**about["config"] | settings))
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():  # large enough to matter, the residual tensors too
                tensor.data += 0.2 * torch.rand(tensor.shape)
        now = about | {"settings": about["settings"] | settings, "best_loss": 1.2345}
        save_checkpoint(runs[name] / "best.safetensors", model, None, now)
        good("tools.export", runs[name], folders[name])
    out = base / "seen.safetensors"
    argument = json.dumps([{name: str(folder) for name, folder in folders.items()}, TEXTS, str(out)])
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= ENVIRONMENT | {"HF_MODULES_CACHE": str(base / "modules")}
    command = [sys.executable, "-c", STRANGER, argument]
    process = subprocess.run(command, cwd=base, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return runs, folders, load_file(out)


@pytest.mark.parametrize("name", MODELS)
def test_a_stranger_sees_the_same(name, exported):
    runs, _, seen = exported
    checkpoint, tokenizer = load_run(runs[name])
    model = checkpoint.model.eval()
    assert seen[name + " class"].item() == (name not in NATIVE)
    for i, text in enumerate(TEXTS):
        assert seen[f"{name} ids {i}"].tolist() == tokenizer.encode(text)
    idx = torch.randint(257, (2, 5), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, _ = model(idx, idx)
        _, loss = model(idx[:, :-1], idx[:, 1:])
    assert logits.std() > 0.1
    exact = {"rtol": 0, "atol": 1e-4 if name in NATIVE else 0}
    torch.testing.assert_close(seen[name + " logits"], logits, **exact)
    torch.testing.assert_close(seen[name + " loss"], loss, rtol=0, atol=1e-4)
    if name not in NATIVE:
        torch.testing.assert_close(seen[name + " padded"], logits, rtol=0, atol=1e-5)
    steps = model.stream(idx, 3, temperature=0, stop_id=tokenizer.eot_id, real_vocab=tokenizer.vocab_size)
    assert seen[name + " greedy"].tolist() == torch.cat((idx, torch.stack(list(steps), dim=1)), dim=1).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_taken_back_to_the_bit(name, exported):
    runs, folders, _ = exported
    model, again = load_run(runs[name])[0].model, GPT.from_pretrained(folders[name])
    assert again.config == model.config
    ours, theirs = model.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_taken_back_by_the_commands(exported, tmp_path):
    runs, folders, _ = exported
    text = ("--start=the ", "--max_new_tokens=4", "--temperature=0")
    for name in ("baseline", "mudd", "deepnorm"):
        assert good("sample.py", f"--init_from={folders[name]}", *text) == good("sample.py", runs[name], *text)
        out_dir = tmp_path / name
        settings = {"init_from": folders[name], "dataset": dataset(), "out_dir": out_dir, "max_steps": 1}
        settings |= {"batch_tokens": 64, "learning_rate": 0, "weight_decay": 0, "sample_tokens": 0}
        good("train.py", *options(**settings))
        again = load_run(out_dir)[0].model.state_dict()
        same = [torch.equal(again[key], tensor) for key, tensor in load_run(runs[name])[0].model.state_dict().items()]
        assert all(same)


def test_another_residual_on_top(exported):
    """A baseline of any backbone starts in another mode; what has learned a residual keeps it."""
    _, folders, _ = exported
    again = GPT.from_pretrained(folders["looped"], block_size=4, dropout=0.5)
    assert again.config.block_size == 4 and again.config.loops == 2
    assert GPT.from_pretrained(folders["batchnorm"], residual_mode="x0").config.residual_mode == "x0"
    for overrides in ({"residual_mode": "baseline"}, {"residual_mode": "method4_2"}, {"residual_start": "own"}):
        with pytest.raises(ValueError, match="has learned the residual of 'method3_2'"):
            GPT.from_pretrained(folders["method3_2"], **overrides)


def test_a_residual_that_is_lost(exported, tmp_path):
    """What has learned a residual is not quietly given a new one."""
    _, folders, _ = exported
    shutil.copytree(folders["method3_2"], tmp_path / "lost")
    tensors = load_file(tmp_path / "lost/model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "residual_" not in name}
    assert len(kept) == len(tensors) - 2
    save_file(kept, tmp_path / "lost/model.safetensors")
    with pytest.raises(ValueError, match=r"tensor h.1.residual_weight should be .*, is absent"):
        GPT.from_pretrained(tmp_path / "lost")


def test_what_lies_in_a_folder(exported):
    runs, folders, _ = exported
    files = {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    files |= {"tokenizer_config.json"}
    assert {path.name for path in folders["gpt2"].iterdir()} == files
    assert {path.name for path in folders["method3_2"].iterdir()} == files | {"modeling_regpt.py"}
    generation = json.loads((folders["method3_2"] / "generation_config.json").read_text())
    assert generation == {"eos_token_id": 256, "pad_token_id": 256, "suppress_tokens": list(range(257, 320))}
    card = (folders["method3_2"] / "README.md").read_text()
    loss = json.loads((runs["method3_2"] / "eval_results.json").read_text())["eval_loss"]
    for part in (
        "`method3_2`",
        "a test",
        "1.2345",
        f"{loss:.4f}",
        "python train.py",
        "trust_remote_code=True",
    ):
        assert part in card
    assert "trust_remote_code" not in (folders["gpt2"] / "README.md").read_text()
    assert str(runs["method3_2"]) not in card  # where it was made is nobody's business


def test_the_flat_file():
    """It imports torch and transformers alone, and holds what it needs: no files are read or executed."""
    text = flat(ROOT / "tools/modeling.py")
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).partition(".")[0] for node in imports
    }
    assert modules <= {"torch", "transformers", *sys.stdlib_module_names}
    assert not any(word in text for word in ("exec(", "open(", "subprocess", "read_text", "from_pretrained("))


def test_latest(exported, tmp_path):
    runs, _, _ = exported
    good("tools.export", runs["hc"], tmp_path / "latest", "--checkpoint=latest")
    ours, theirs = load_run(runs["hc"], "latest")[0].model, GPT.from_pretrained(tmp_path / "latest")
    assert torch.equal(ours.wte.weight, theirs.wte.weight)
    assert not torch.equal(ours.wte.weight, load_run(runs["hc"])[0].model.wte.weight)


def test_whole_or_not_at_all(exported, tmp_path):
    runs, folders, _ = exported
    check_error(run("tools.export", runs["mudd"], tmp_path / "full", limit=20_000), "cannot write", tmp_path / "full")
    assert os.listdir(tmp_path) == []
    before = snapshot(folders["mudd"])
    check_error(run("tools.export", runs["mudd"], folders["mudd"]), "is there already")
    assert snapshot(folders["mudd"]) == before
    for args, words in (
        ((), "name the run's folder and the new folder"),
        ((runs["mudd"],), "name the run's folder and the new folder"),
        ((tmp_path, tmp_path / "x"), "there is no best.safetensors"),
        ((runs["mudd"], tmp_path / "x", "--checkpoint=first"), "choose best or latest"),
    ):
        check_error(run("tools.export", *args), words)
    assert os.listdir(tmp_path) == []


def test_gpt2_tokenizer():
    """Merges are found again from the ranks. A small vocabulary of GPT-2's kind: its own is not on every machine."""
    ranks = {bytes([i]): i for i in range(256)}
    for token in ("th", "in", "er", "an", "nd", "ing", "and", "the", " t", " a", " the", " and", "ther", "  ", "é"):
        ranks.setdefault(token.encode(), len(ranks))
    words = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
    special = {"<|endoftext|>": len(ranks)}
    encoding = tiktoken.Encoding("gpt2", pat_str=words, mergeable_ranks=ranks, special_tokens=special)
    ours = TiktokenTokenizer("gpt2", encoding)
    theirs = Tokenizer.from_str(tokenizer_files(ours, 8)["tokenizer.json"].decode())
    theirs.encode_special_tokens = True
    assert theirs.token_to_id("<|endoftext|>") == ours.eot_id
    for text in (
        "the then other and  another   the",
        "don't stand in the café\n\n 3,141 <|endoftext|>",
        "日本 \t e\u0301 ",
    ):
        assert theirs.encode(text).ids == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
