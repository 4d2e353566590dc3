"""
Generate text from a trained run, or from Hugging Face weights:

    python sample.py --out_dir=out/method3_2 --start="The " --num_samples=3
    python sample.py --init_from=gpt2 --start=FILE:prompt.txt
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from configurator import UserError, configure, run_main
from data.common import load_tokenizer
from hf import find_folder
from model import GPT
from train import is_out_of_memory, load_checkpoint, pick_device

MAX_PROMPT_BYTES = 10_000_000  # far beyond every context
MAX_SAMPLES = 10_000


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
    if s.num_samples > MAX_SAMPLES:
        raise UserError(f"num_samples must be at most {MAX_SAMPLES}, not {s.num_samples}")
    if 0 < s.temperature < 1e-6:  # logits divided by it would overflow
        raise UserError(f"temperature must be 0 or at least 1e-6, not {s.temperature}")
    if s.top_p is not None and not 0 < s.top_p <= 1:
        raise UserError(f"top_p must be more than 0 and at most 1, not {s.top_p}")
    if s.checkpoint not in ("best", "latest"):
        raise UserError(f"checkpoint must be best or latest, not {s.checkpoint!r}")


def load_run(out_dir, which):
    """Model and tokenizer of a run; both are in its folder."""
    names = {"best": "best.pt", "latest": "ckpt.pt"}
    there = [name for name, file in names.items() if os.path.exists(out_dir / file)]
    if which not in there:
        advice = f"choose --checkpoint={there[0]}" if there else "train one, or name another --out_dir"
        raise UserError(f"there is no {names[which]} of a run in {out_dir}: {advice}")
    checkpoint = load_checkpoint(out_dir / names[which])
    return checkpoint["model"], load_tokenizer(checkpoint["data"].get("tokenizer"), out_dir)


def load_hugging_face(name):
    try:
        folder = find_folder(name)
        model = GPT.from_pretrained(folder)
    except ValueError as error:
        raise UserError(error) from None
    has_own = (folder / "tokenizer.json").exists()
    if not has_own and not 0 <= model.config.vocab_size - 50257 < 64:  # GPT-2's ids, or those padded for speed
        raise UserError(f"{folder} has no tokenizer.json, and its vocabulary is not GPT-2's: put the file there")
    return model, load_tokenizer("hf" if has_own else "gpt2", folder)


def read_prompt(start):
    """The text itself, or that of the file which FILE:path names."""
    content = start.encode(errors="surrogatepass")  # bytes that were no UTF-8 on the command line are surrogates now
    if start.startswith("FILE:"):
        path = start.removeprefix("FILE:")
        try:
            with open(path, "rb") as file:
                content = file.read(MAX_PROMPT_BYTES + 1)
        except (OSError, ValueError) as error:
            raise UserError(f"the prompt {path} cannot be read: {getattr(error, 'strerror', error)}") from None
        if len(content) > MAX_PROMPT_BYTES:
            raise UserError(f"the prompt {path} is longer than {MAX_PROMPT_BYTES:,} bytes: cut it")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise UserError("the prompt is not valid text: give it as UTF-8") from None


def prompt_ids(text, tokenizer, block_size):
    if not text:
        return [tokenizer.eot_id]  # a document begins where another ended
    ids = [int(i) for i in tokenizer.encode_batch([text])[0]]
    if len(ids) > block_size:
        print(f"the prompt has {len(ids):,} tokens; the model sees the last {block_size:,}", file=sys.stderr)
    return ids[-block_size:]


def main():
    s = configure(sys.argv[1:], SampleConfig)
    check_settings(s)
    try:
        sample(s)
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise UserError("out of memory: use a smaller num_samples") from None
        if "probability tensor" in str(error):  # what torch says when it shall draw from nan
            raise UserError("the model gives nan or infinite logits: choose another checkpoint") from None
        raise


def sample(s):
    device = pick_device(s.device)
    model, tokenizer = load_hugging_face(s.init_from) if s.init_from else load_run(Path(s.out_dir), s.checkpoint)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, the model only {model.config.vocab_size:,}: "
            "put the model's own tokenizer.json into its folder"
        )
    model.to(device).eval()
    prompt = read_prompt(s.start)
    ids = prompt_ids(prompt, tokenizer, model.config.block_size)

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
