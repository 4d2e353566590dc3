"""What all of data/*/prepare.py share: writing a dataset, reading sources, the command line."""

import argparse
import contextlib
import dataclasses
import hashlib
import re
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.dataset import BIN_DTYPES, DATA_DIR, SPLITS, Meta, bin_dtype_name
from data.tokenizer import TOKENIZER_CHOICES, tokenizer_from_option
from lib.errors import UserError, one_line, refuse, user_error_from_os
from lib.files import open_whole, write_json, write_whole

BATCH_CHARS = 1 << 22  # text encoded at a time: enough for all cores, little memory


# --- writing a dataset ------------------------------------------------------------------------------------------------


def remove_files(folder, *patterns):
    with user_error_from_os(f"write to {folder}"):
        for pattern in (*patterns, "*.bin.*.tmp", "*.json.*.tmp"):  # killed runs leave temporary files
            for path in folder.glob(pattern):
                path.unlink(missing_ok=True)


def begin_dataset(folder):
    """Take away what an earlier preparation left, its meta.json first."""
    with user_error_from_os(f"write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    remove_files(folder, "meta.json", "train.bin", "val.bin", "shard_*.bin")


def encode_documents(texts, tokenizer):
    """One array per document, in the bins' dtype, with the end-of-text token."""
    dtype = BIN_DTYPES[bin_dtype_name(tokenizer.vocab_size)]
    return [np.append(ids, tokenizer.eot_id).astype(dtype) for ids in tokenizer.encode_batch(texts)]


def write_dataset(folder, documents, tokenizer, source):
    """documents: {"train": texts, "val": texts}, where texts may be a generator; empty texts are left out."""
    begin_dataset(folder)
    sha256 = hashlib.sha256()
    counts = {}
    for split in SPLITS:
        tokens = n_bytes = n_documents = 0
        with (
            user_error_from_os(f"write {folder / split}.bin"),
            open_whole(folder / f"{split}.bin") as file,
            tqdm(desc=split, unit="B", unit_scale=True, disable=None) as progress,
        ):
            for texts in batches_of_text(documents[split]):
                for text, ids in zip(texts, encode_documents(texts, tokenizer), strict=True):
                    file.write(ids.tobytes())
                    utf8 = text.encode()
                    sha256.update(utf8)
                    tokens += len(ids)
                    n_bytes += len(utf8)
                    n_documents += 1
                    progress.update(len(utf8))
            refuse(not n_documents, f"there is no text for the {split} split")
        counts |= {f"{split}_tokens": tokens, f"{split}_bytes": n_bytes, f"{split}_documents": n_documents}
    finish_dataset(folder, tokenizer, counts, source, sha256.hexdigest())


def batches_of_text(texts):
    batch, chars = [], 0
    for text in texts:
        if text:
            batch.append(text)
            chars += len(text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def finish_dataset(folder, tokenizer, counts, source, source_sha256):
    """The bins are there: add the tokenizer's files and meta.json, which makes it a dataset."""
    meta = Meta(
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        eot_id=tokenizer.eot_id,
        dtype=bin_dtype_name(tokenizer.vocab_size),
        source=source,
        source_sha256=source_sha256,
        **counts,
    )
    with user_error_from_os(f"write to {folder}"):
        for name, content in tokenizer.files.items():
            write_whole(folder / name, content)
        write_json(folder / "meta.json", dataclasses.asdict(meta))
    for split in SPLITS:
        print(
            f"{folder / split}.bin: {counts[f'{split}_tokens']:,} tokens, {counts[f'{split}_documents']:,} documents, "
            f"{counts[f'{split}_bytes']:,} bytes of text"
        )


# --- the prepare scripts' command line --------------------------------------------------------------------------------


class PrepareParser(argparse.ArgumentParser):
    """
    --tokenizer, --out and --data-dir, which every prepare script has; what it reads goes into the group `source`.
    --help also shows the script's docstring, examples and all. Mistakes are UserErrors.
    """

    def __init__(self, name, docstring, tokenizer):
        super().__init__(
            usage=f"python data/{name}/prepare.py [OPTION …]",
            description=docstring.strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        self.dataset_name = name
        self.source = self.add_argument_group("what to read")
        dataset = self.add_argument_group("what to make")
        dataset.add_argument(
            "--tokenizer",
            dest="tokenizer_option",
            default=tokenizer,
            metavar="NAME",
            help=f"{TOKENIZER_CHOICES}; default {tokenizer}",
        )
        dataset.add_argument("--out", default=name, metavar="NAME", help=f"name of the dataset; default {name}")
        dataset.add_argument(
            "--data-dir", default=DATA_DIR, type=Path, metavar="DIR", help="folder of the datasets; default data"
        )
        dataset.add_argument("-h", "--help", action="help", help="show this")

    def error(self, message):
        raise UserError(f"{message}; --help shows the options")

    def parse(self):
        """The arguments, with `tokenizer` loaded and `folder` for the dataset's folder."""
        args = self.parse_args()
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", args.out):
            self.error(f"--out is a name of letters, digits, '_', '.' and '-', not {args.out!r}")
        if args.out != self.dataset_name and (DATA_DIR / args.out / "prepare.py").exists():
            self.error(f"--out {args.out} is the dataset of data/{args.out}/prepare.py: choose another name")
        args.folder = args.data_dir / args.out
        args.tokenizer = tokenizer_from_option(args.tokenizer_option)
        return args


# --- reading sources --------------------------------------------------------------------------------------------------


def read_text(path):
    """A whole file, as it is: newlines are not translated."""
    with user_error_from_os(f"read {path}"):
        content = Path(path).read_bytes()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start:,}): convert it first") from error


def files_matching(folder, patterns):
    """The files in folder for the first pattern that has any, sorted by name."""
    for pattern in patterns:
        with user_error_from_os(f"read {folder}"):
            files = sorted(path for path in folder.glob(pattern) if path.is_file())
        if files:
            return files
    raise UserError(f"there is no {' or '.join(patterns)} in {folder}")


def open_rows(hub_name, config, split, parquet_files):
    """Rows of a Hugging Face dataset, or of local parquet files where there are any, read as they are needed."""
    import datasets  # slow to import

    with user_error_from_source(hub_name, parquet_files):
        if parquet_files:
            datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # of a broken file our own error says it all
            return datasets.load_dataset(
                "parquet", data_files=[str(path) for path in parquet_files], split="train", streaming=True
            )
        return datasets.load_dataset(hub_name, config, split=split, streaming=True)


def texts_of_rows(rows, hub_name, files):
    with user_error_from_source(hub_name, files):
        for row in rows:
            if not isinstance(row.get("text"), str):
                raise UserError(f"a row of {files[0].parent if files else hub_name} has no text in a column 'text'")
            yield row["text"]


@contextlib.contextmanager
def user_error_from_source(hub_name, files):
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # network, file format and dataset errors share no class
        if files:
            raise UserError(f"cannot read the files in {files[0].parent} ({one_line(error)})") from error
        raise UserError(
            f"cannot download {hub_name} ({one_line(error)}): connect, or give local files with --from DIR"
        ) from error
