"""A model on validation data."""

import math
import time

from lib.machine import seconds_since


def evaluate(model, windows, machine, batch_size, most_tokens, stop):
    """
    The model on all windows, or on as many as hold most_tokens, evenly spread and always the same; each process its
    share, every token counts the same. None if a signal came.
    """
    started = time.perf_counter()
    n = windows.n_all if most_tokens is None else min(windows.n_all, math.ceil(most_tokens / windows.block_size))
    share = range(machine.rank, n, machine.world)
    batch_size = min(batch_size, math.ceil(n / machine.world))  # all batches of one shape: compiled once
    loss = correct = steps = 0
    model.eval()
    with machine.progress("window", len(share), delay=5) as bar:
        while steps * batch_size < len(share) and not stop.received:
            chosen = [i * windows.n_all // n for i in share[steps * batch_size :][:batch_size]]
            x, y = windows.batch(chosen, batch_size, machine.device)
            with machine.autocast():
                batch_loss, batch_correct = model.score(x, y)
            loss, correct, steps = loss + batch_loss.item(), correct + batch_correct.item(), steps + 1
            bar.update(len(chosen))
    model.train()
    loss, correct, steps, stopped = machine.sum(loss, correct, steps, bool(stop.received))
    n_tokens, seconds = min(n * windows.block_size, len(windows.tokens) - 1), seconds_since(started)
    results = {
        "eval_accuracy": correct / n_tokens,
        "eval_loss": loss / n_tokens,
        "eval_perplexity": math.exp(min(loss / n_tokens, 700)),
        "eval_bits_per_byte": loss / math.log(2) / (windows.n_bytes * (n_tokens / (len(windows.tokens) - 1))),
        "eval_runtime": seconds,
        "eval_samples": n,
        "eval_samples_per_second": n / seconds,
        "eval_steps_per_second": steps / seconds,
    }
    return None if stopped else results
