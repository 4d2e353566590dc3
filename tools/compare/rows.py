"""
What a row of the comparison is, and what it costs.

    MODE            a residual mode by its name; followed by any of these, in this order:
      -stored       recompute=False: no earlier layer is run again
      -K            reruns=K: only the nearest K earlier layers are run again, as in method3_2-1
      -own          residual_start=own: the weights under the softmax start near the plain residual
      -fast         what the residual has to learn learns 10 times faster: in a short run it cannot travel far otherwise
      -xF           F times the steps, as in baseline-x0.5
    deeper          the baseline whose depth comes nearest to method3_2's forward FLOPs per token
    longer          the baseline with its schedule stretched to method3_2's training FLOPs
    looped          the baseline whose layers run as often as comes nearest to method3_2's forward FLOPs per token
    deeper-ROW …    the same for what another row costs
"""

import functools
import math
import re
from dataclasses import asdict, dataclass, fields, replace

import torch

from configurator import configure
from data.dataset import dataset_folder, load_meta
from lib.errors import UserError, refuse
from lib.hf import OVERRIDES, find_folder, read_config
from lib.machine import Machine
from lib.start import padded_vocab
from model import GPT, GPTConfig, ResidualMode, initial_residual
from train import SETTINGS, check_settings

CONTROLS = ("deeper", "longer", "looped")
MATCHED = "method3_2"  # what a control without a name costs
FAST = 10.0
SET_HERE = "overwrite stop_at eval_only seed residual_mode recompute reruns residual_start loops".split()
# in the order in which they are trained, seed by seed: the baseline, contrasts and controls first
DEFAULT_ROWS = (
    "baseline method3_2 method4_2 method3_1-stored method3_2-1 mudd hc looped longer deeper "
    "baseline-x0.5 baseline-x2 baseline-x4 method1 method2 method3_1 method4_1 method3_2-stored method4_1-stored "
    "method3_2-2 method3_2-own method3_2-stored-own method3_3-stored method3_3-1 "
    "x0 denseformer resformer realformer attnres hc_static mhc"
).split()


# --- names ------------------------------------------------------------------------------------------------------------

NAME = re.compile(
    rf"((?P<control>{'|'.join(CONTROLS)})-)?(?P<mode>\w+)(?P<stored>-stored)?(-(?P<reruns>[1-9][0-9]{{0,3}}))?"
    r"(?P<own>-own)?(?P<fast>-fast)?(-x(?P<length>[0-9]+(\.[0-9]+)?))?"
)


@dataclass(frozen=True)
class Row:
    """A row's name, taken apart; str() puts it together again."""

    control: str | None  # made from the baseline, at the cost of what the rest says
    mode: str
    stored: bool
    reruns: int | None
    own: bool
    fast: bool
    length: float  # times the steps

    def __str__(self):
        variants = {"stored": self.stored, self.reruns: self.reruns, "own": self.own, "fast": self.fast}
        variants[f"x{self.length:g}"] = self.length != 1
        name = "-".join([self.mode, *(str(variant) for variant, there in variants.items() if there)])
        if self.control:
            return self.control if name == MATCHED else f"{self.control}-{name}"
        return name

    def model_changes(self):
        """What a row that is no control changes in the model's settings."""
        changes = {"residual_mode": self.mode}
        changes |= {"recompute": False} if self.stored else {}
        changes |= {"reruns": self.reruns} if self.reruns else {}
        return changes | ({"residual_start": "own"} if self.own else {})


@functools.cache
def parse(name):
    """The Row of a name; what is none, or what no model can be, is refused."""
    match = NAME.fullmatch(f"{name}-{MATCHED}" if name in CONTROLS else name)
    modes = [mode.value for mode in ResidualMode]
    first = match["mode"] if match else re.sub(f"^({'|'.join(CONTROLS)})-", "", name).partition("-")[0]
    rows = f"choose from {', '.join(modes)}; {', '.join(CONTROLS)}, also for a row, as in deeper-method4_2"
    refuse(first not in modes, f"row {name!r} is not known: {rows}")
    variants = "-stored, -K (a number of re-runs), -own, -fast, -xF (F times the steps), in this order"
    refuse(not match, f"row {name!r} is not known: a mode may be followed by {variants}")
    row = Row(
        match["control"],
        match["mode"],
        stored=bool(match["stored"]),
        reruns=int(match["reruns"]) if match["reruns"] else None,
        own=bool(match["own"]),
        fast=bool(match["fast"]),
        length=float(match["length"] or 1),
    )
    where = f"row {name!r}:"
    try:
        config = GPTConfig(n_layer=3, **row.model_changes())
    except UserError as error:
        raise UserError(f"{where} {error}") from None
    no_reruns = (row.stored or row.reruns) and not GPTConfig(n_layer=3, residual_mode=row.mode).n_reruns
    refuse(no_reruns, f"{where} {row.mode} runs nothing again, so -stored and -K mean nothing to it")
    refuse(row.fast and not initial_residual(config), f"{where} {row.mode} has nothing that could learn faster")
    refuse(not 0.01 <= row.length <= 100, f"{where} the steps can be a hundredth to a hundred times as many")
    of_baseline = row.control and (row.mode == "baseline" or row.length != 1)
    refuse(of_baseline, f"{where} a control costs what a row of another mode and of the usual length costs")
    return row


