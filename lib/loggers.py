"""Where a run's metrics can go beside metrics.jsonl. Both packages are optional."""

import importlib.util

from lib.errors import refuse


def check_packages(s):
    """Refuse a logger whose package is missing, before anything is written."""
    for key, package in (("wandb_project", "wandb"), ("tensorboard", "tensorboard")):
        missing = getattr(s, key) and importlib.util.find_spec(package) is None
        refuse(missing, f"{key} needs the {package} package: pip install {package}")


def new_loggers(s, folder, step):
    """Those that the settings ask for; step is the one from which the run resumes, 0 for a new one."""
    loggers = []
    if s.wandb_project:
        loggers.append(Wandb(s, folder))
    if s.tensorboard:
        loggers.append(TensorBoard(folder / "tensorboard", step))
    return loggers


class Wandb:
    """Weights & Biases."""

    def __init__(self, s, folder):
        import wandb  # optional, and slow to import

        self.run = wandb.init(project=s.wandb_project, name=folder.name, config=s.as_dict())

    def log(self, values):
        self.run.log(values, step=values["step"])

    def log_text(self, name, text, step):
        self.run.summary[name] = text

    def close(self):
        self.run.finish()


class TensorBoard:
    def __init__(self, folder, step):
        from torch.utils.tensorboard import SummaryWriter  # optional, and slow to import

        # what was logged behind the checkpoint is going to be logged again
        self.writer = SummaryWriter(folder, purge_step=step + 1 if step else None)

    def log(self, values):
        for name, value in flat(values):
            if name != "step" and value is not None:
                self.writer.add_scalar(name, value, values["step"])

    def log_text(self, name, text, step):
        self.writer.add_text(name, "\n".join("    " + line for line in text.splitlines()), step)  # as it is: code

    def close(self):
        self.writer.close()


def flat(values, prefix=""):
    """(name, number) of everything in dicts and lists: layers/grad_norm/0 and so on."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        if isinstance(value, (dict, list)):
            yield from flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value
