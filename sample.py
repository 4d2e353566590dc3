"""
Generate text from a trained run, or from Hugging Face weights:

    python sample.py --out_dir=out/method3_2 --start="The " --num_samples=3
    python sample.py --init_from=gpt2 --start=FILE:prompt.txt
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from configurator import UserError, configure, run_main
from data.common import load_tokenizer, read_text
from model import GPT
from train import ROOT, load_checkpoint, model_from_checkpoint, pick_device


@dataclass
class SampleConfig:
    out_dir: str = "out/method3_2"  # of the run
    checkpoint: str = "best"  # best or latest
    init_from: str | None = None  # instead of a run: a Hugging Face name or folder
    start: str = ""  # the prompt, or FILE:path; empty: the beginning of a document
    num_samples: int = 1
    max_new_tokens: int = 500
    temperature: float = 0.8  # 0: always the most likely token
    top_k: int | None = 200  # draw from the k most likely tokens only
    top_p: float | None = None  # draw from the most likely tokens that together have this probability
    stop: bool = True  # end a sample at the end of a document
    seed: int = 1
    device: str | None = None  # cuda, mps, cpu; None: by what the machine has


def check_settings(s):
    for name, least in {"num_samples": 1, "max_new_tokens": 1, "top_k": 1, "temperature": 0, "seed": 0}.items():
        if getattr(s, name) is not None and getattr(s, name) < least:
            raise UserError(f"{name} must be at least {least}, not {getattr(s, name)}")
    if s.top_p is not None and not 0 < s.top_p <= 1:
        raise UserError(f"top_p must be more than 0 and at most 1, not {s.top_p}")
    if s.checkpoint not in ("best", "latest"):
        raise UserError(f"checkpoint must be best or latest, not {s.checkpoint!r}")


def load_run(out_dir, which):
    """Model and tokenizer of a run; both are in its folder."""
    if not (out_dir / "ckpt.pt").exists():
        raise UserError(f"there is no run in {out_dir}: train one, or name another --out_dir")
    checkpoint = load_checkpoint(out_dir / ("best.pt" if which == "best" else "ckpt.pt"))
    return model_from_checkpoint(checkpoint), load_tokenizer(checkpoint["data"]["tokenizer"], out_dir)


def load_hugging_face(name):
    from hf import find_folder

    folder = find_folder(name)
    try:
        model = GPT.from_pretrained(folder)
    except ValueError as error:
        raise UserError(error) from None
    return model, load_tokenizer("hf" if (folder / "tokenizer.json").exists() else "gpt2", folder)


def prompt_ids(start, tokenizer, block_size):
    text = read_text(start.removeprefix("FILE:")) if start.startswith("FILE:") else start
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError("the prompt is not valid text: give it as UTF-8") from None
    if text:
        ids = [int(i) for i in tokenizer.encode_batch([text])[0]]
    elif tokenizer.eot_id is not None:
        return [tokenizer.eot_id], text  # a document begins where another ended
    else:
        raise UserError("this tokenizer has no token to start from: give a prompt with --start=…")
    if len(ids) > block_size:
        print(f"the prompt has {len(ids):,} tokens; the model sees the last {block_size:,}", file=sys.stderr)
    return ids[-block_size:], text


def main():
    s = configure(sys.argv[1:], SampleConfig)
    check_settings(s)
    device = pick_device(s.device)
    model, tokenizer = load_hugging_face(s.init_from) if s.init_from else load_run(Path(s.out_dir), s.checkpoint)
    model.to(device).eval()
    ids, prompt = prompt_ids(s.start, tokenizer, model.config.block_size)

    decoders = [tokenizer.stream_decoder(ids) for _ in range(s.num_samples)]
    texts = [""] * s.num_samples
    ended = [False] * s.num_samples
    n_tokens, started = 0, time.perf_counter()
    print(prompt, end="", flush=True)
    for step in model.stream(
        torch.tensor([ids], device=device),
        s.max_new_tokens,
        s.temperature,
        s.top_k,
        s.top_p,
        generator=torch.Generator(device).manual_seed(s.seed),
        stop_id=tokenizer.eot_id if s.stop else None,
        num_samples=s.num_samples,
        real_vocab=tokenizer.vocab_size,
    ):
        for i, next_id in enumerate(step.tolist()):
            if ended[i]:
                continue
            n_tokens += 1
            ended[i] = s.stop and next_id == tokenizer.eot_id
            text = decoders[i].finish() if ended[i] else decoders[i].feed(next_id)
            texts[i] += text
            if i == 0:  # the first sample is shown as it is made, the others behind it
                print(text, end="", flush=True)
    seconds = time.perf_counter() - started
    print(decoders[0].finish())
    for decoder, text in zip(decoders[1:], texts[1:], strict=True):
        print(f"---------------\n{prompt}{text}{decoder.finish()}")
    print(f"{n_tokens} tokens, {n_tokens / seconds:.1f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    run_main(main)
