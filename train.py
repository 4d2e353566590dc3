"""
Train a GPT on one process, or on many with torchrun:

    python train.py config/method3_2.py
    torchrun --standalone --nproc_per_node=8 train.py config/wikitext103.py config/method3_2.py

The same command again resumes the run.
"""

import contextlib
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from configurator import configure
from data.dataset import seed_for
from lib.errors import refuse, run_main
from lib.evaluation import evaluate
from lib.loggers import check_packages
from lib.machine import Machine, StopSignals, seconds_since
from lib.reports import eval_text, finite_or_none, layer_norms, residual_report, residual_text, show_sample
from lib.run import RunFolder
from lib.start import Data, Plan, start_training
from model import GPTConfig

ROOT = Path(__file__).resolve().parent

# --- settings: what each means when a run is resumed follows from its class -------------------------------------------


@dataclass
class CallConfig:
    """Said anew in each call, never taken from a checkpoint."""

    # this call
    out_dir: str | None = None  # None: out/ + the config files' names
    init_from: str = "scratch"  # scratch, resume, resume_prev (the checkpoint before), or a Hugging Face name or folder
    overwrite: bool = False  # start anew although out_dir holds a run: it is deleted
    stop_at: int | None = None  # end this call after that step; the schedule does not change
    eval_only: bool = False  # evaluate a run, or what init_from names, and end
    wandb_project: str | None = None  # also log to Weights & Biases
    tensorboard: bool = False  # also log to out_dir/tensorboard
    # machine; None: by what it has
    device: str | None = None  # cuda, mps, cpu
    dtype: str | None = None  # bfloat16, float16, float32
    compile: bool | None = None  # torch.compile the layers


@dataclass
class RunConfig:
    """With GPTConfig, what a run is: another value is another run."""

    # the run
    seed: int = 1  # of the initial weights, the order of the data and dropout, each with random numbers of its own
    dataset: str = "pydocs"  # a folder in data/, or a path


@dataclass
class RecipeConfig:
    """The same command must say the same; --init_from=resume can change them."""

    # optimizer: AdamW, warm-up, cosine to min_lr
    batch_tokens: int = 2048  # tokens of one optimizer step, over all processes
    learning_rate: float = 2e-3  # the highest, at the end of the warm-up
    min_lr: float = 0.0  # the lowest, at the end
    warmup: float = 0.015  # part of all steps
    weight_decay: float = 0.1  # of matrices; norms, biases and what the residual mode learns have none
    beta1: float = 0.9  # of the mean of gradients
    beta2: float = 0.95  # of the mean of their squares
    grad_clip: float = 1.0  # largest norm of the gradient; 0: any
    residual_lr_scale: float = 1.0  # times the learning rate for what the residual mode learns


@dataclass
class LoopConfig:
    """Remembered by --init_from=resume, and free to change."""

    # length
    epochs: float = 0.4  # passes over the data
    max_steps: int | None = None  # optimizer steps, instead of epochs
    # memory
    micro_batch: int = 16  # most sequences of one forward pass in one process; the rest is accumulated
    checkpoint_recompute: bool = False  # re-runs again in backward: less memory, more time
    # what to see and to keep
    eval_every: int = 200  # steps; there is always one at the end
    eval_tokens: int | None = None  # of an evaluation on the way, always the same ones; None: all, as at the end
    eval_batch: int = 32  # sequences; has no influence on the result
    checkpoint_every: int = 200  # steps; there is always one at the end
    log_every: int = 1  # steps between lines of metrics.jsonl
    log_layers_every: int | None = None  # steps between lines with each layer's gradient and stream norm; None: never
    sample_tokens: int = 256  # length of the text shown at the end; 0: none


SETTINGS = CallConfig, RunConfig, RecipeConfig, LoopConfig, GPTConfig


def check_settings(s):
    """Numbers out of range, whether they were typed or come from a checkpoint."""
    for name in "batch_tokens micro_batch eval_every eval_batch checkpoint_every log_every".split():
        refuse(getattr(s, name) < 1, f"{name} must be at least 1, not {getattr(s, name)}")
    for name in "seed learning_rate min_lr weight_decay grad_clip residual_lr_scale sample_tokens".split():
        refuse(getattr(s, name) < 0, f"{name} must not be negative, not {getattr(s, name)}")
    for name in "warmup beta1 beta2".split():
        refuse(not 0 <= getattr(s, name) < 1, f"{name} must be at least 0 and less than 1, not {getattr(s, name)}")
    refuse(s.epochs > 1e9, f"epochs must be at most 1e9, not {s.epochs}")
    for name in "epochs max_steps stop_at eval_tokens log_layers_every".split():
        value = getattr(s, name)
        refuse(value is not None and value <= 0, f"{name} must be more than 0, not {value}")
    check_packages(s)