def place(name):
    """A row's place in a table: by mode and variant, the usual length first, controls at the end."""
    row = parse(name)
    modes = [mode.value for mode in ResidualMode]
    variant = not row.stored and bool(row.reruns), row.stored, row.reruns or 0, row.own, row.fast
    return row.control is not None, modes.index(row.mode), row.length != 1, *variant, row.length, row.control or ""


def is_known(name):
    """Whether this clone has such a row: a record may come from another."""
    try:
        return str(parse(name)) == name
    except UserError:
        return False


def length_of_baseline(name):
    """Of the baseline, how many times the steps it is trained for; None: another row."""
    row = parse(name)
    return row.length if row.mode == "baseline" else None


def row_of_same_step(name):
    """The row that trains at the same speed, since length changes nothing in a step."""
    row = parse(name)
    return "baseline" if row.control == "longer" else str(replace(row, length=1.0))


def row_to_tune(name):
    """The row whose learning rate this one takes: that without -K and -own; of most rows and all controls, itself."""
    row = parse(name)
    return name if row.control else str(replace(row, reruns=None, own=False))


def control_of(control, name):
    """The name of a row's control; None for the baseline and for controls, which have none."""
    row = parse(name)
    if row.control or row.mode == "baseline" or row.length != 1:
        return None
    return str(replace(row, control=control))


# --- what a row changes and costs -------------------------------------------------------------------------------------


class Scale:
    """The settings that all rows share, what each row changes in them, and what that costs."""

    def __init__(self, common, data):
        """common: settings by key, as they were given; data: the dataset's meta.json, None if only FLOPs are wanted."""
        self.common, self.data, self.models = common, data, {}
        self.plain = self.settings({})
        check_settings(self.plain)

    def options(self, changes):
        """The command line of train.py."""
        settings = (self.common | changes).items()
        return [f"--{key}={','.join(map(str, v)) if isinstance(v, tuple) else v}" for key, v in settings]

    def settings(self, changes):
        return configure(self.options(changes), *SETTINGS)

    def model(self, changes):
        """Its shapes, without numbers."""
        s = self.settings(changes)
        given = {field.name: getattr(s, field.name) for field in fields(GPTConfig) if field.name in s.given}
        key = tuple(sorted(given.items()))
        if key not in self.models:
            if s.init_from != "scratch":
                other = given.keys() - set(OVERRIDES)
                refuse(other, f"{s.init_from} decides itself about {', '.join(sorted(other))}: leave that out")
                config = replace(read_config(find_folder(s.init_from) / "config.json")[1], **given)
            else:
                n_vocab = self.data["vocab_size"] if self.data else s.vocab_size
                config = GPTConfig(**{"vocab_size": padded_vocab(n_vocab)} | given)
            with torch.device("meta"):
                self.models[key] = GPT(config)
        return self.models[key]

    def flops_per_token(self, changes):
        """Of the forward pass."""
        model = self.model(changes)
        return model.flops_per_token(model.config.block_size)

    def steps(self, changes):
        s = self.settings(changes)
        if s.max_steps:
            return s.max_steps
        block_size = self.model(changes).config.block_size
        windows = (self.data["train_tokens"] - 1) // block_size
        return math.ceil(s.epochs * windows / max(1, s.batch_tokens // block_size))

    def training_flops(self, changes):
        """Forward and backward, of all steps."""
        return 3 * self.flops_per_token(changes) * self.steps(changes) * self.plain.batch_tokens

    def stretched(self, factor):
        if self.plain.max_steps:
            return {"max_steps": max(1, round(self.plain.max_steps * factor))}
        return {"epochs": self.plain.epochs * factor}

    def changes(self, name):
        row = parse(name)
        try:
            if row.control:
                return self.control_changes(name, row)
            changes = row.model_changes() | ({"residual_lr_scale": FAST} if row.fast else {})
            self.model(changes)  # may be impossible at this scale
            return changes | (self.stretched(row.length) if row.length != 1 else {})
        except UserError as error:
            raise UserError(f"{name}: {error}") from None

    def control_changes(self, name, row):
        """The baseline at the cost of the row without its control."""
        pretrained = row.control != "longer" and self.plain.init_from != "scratch"
        refuse(pretrained, "a pretrained model has the depth that it has: leave this row out")
        here, target = self.flops_per_token({}), self.flops_per_token(replace(row, control=None).model_changes())
        if row.control == "longer":
            changes = self.stretched(target / here)
        else:
            key, now = ("n_layer", self.plain.n_layer) if row.control == "deeper" else ("loops", 1)
            one_more = self.flops_per_token({key: now + 1})
            changes = {key: max(1, now + round((target - here) / (one_more - here)))}
        same = (self.flops_per_token(changes), self.steps(changes)) == (here, self.steps({}))
        refuse(same, f"at {target / here:.3f} of the baseline's FLOPs it is the baseline itself: leave it out")
        return changes


def open_scale(s, own_keys):
    """The Scale of a command's settings, with its dataset."""
    for key in SET_HERE:
        refuse(key in s.given, f"the comparison sets {key} itself: choose rows with --modes and seeds with --seeds")
    resumes = s.init_from in ("resume", "resume_prev")
    refuse(resumes, "a run is resumed by the same command; --init_from names a pretrained model")
    common = {key: getattr(s, key) for key in s.types if key in s.given - {*own_keys, "out_dir"}}
    if s.plan and {"vocab_size", "max_steps"} <= s.given:  # on paper: the data may come later
        return Scale(common, None)
    folder = dataset_folder(s.dataset, Machine("cpu"))  # GPUs are left to the runs
    return Scale(common, asdict(load_meta(folder)))
