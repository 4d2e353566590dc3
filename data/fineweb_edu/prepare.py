"""
FineWeb-Edu, the sample of 10 billion tokens: web pages, read from the Hugging Face Hub or with --from DIR.

    python data/fineweb_edu/prepare.py --max-tokens 1000000000
    python data/fineweb_edu/prepare.py --from parquet-folder --workers 8

The pages become shards of tokens. A finished shard is written whole and then noted in progress.json, together with the
place in the source that follows it: a run that was stopped continues there. At the end the shards become the bins.
The first documents are the validation set. source_sha256 in meta.json starts empty, and each document in turn makes it
sha256(what it was + sha256(text)), all in hexadecimal.
"""

import argparse
import collections
import dataclasses
import hashlib
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.dataset import BIN_DTYPES, SPLITS, bin_dtype_name, from_json, load_meta
from data.prepare import (
    PrepareParser,
    begin_dataset,
    encode_documents,
    files_matching,
    finish_dataset,
    open_rows,
    read_text,
    remove_files,
    texts_of_rows,
    user_error_from_source,
)
from data.tokenizer import tokenizer_from_option
from lib.errors import UserError, refuse, run_main, user_error_from_os
from lib.files import open_whole, read_json, write_json

HUB_NAME = "HuggingFaceFW/fineweb-edu"
HUB_CONFIG = "sample-10BT"
BATCH_DOCUMENTS = 64  # what a worker gets at a time


# --- reading and encoding ---------------------------------------------------------------------------------------------


def rows_of_text_files(files):
    for path in files:
        yield {"text": read_text(path)}


def open_source(files):
    if files and files[0].suffix != ".parquet":
        import datasets

        return datasets.IterableDataset.from_generator(rows_of_text_files, gen_kwargs={"files": files})
    return open_rows(HUB_NAME, HUB_CONFIG, "train", files)


def read_batches(dataset, files, n_read, val_documents):
    """(split, texts, place in the source after them); no batch has documents of both splits."""
    texts = []
    for text in texts_of_rows(dataset, HUB_NAME, files):
        if not text:
            continue
        split = "val" if n_read < val_documents else "train"
        texts.append(text)
        n_read += 1
        if len(texts) == BATCH_DOCUMENTS or n_read == val_documents:
            yield split, texts, dataset.state_dict()
            texts = []
    if texts:
        yield split, texts, dataset.state_dict()


def start_worker(tokenizer_option):
    global worker_tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to handle
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per process: no threads in each
    worker_tokenizer = tokenizer_from_option(tokenizer_option)
    worker_tokenizer.threads = 1


def encode(texts):
    """(ids, bytes of text, sha256 of text) of each document."""
    contents = [text.encode() for text in texts]
    return [
        (ids, len(content), hashlib.sha256(content).hexdigest())
        for ids, content in zip(encode_documents(texts, worker_tokenizer), contents, strict=True)
    ]


def encode_batches(batches, pool, n_ahead):
    """read_batches with encoded documents instead of texts, in the same order."""
    waiting = collections.deque()  # Pool.imap has no limit: it would read the whole source into memory
    for split, texts, position in batches:
        waiting.append((split, pool.apply_async(encode, (texts,)), position))
        if len(waiting) > n_ahead:
            split, result, position = waiting.popleft()
            yield split, result.get(), position
    for split, result, position in waiting:
        yield split, result.get(), position


# --- shards and progress.json -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Shard:
    split: str
    tokens: int = 0
    bytes: int = 0
    documents: int = 0


@dataclasses.dataclass
class Progress:
    """progress.json."""

    options: dict
    shards: list = dataclasses.field(default_factory=list)  # what is in shard_00000.bin, shard_00001.bin, …
    position: dict = None  # in the source, after the last shard
    sha256: str = ""
    finished: bool = False  # the source has been read to its end, or to --max-tokens

    def total(self, count, split):
        return sum(getattr(shard, count) for shard in self.shards if shard.split == split)


def shard_path(folder, index):
    return folder / f"shard_{index:05}.bin"


def load_progress(folder, options):
    path = folder / "progress.json"
    if not path.exists():
        begin_dataset(folder)
        return Progress(options)
    try:
        progress = from_json(Progress, read_json(path), path)
        progress.shards = [from_json(Shard, shard, path) for shard in progress.shards]
        unknown = {shard.split for shard in progress.shards}.difference(SPLITS)
        refuse(unknown, f"{path} is damaged: it names the splits {unknown}")
    except UserError as error:
        raise UserError(f"{error}: delete {folder} and run again") from error
    other = progress.options != options
    refuse(other, f"{folder} was begun with other options: use those, or delete it, or choose another --out")
    return progress


def check_shards(folder, progress, itemsize):
    for index, shard in enumerate(progress.shards):
        path = shard_path(folder, index)
        whole = path.is_file() and path.stat().st_size == shard.tokens * itemsize
        refuse(not whole, f"{path} is damaged: delete {folder} and run again")