# --- the run ----------------------------------------------------------------------------------------------------------


def learning_rate(step, steps, s):
    """Of step 1 … steps: linear warm-up, then a cosine down to min_lr."""
    warmup = round(s.warmup * steps)
    if step <= warmup:
        return s.learning_rate * step / warmup
    progress = (step - 1 - warmup) / (steps - warmup)
    return s.min_lr + (s.learning_rate - s.min_lr) * (1 + math.cos(math.pi * progress)) / 2


class Trainer:
    """One call's work on a run: what it needs, and in `t` what changes from step to step."""

    def __init__(self, s, machine, folder, t, data):
        self.s, self.machine, self.folder, self.t, self.data = s, machine, folder, t, data
        self.stop, self.stopping = StopSignals(), False  # stopping: all processes have agreed to
        self.results = None  # of the last evaluation of all tokens
        self.plan = None if s.eval_only else Plan(s, machine, data.train)
        if machine.compile:
            t.model.compile_layers()
        self.wrapped = t.model  # what training calls; evaluation and checkpoints use the bare model
        if machine.world > 1 and not s.eval_only:
            on_gpu = machine.device.type == "cuda"
            self.wrapped = DistributedDataParallel(t.model, [machine.device.index] if on_gpu else None)

    def run(self):
        """Train up to the last step of this call, or until a signal asks for an end."""
        s, t, plan, folder = self.s, self.t, self.plan, self.folder
        with self.machine.progress("step", plan.steps, done=t.step) as bar:
            if self.evaluate_if_due():  # a signal had cut the one of this step short
                folder.save(t)
            while t.step < plan.last_step and not self.stopping:
                started = time.perf_counter()
                loss, grad_norm, layers = self.train_step()
                seconds = seconds_since(started)
                t.seconds += seconds
                bar.set_postfix_str(f"loss {loss:.4f}, {s.batch_tokens / seconds:,.0f} tokens/s", refresh=False)
                bar.update()
                if t.step % s.log_every == 0 or t.step == plan.steps:
                    numbers = {"loss": loss, "lr": t.optimizer.param_groups[0]["lr"], "grad_norm": grad_norm}
                    numbers |= {"tokens_per_sec": s.batch_tokens / seconds, "memory": self.machine.peak_memory()}
                    folder.log(self.place() | numbers | {"seconds": t.seconds})
                if layers:
                    folder.log({"step": t.step, "layers": layers})
                self.evaluate_if_due()
                if t.step % s.checkpoint_every == 0 or t.step == plan.last_step or self.stopping:
                    folder.save(t)

    def train_step(self):
        """Returns the mean loss, the gradient's norm before it is clipped, and the layers' norms if they are due."""
        s, t, plan, machine = self.s, self.t, self.plan, self.machine
        for group in t.optimizer.param_groups:
            group["lr"] = learning_rate(t.step + 1, plan.steps, s) * group["lr_scale"]
        torch.manual_seed(seed_for(s.seed, "dropout", t.step, machine.rank))
        loss = 0.0
        for micro in range(plan.accumulate):
            first = t.step * plan.sequences + (micro * machine.world + machine.rank) * plan.micro_batch
            windows = self.data.train.shuffled(first, first + plan.micro_batch)
            x, y = self.data.train.batch(windows, plan.micro_batch, machine.device)
            sync = self.wrapped is t.model or micro == plan.accumulate - 1  # gradients are exchanged once per step
            with contextlib.nullcontext() if sync else self.wrapped.no_sync():
                with machine.autocast():
                    _, micro_loss = self.wrapped(x, y, return_logits=False)
                t.scaler.scale(micro_loss / plan.accumulate).backward()
            loss += micro_loss.detach() / plan.accumulate
            del micro_loss  # and with it the graph, before the next one is built: a quarter less memory
        t.scaler.unscale_(t.optimizer)
        due = machine.chief and s.log_layers_every and (t.step + 1) % s.log_layers_every == 0
        layers = layer_norms(t.model, x) if due else None
        grad_norm = torch.nn.utils.clip_grad_norm_(t.model.parameters(), s.grad_clip or math.inf).item()
        loss, stop = machine.sum(loss.item() / machine.world, bool(self.stop.received))
        self.stopping = stop > 0  # all processes at the same step
        if not math.isfinite(loss) or not (math.isfinite(grad_norm) or t.scaler.is_enabled()):
            raise self.folder.not_finite(f"step {t.step + 1}: loss {loss}, gradient norm {grad_norm}", t.step)
        t.scaler.step(t.optimizer)  # leaves out a step whose float16 gradients overflowed
        t.scaler.update()
        t.optimizer.zero_grad(set_to_none=True)
        t.step += 1
        return loss, finite_or_none(grad_norm), layers

    def place(self):
        """Where in the run a line of metrics.jsonl belongs."""
        tokens, epoch = self.t.step * self.s.batch_tokens, self.data.train.n_full * self.data.train.block_size
        return {"step": self.t.step, "tokens": tokens, "epoch": tokens / epoch}

    def evaluate_if_due(self):
        """The evaluations on the way, of eval_tokens or of all: the best model is the best of these."""
        t, folder = self.t, self.folder
        due = t.step % self.s.eval_every == 0 or t.step == self.plan.steps
        results = self.evaluate(self.s.eval_tokens) if due and t.step > folder.evaluated_step else None
        if not results:
            return False
        if results["eval_loss"] < t.best_loss:
            t.best_loss = results["eval_loss"]
            folder.save_best(t)
        folder.log(self.place() | {"seconds": t.seconds} | results)
        folder.evaluated_step = t.step
        folder.say(f"step {t.step}: validation loss {results['eval_loss']:.4f}")
        return True

    def evaluate(self, most_tokens=None):
        """The results, None if a signal came; what else there is to see of the model goes into its folder."""
        t = self.t
        self.machine.share_buffers(t.model)
        results = evaluate(t.model, self.data.val, self.machine, self.s.eval_batch, most_tokens, self.stop)
        self.stopping |= results is None
        if results:
            if not math.isfinite(results["eval_loss"]):
                raise self.folder.not_finite(f"step {t.step}: validation loss {results['eval_loss']}", t.step)
            results = {"epoch": self.place()["epoch"]} | results
            self.results = results if most_tokens is None else None
            self.folder.report(t, self.data.val, self.results)
        return results

    def close(self):
        """Behind the last step: the evaluation of all tokens, a sample, what the residual has learned."""
        s, t, folder = self.s, self.t, self.folder
        done = t.step == self.plan.steps and not self.stopping
        results = (self.results or self.evaluate()) if done else None
        folder.end("finished" if results else "stopped")
        if not results:
            anew = s.overwrite or s.init_from == "resume_prev"
            same = "the same command" + " with --overwrite=False --init_from=resume" * anew
            folder.say(f"stopped after step {t.step} of {self.plan.steps}; {same} resumes from there")
            return
        folder.say(eval_text(results))
        if s.sample_tokens and self.machine.chief:
            show_sample(t.model, self.data.tokenizer, s.sample_tokens, self.stop)
        learned = residual_report(t.model)
        if learned:
            folder.say("\n***** learned residual weights *****\n" + residual_text(learned))


