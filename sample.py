"""
Generate text from a trained run, or from Hugging Face weights:

    python sample.py out/method3_2 --start="The " --num_samples=3
    python sample.py --init_from=gpt2 --start=FILE:prompt.txt
"""

import sys
import time
from dataclasses import dataclass

import torch

from configurator import configure
from lib.errors import UserError, refuse, run_main
from lib.hf import load_with_tokenizer
from lib.machine import is_out_of_memory, pick_device
from lib.run import load_run

MAX_PROMPT_BYTES = 10_000_000  # far beyond every context
MAX_SAMPLES = 10_000


@dataclass
class SampleConfig:
    # model
    out_dir: str = "out/method3_2"  # the run's folder, which may also stand first, without --out_dir=
    checkpoint: str = "best"  # best or latest
    init_from: str | None = None  # instead of a run: a Hugging Face name or folder
    device: str | None = None  # cuda, mps, cpu; None: by what the machine has
    # text
    start: str = ""  # the prompt, or FILE:path; empty: the beginning of a document
    num_samples: int = 1  # made together, shown one after the other
    max_new_tokens: int = 500  # of each sample
    temperature: float = 0.8  # 0: always the most likely token
    top_k: int | None = 200  # sample from the k most likely tokens only
    top_p: float | None = None  # sample from the most likely tokens that together have this probability
    stop: bool = True  # end a sample at the end of a document
    seed: int = 1  # the same text again for the same seed


def check_settings(s):
    refuse(len(s.folders) > 1, f"one run at a time, not {len(s.folders)}: {', '.join(s.folders)}")
    twice = s.folders and ("out_dir" in s.given or s.init_from)
    refuse(twice, "name the model once: as a folder, or with --out_dir, or with --init_from")
    for name, least in {"num_samples": 1, "max_new_tokens": 1, "top_k": 1, "temperature": 0, "seed": 0}.items():
        value = getattr(s, name)
        refuse(value is not None and value < least, f"{name} must be at least {least}, not {value}")
    refuse(s.num_samples > MAX_SAMPLES, f"num_samples must be at most {MAX_SAMPLES}, not {s.num_samples}")
    overflow = 0 < s.temperature < 1e-6  # of logits divided by it
    refuse(overflow, f"temperature must be 0 or at least 1e-6, not {s.temperature}")
    wrong = s.top_p is not None and not 0 < s.top_p <= 1
    refuse(wrong, f"top_p must be more than 0 and at most 1, not {s.top_p}")
    refuse(s.checkpoint not in ("best", "latest"), f"checkpoint must be best or latest, not {s.checkpoint!r}")


def load_model(s):
    """Model and tokenizer."""
    if s.init_from:
        return load_with_tokenizer(s.init_from)
    checkpoint, tokenizer = load_run(s.folders[0] if s.folders else s.out_dir, s.checkpoint)
    return checkpoint.model, tokenizer


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
        refuse(len(content) > MAX_PROMPT_BYTES, f"the prompt {path} is longer than {MAX_PROMPT_BYTES:,} bytes: cut it")
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
    s = configure(sys.argv[1:], SampleConfig, folders="[RUN]")
    check_settings(s)
    try:
        sample(s)
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise UserError("out of memory: use a smaller num_samples") from None
        if "probability tensor" in str(error):  # what torch says when it shall sample from nan
            raise UserError("the model gives nan or infinite logits: choose another checkpoint") from None
        raise


def sample(s):
    device = pick_device(s.device)
    model, tokenizer = load_model(s)
    sizes = f"the tokenizer has {tokenizer.vocab_size:,} ids, the model only {model.config.vocab_size:,}"
    too_many = tokenizer.vocab_size > model.config.vocab_size
    refuse(too_many, f"{sizes}: put the model's own tokenizer.json into its folder")
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
    seconds = max(1e-9, time.perf_counter() - started)  # a clock may stand still
    print(decoders[0].finish())
    for decoder, text in zip(decoders[1:], texts[1:], strict=True):
        print(f"---------------\n{prompt}{text}{decoder.finish()}")
    print(f"{n_tokens} tokens, {n_tokens / seconds:.1f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    run_main(main)
