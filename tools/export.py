"""
A run as a Hugging Face folder: model, tokenizer and model card. GPT-2's and Llama's baselines open with transformers as
they are, every other model with trust_remote_code=True, by the code that lies in the folder.

    python -m tools.export out/shakespeare-method3_2 my-model
    python -m tools.export out/shakespeare-method3_2 my-model --checkpoint=latest
"""

import json
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from configurator import configure
from lib import hf
from lib.errors import refuse, run_main
from lib.files import read_json, write_json, write_whole
from lib.reports import row_name
from lib.run import load_run
from tools.flat import ROOT, flat

EOT = "<|endoftext|>"
HEAD = '''"""
Made by reGPT's tools/export.py from its modules, where the comments are. Open the folder with
transformers.AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True).
"""

'''
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [regpt, {mode}]
---

# {name}

A reGPT language model of {parameters:,} parameters ({n_layer} layers of width {n_embd}) whose residual connection is
`{mode}`, trained for {step:,} steps on {source}.

| on the validation data | |
|---|---|
{figures}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}"{trust})
tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})
```

It was begun with

    {command}
"""


@dataclass
class ExportConfig:
    # the run
    checkpoint: str = "best"  # best, latest


def export(run, folder, which):
    checkpoint, tokenizer = load_run(run, which)
    config, eot_id = checkpoint.config, tokenizer.eot_id
    own = bool(hf.misfits(config))
    with hf.whole_folder(folder) as new:
        theirs = own_config(config) if own else hf.their_config(config)
        tensors = own_tensors(checkpoint.model) if own else hf.their_tensors(checkpoint.model)
        hf.write_model(new, theirs | {"eos_token_id": eot_id, "dtype": "float32"}, tensors)
        if own:
            write_whole(new / "modeling_regpt.py", (HEAD + flat(ROOT / "tools/modeling.py")).encode())
        padding = list(range(tokenizer.vocab_size, config.vocab_size))  # of the vocabulary: never to be sampled
        generation = {"eos_token_id": eot_id, "pad_token_id": eot_id, "suppress_tokens": padding or None}
        write_json(new / "generation_config.json", generation)
        for name, content in tokenizer_files(tokenizer, config.block_size).items():
            write_whole(new / name, content)
        write_whole(new / "README.md", model_card(checkpoint, Path(run), Path(folder).name, own).encode())


# --- the model --------------------------------------------------------------------------------------------------------


def own_config(config):
    auto_map = {"AutoConfig": "modeling_regpt.ReGPTConfig", "AutoModelForCausalLM": "modeling_regpt.ReGPTForCausalLM"}
    theirs = {"model_type": "regpt", "architectures": ["ReGPTForCausalLM"], "auto_map": auto_map}
    sizes = {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.block_size,
    }  # where others look for them
    return theirs | sizes | {"tie_word_embeddings": config.tie_weights, "gpt": asdict(config)}


def own_tensors(model):
    tied = {"lm_head.weight"} if model.config.tie_weights else set()
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items() if name not in tied}


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def tokenizer_files(tokenizer, block_size):
    """tokenizer.json and tokenizer_config.json. A tokenizer of Hugging Face's form keeps its own."""
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": block_size}
    if tokenizer.name == "hf":
        about = json.dumps(about | {"eos_token": tokenizer.eot_token})
        return {"tokenizer_config.json": about.encode()} | tokenizer.files
    about |= {"eos_token": EOT, "pad_token": EOT, "padding_side": "right", "clean_up_tokenization_spaces": False}
    about |= {"split_special_tokens": True}  # "<|endoftext|>" in a text is text
    return {"tokenizer.json": byte_level_json(tokenizer), "tokenizer_config.json": json.dumps(about).encode()}


def byte_level_json(tokenizer):
    """The tokenizer.json of a tiktoken encoding: bytes, and the pairs that become one token."""
    ranks = tokenizer.encoding._mergeable_ranks  # {bytes: id}; what is merged first has the lower id
    letters = byte_letters()

    def spell(token):
        return "".join(letters[byte] for byte in token)

    pairs = [merged_pair(token, ranks) for token in sorted(ranks, key=ranks.get) if len(token) > 1]
    merges = [(spell(first), spell(second)) for first, second in pairs]
    made = Tokenizer(models.BPE({spell(token): rank for token, rank in ranks.items()}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(merges))  # GPT-2's words
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(EOT, special=True)])
    return made.to_str().encode()


def byte_letters():
    """GPT-2's letter for each byte: itself where it can be seen, else one from 256 on."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return [chr(byte if byte in seen else 256 + hidden.index(byte)) for byte in range(256)]


def merged_pair(token, ranks):
    """The two tokens that become this one: what is left when all earlier pairs in it are merged."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [parts[i] + parts[i + 1] for i in range(len(parts) - 1)]
        i = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], len(ranks)))
        parts[i : i + 2] = [pairs[i]]
    return parts


# --- the card ---------------------------------------------------------------------------------------------------------


def model_card(checkpoint, run, name, own):
    results = read_json(run / "eval_results.json") if (run / "eval_results.json").exists() else {}
    figures = {key: results.get(key) for key in ("eval_loss", "eval_perplexity", "eval_accuracy", "eval_bits_per_byte")}
    figures = {"best eval_loss": checkpoint.best_loss} | {f"{key} at the end": value for key, value in figures.items()}
    rows = [f"| {key} | {value:.4f} |" for key, value in figures.items() if isinstance(value, float)]
    command = read_json(run / "run.json").get("command", "") if (run / "run.json").exists() else ""
    words = [word for word in shlex.split(command) if not word.startswith("--out_dir=")]  # where is nobody's business
    return CARD.format(
        name=name,
        mode=row_name(checkpoint.config),
        parameters=checkpoint.model.num_params(),
        n_layer=checkpoint.config.n_layer,
        n_embd=checkpoint.config.n_embd,
        step=checkpoint.step,
        source=checkpoint.data.get("source", "unknown data"),
        figures="\n".join(rows),
        trust=", trust_remote_code=True" * own,
        command=shlex.join(words) or "unknown",
    )


def main():
    s = configure(sys.argv[1:], ExportConfig, folders="RUN NEW_FOLDER")
    refuse(len(s.folders) != 2, "name the run's folder and the new folder: python -m tools.export out/NAME FOLDER")
    refuse(s.checkpoint not in ("best", "latest"), f"checkpoint '{s.checkpoint}' is not known: choose best or latest")
    export(*s.folders, s.checkpoint)
    print(f"{s.folders[0]} is now also a Hugging Face folder: {s.folders[1]}")


if __name__ == "__main__":
    run_main(main)