def train(s, machine, folder):
    """As much of a run as this call does; returns the exit status."""
    checkpoint = folder.checkpoint_to_resume(s, (RunConfig, GPTConfig), (RecipeConfig,), (LoopConfig,))
    check_settings(s)
    nothing = s.eval_only and not checkpoint and s.init_from == "scratch"
    refuse(nothing, f"eval_only needs a run, which {folder.path} does not hold, or an --init_from")
    data = Data(s.dataset, machine)
    t = start_training(s, machine, folder, data, checkpoint)
    del checkpoint  # its tensors are the model's and the optimizer's now
    data.cut(t.model.config.block_size, s.seed)
    trainer = Trainer(s, machine, folder, t, data)
    folder.say(f"{folder.path}: {t.model.config.residual_mode}, {t.model.num_params():,} parameters, on {machine}")
    with trainer.stop:
        if s.eval_only:
            results = trainer.evaluate()
            folder.say(eval_text(results) if results else "stopped")
        elif folder.is_work_left(s, t.step, trainer.plan, data.meta):
            folder.begin(s, t, data, trainer.plan.steps)
            trainer.run()
            trainer.close()
    return trainer.stop.received


def main():
    s = configure(sys.argv[1:], *SETTINGS)
    machine = Machine(s.device, s.dtype, s.compile)
    name = "-".join(Path(file).stem for file in s.files) or "default"
    folder = RunFolder(s.out_dir or ROOT / "out" / name, machine)
    with folder.failures():
        status = train(s, machine, folder)
    machine.leave()
    sys.exit(status)


if __name__ == "__main__":
    run_main(main, output_optional=True)