def save_shard(folder, progress, shard, arrays):
    with user_error_from_os(f"write to {folder}"):
        if shard:
            with open_whole(shard_path(folder, len(progress.shards))) as file:
                for ids in arrays:
                    file.write(ids.tobytes())
            progress.shards.append(shard)
        write_json(folder / "progress.json", dataclasses.asdict(progress))


def add_shards(folder, progress, encoded_batches, args):
    """Save a shard whenever one is full, until the batches end or train has max_tokens."""
    shard, arrays = None, []
    tokens = progress.total("tokens", "train")
    n_documents = sum(progress.total("documents", split) for split in SPLITS)
    with tqdm(unit="token", unit_scale=True, initial=tokens, total=args.max_tokens, disable=None) as bar:
        for split, documents, progress.position in encoded_batches:
            shard = shard or Shard(split)
            for ids, n_bytes, text_sha256 in documents:
                arrays.append(ids)
                shard.tokens += len(ids)
                shard.bytes += n_bytes
                shard.documents += 1
                n_documents += 1
                progress.sha256 = hashlib.sha256((progress.sha256 + text_sha256).encode()).hexdigest()
                if split == "train":
                    tokens += len(ids)
                    bar.update(len(ids))
                    if args.max_tokens and tokens >= args.max_tokens:
                        break
            if args.max_tokens and tokens >= args.max_tokens:
                break
            if shard.tokens >= args.shard_tokens or n_documents == args.val_documents:
                save_shard(folder, progress, shard, arrays)
                shard, arrays = None, []
    if not tokens:
        (folder / "progress.json").unlink(missing_ok=True)  # the next run will have another --val-documents
        raise UserError(f"all {n_documents} documents of the source went to val: choose a smaller --val-documents")
    progress.finished = True
    save_shard(folder, progress, shard, arrays)


def read_source(folder, progress, files, args):
    # Workers start before anything opens threads, and afresh: a fork of a process with threads may hang.
    with multiprocessing.get_context("spawn").Pool(args.workers, start_worker, (args.tokenizer_option,)) as pool:
        dataset = open_source(files)
        n_read = sum(progress.total("documents", split) for split in SPLITS)
        if n_read:
            print(f"continuing after {n_read:,} documents")
            with user_error_from_source(HUB_NAME, files):
                dataset.load_state_dict(progress.position)
        batches = read_batches(dataset, files, n_read, args.val_documents)
        add_shards(folder, progress, encode_batches(batches, pool, 2 * args.workers), args)


def join_shards(folder, progress, tokenizer):
    counts = {}
    for split in SPLITS:
        with user_error_from_os(f"write {folder / split}.bin"), open_whole(folder / f"{split}.bin") as file:
            for index, shard in enumerate(progress.shards):
                if shard.split == split:
                    with open(shard_path(folder, index), "rb") as source:
                        shutil.copyfileobj(source, file, 1 << 24)
        counts |= {f"{split}_{count}": progress.total(count, split) for count in ("tokens", "bytes", "documents")}
    finish_dataset(folder, tokenizer, counts, progress.options["source"], progress.sha256)


def is_prepared(folder):
    try:
        load_meta(folder)
    except UserError:
        return False
    return True


# --- command line -----------------------------------------------------------------------------------------------------


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def main():
    parser = PrepareParser("fineweb_edu", __doc__, tokenizer="gpt2")
    parser.source.add_argument(
        "--from",
        dest="source_dir",
        type=Path,
        metavar="DIR",
        help="local files instead of a download: *.parquet, or *.txt with a document each",
    )
    for option, default, words in (
        ("--max-tokens", None, "end train with the document that reaches N tokens; default: all there is"),
        ("--val-documents", 5000, "so many of the first documents for validation; default 5000"),
        ("--shard-tokens", 10**8, "what is kept when it is stopped, in pieces of N tokens; default 100000000"),
        ("--workers", os.cpu_count(), "processes that encode; default: one per core"),
    ):
        parser.source.add_argument(option, type=positive, default=default, metavar="N", help=words)
    args = parser.parse()

    files = files_matching(args.source_dir, ("*.parquet", "*.txt")) if args.source_dir else []
    options = {  # a run with other ones cannot continue this one's shards
        "source": f"{len(files)} local files" if files else f"{HUB_NAME} {HUB_CONFIG}",
        "files": hashlib.sha256("\n".join(map(str, files)).encode()).hexdigest(),
        "tokenizer": args.tokenizer.name,
        "tokenizer_files": hashlib.sha256(b"".join(args.tokenizer.files.values())).hexdigest(),
        "max_tokens": args.max_tokens,
        "val_documents": args.val_documents,
    }
    progress = load_progress(args.folder, options)
    if progress.finished and is_prepared(args.folder):
        print(f"{args.folder} is finished; delete it to prepare it again")
    else:
        check_shards(args.folder, progress, BIN_DTYPES[bin_dtype_name(args.tokenizer.vocab_size)].itemsize)
        if not progress.finished:
            read_source(args.folder, progress, files, args)
        join_shards(args.folder, progress, args.tokenizer)
    remove_files(args.folder, "shard_*.bin")


if __name__ == "__main__":
    run_main(main)
