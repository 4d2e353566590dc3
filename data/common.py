"""What all of data/*/prepare.py, train.py and sample.py share: tokenizers, files written whole, the dataset format.

A dataset is a folder with train.bin and val.bin (token ids, nothing else) and meta.json, which describes them.
meta.json is removed first and written last, and it holds the bins' lengths: a folder whose preparation was killed
is never taken for a dataset.
"""

import argparse
import codecs
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tiktoken
from tokenizers import Tokenizer
from tqdm import tqdm

from configurator import UserError

DATA_DIR = Path(__file__).resolve().parent
SPLITS = ("train", "val")
BIN_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}  # little-endian on every machine
BATCH_CHARS = 1 << 22  # text encoded at a time: enough for all cores, little memory
MAX_META_BYTES = 1 << 16
MAX_VOCAB = 1 << 24  # far above any real vocabulary, far below a size that exhausts memory
TOKENIZER_CHOICES = "bytes, gpt2 or hf:FOLDER (a folder with a tokenizer.json)"


def one_line(error):
    """Another library's exception as part of an error line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# --- Tokenizers -------------------------------------------------------------------------------------------------------
#
# A tokenizer has: name, vocab_size, eot_id, files (what load_tokenizer needs to find in the dataset's folder), and
#   encode(text) -> ids          special tokens in the text are plain text, never control tokens
#   encode_batch(texts) -> ids for each, on all cores
#   decode_bytes(ids) -> bytes   of UTF-8; of an unfinished character, the bytes so far (hf: U+FFFD)
#   stream_decoder(prompt_ids)   feed(id) -> the text that this id completes, finish() -> what is left


class TiktokenTokenizer:
    threads = os.cpu_count()  # for encode_batch

    def __init__(self, name, encoding):
        self.name = name
        self.encoding = encoding
        self.vocab_size = encoding.n_vocab
        self.eot_id = encoding.eot_token
        self.files = {}

    def encode(self, text):
        return self.encoding.encode_ordinary(text)

    def encode_batch(self, texts):
        with ThreadPoolExecutor(self.threads) as pool:  # tiktoken lets go of the interpreter lock
            return list(pool.map(lambda text: self.encoding.encode_to_numpy(text, disallowed_special=()), texts))

    def decode_bytes(self, ids):
        return self.encoding.decode_bytes(np.asarray(ids, int).tolist())

    def stream_decoder(self, prompt_ids=()):
        return ByteStreamDecoder(self)


class ByteStreamDecoder:
    """Ids stand for bytes: hold back an unfinished character until its last byte comes."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id):
        return self.utf8.decode(self.tokenizer.decode_bytes([token_id]))

    def finish(self):
        return self.utf8.decode(b"", final=True)


class HFTokenizer:
    """A Hugging Face tokenizer.json."""

    name = "hf"
    EOT_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")  # tried where no tokenizer_config.json says it

    def __init__(self, folder):
        self.folder = Path(folder)
        self.files = {}
        with user_error_from_os(f"read the tokenizer in {folder}"):
            for name in ("tokenizer.json", "tokenizer_config.json"):
                if (self.folder / name).is_file():
                    self.files[name] = (self.folder / name).read_bytes()
        if "tokenizer.json" not in self.files:
            raise UserError(f"there is no tokenizer.json in {folder}")
        try:
            self.tokenizer = Tokenizer.from_buffer(self.files["tokenizer.json"])
        except Exception as error:  # the package raises many kinds
            raise UserError(f"cannot read {self.folder / 'tokenizer.json'} ({one_line(error)})") from error
        self.tokenizer.encode_special_tokens = True  # "</s>" in a text is four characters, not a control token
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        vocab = self.tokenizer.get_vocab(with_added_tokens=True)
        self.eot_token = self._find_eot_token(vocab)
        self.eot_id = vocab[self.eot_token]
        self.vocab_size = max(vocab.values()) + 1  # not the number of entries: ids may have holes

    def _find_eot_token(self, vocab):
        try:
            eos = json.loads(self.files.get("tokenizer_config.json", b"{}")).get("eos_token")
            if isinstance(eos, dict):
                eos = eos["content"]
        except (ValueError, AttributeError, KeyError, RecursionError) as error:
            raise UserError(f"cannot read {self.folder / 'tokenizer_config.json'} ({one_line(error)})") from error
        names = self.EOT_NAMES if eos is None else (str(eos),)
        for name in names:
            if name in vocab:
                return name
        raise UserError(
            f"the tokenizer in {self.folder} has no end-of-text token ({', '.join(names)}): "
            "name it as eos_token in a tokenizer_config.json there"
        )

    def encode(self, text):
        # no special tokens: a template would put a beginning-of-text token before every piece of text
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts):
        batch = [e.ids for e in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        for text, ids, decoded in zip(
            texts, batch, self.tokenizer.decode_batch(batch, skip_special_tokens=False), strict=True
        ):
            # tokenizers with Unicode normalisation change characters but lose nothing; others would train on <unk>
            if decoded != text and unicodedata.normalize("NFC", decoded) != unicodedata.normalize("NFC", text):
                pairs = zip(text + "\0", decoded + "\0", strict=False)  # one may be a beginning of the other
                at = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
                raise UserError(
                    f"the tokenizer in {self.folder} does not give back the text that it is given: "
                    f"{text[at : at + 20]!r} comes back as {decoded[at : at + 20]!r}; choose a byte-level tokenizer"
                )
            if self.eot_id in ids:
                raise UserError(f"the tokenizer in {self.folder} takes a text for its {self.eot_token}: choose another")
        return batch

    def decode_bytes(self, ids):
        return self._decode(ids).encode()

    def _decode(self, ids):
        return self.tokenizer.decode(np.asarray(ids, int).tolist(), skip_special_tokens=False)

    def stream_decoder(self, prompt_ids=()):
        return HFStreamDecoder(self, prompt_ids)


class HFStreamDecoder:
    """What an id adds depends on those before it (spaces, characters of several ids): decode a short window twice."""

    def __init__(self, tokenizer, prompt_ids):
        self.tokenizer = tokenizer
        self.ids = []  # of this document; the first `sent` are shown, and those from `start` on are context
        for token_id in prompt_ids:
            self.feed(token_id)

    def feed(self, token_id):
        if token_id == self.tokenizer.eot_id:  # a new document begins without context
            return self.finish() + self.tokenizer.eot_token
        if not self.ids:
            self.start = self.sent = 0
        self.ids.append(token_id)
        text = self._unsent()
        if text.endswith("\N{REPLACEMENT CHARACTER}"):  # the first bytes of a character
            return ""
        self.start, self.sent = self.sent, len(self.ids)
        return text

    def finish(self):
        text = self._unsent() if self.ids else ""
        self.ids = []
        return text

    def _unsent(self):
        shown = self.tokenizer._decode(self.ids[self.start : self.sent])
        return self.tokenizer._decode(self.ids[self.start :])[len(shown) :]


def load_tokenizer(name, folder):
    """The tokenizer of meta.json's name; hf's files are read from that meta.json's own folder and nowhere else."""
    if name == "bytes":
        return TiktokenTokenizer(
            name,
            tiktoken.Encoding(
                name,
                pat_str="(?s:.+)",  # no merges, so there is nothing to split for
                mergeable_ranks={bytes([i]): i for i in range(256)},
                special_tokens={"<|endoftext|>": 256},
            ),
        )
    if name == "gpt2":
        try:
            return TiktokenTokenizer(name, tiktoken.get_encoding("gpt2"))
        except Exception as error:  # requests, the file system or a wrong checksum
            raise UserError(
                f"cannot get tiktoken's GPT-2 vocabulary ({type(error).__name__}): connect once, or let "
                "TIKTOKEN_CACHE_DIR name a folder that holds it, or prepare the data with --tokenizer bytes"
            ) from error
    if name == "hf":
        return HFTokenizer(folder)
    raise UserError(f"unknown tokenizer {name!r}: choose {TOKENIZER_CHOICES}")


def tokenizer_from_option(option):
    """The tokenizer that a prepare script's --tokenizer names."""
    if option.startswith("hf:"):
        return HFTokenizer(option.removeprefix("hf:"))
    if option == "hf":  # of a dataset's own folder, which only meta.json can mean
        raise UserError("--tokenizer hf needs a folder: hf:FOLDER")
    return load_tokenizer(option, None)


# --- Files written whole or not at all --------------------------------------------------------------------------------


@contextlib.contextmanager
def user_error_from_os(action):
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot {action} ({error.strerror or error})") from error


@contextlib.contextmanager
def open_atomically(path):
    """A binary file that appears under its name, complete and on disk, when the block ends, and never before."""
    path = Path(path)
    temp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temp, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the new name is safe only once the folder is; Windows cannot open folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_file_atomically(path, content):
    with open_atomically(path) as file:
        file.write(content)


# --- The dataset format -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Meta:
    """meta.json, field by field."""

    tokenizer: str  # bytes, gpt2, or hf: the tokenizer.json in the same folder
    vocab_size: int  # every id is below it
    eot_id: int  # ends every document
    dtype: str  # of the bins: uint16 or uint32
    train_tokens: int  # end-of-text tokens included
    val_tokens: int
    train_bytes: int  # of the documents' text in UTF-8; end-of-text tokens count nothing
    val_bytes: int
    train_documents: int
    val_documents: int
    source: str  # for people
    source_sha256: str  # of the text in UTF-8, train then val, with nothing between documents (fineweb_edu: see there)


def bin_dtype_name(vocab_size):
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


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
    """One array a document, in the bins' dtype, with the end-of-text token."""
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
            open_atomically(folder / f"{split}.bin") as file,
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
            if not n_documents:
                raise UserError(f"there is no text for the {split} split")
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
            write_file_atomically(folder / name, content)
        write_file_atomically(folder / "meta.json", json.dumps(dataclasses.asdict(meta), indent=2).encode() + b"\n")
    for split in SPLITS:
        print(
            f"{folder / split}.bin: {counts[f'{split}_tokens']:,} tokens, {counts[f'{split}_documents']:,} documents, "
            f"{counts[f'{split}_bytes']:,} bytes of text"
        )


def prepare_command(folder):
    """The command that makes the dataset in folder."""
    folder = Path(os.path.abspath(folder))
    has_script = (DATA_DIR / folder.name / "prepare.py").is_file()
    command = f"python data/{folder.name if has_script else 'text'}/prepare.py"
    if not has_script or folder.name == "text":
        command += " PATH..."
    if not has_script:
        command += f" --out {folder.name}"
    if folder.parent != DATA_DIR:
        command += f" --data-dir {folder.parent}"
    return command


def load_meta(folder):
    """The checked meta.json of a dataset whose bins are complete; anything else is a UserError."""
    folder = Path(folder)
    meta_path = folder / "meta.json"

    def broken(reason):
        return UserError(f"{reason}: run {prepare_command(folder)}")

    with user_error_from_os(f"read the dataset in {folder}"):
        if not meta_path.is_file():
            raise broken(f"there is no prepared dataset in {folder}")
        with open(meta_path, "rb") as file:
            content = file.read(MAX_META_BYTES + 1)
        bin_sizes = {path.stem: path.stat().st_size for path in folder.glob("*.bin") if path.is_file()}
    try:
        values = json.loads(content) if len(content) <= MAX_META_BYTES else None
    except (ValueError, RecursionError):
        values = None
    fields = dataclasses.fields(Meta)
    if not isinstance(values, dict) or values.keys() != {field.name for field in fields}:
        raise broken(f"{meta_path} is not a dataset's description")
    for field in fields:
        if type(values[field.name]) is not field.type:
            raise broken(f"{field.name} in {meta_path} is not of type {field.type.__name__}")
        if field.type is int and values[field.name] < 0:
            raise broken(f"{field.name} in {meta_path} is negative")
    meta = Meta(**values)
    if not meta.eot_id < meta.vocab_size <= MAX_VOCAB or meta.dtype != bin_dtype_name(meta.vocab_size):
        raise broken(f"vocab_size, eot_id and dtype in {meta_path} do not fit together")
    for split in SPLITS:
        n_tokens = getattr(meta, f"{split}_tokens")
        if n_tokens == 0 or bin_sizes.get(split) != n_tokens * BIN_DTYPES[meta.dtype].itemsize:
            raise broken(f"{folder / split}.bin is missing or does not have the size that {meta_path} says")
    return meta


def load_tokens(folder, split):
    """A split's token ids, memory-mapped and read-only."""
    return np.memmap(Path(folder) / f"{split}.bin", dtype=BIN_DTYPES[load_meta(folder).dtype], mode="r")


# --- The prepare scripts' command line --------------------------------------------------------------------------------


class PrepareParser(argparse.ArgumentParser):
    """--tokenizer, --out and --data-dir, which every prepare script has; mistakes are UserErrors."""

    def __init__(self, name, description, tokenizer):
        super().__init__(description=description, allow_abbrev=False)
        self.dataset_name = name
        self.add_argument(
            "--tokenizer",
            dest="tokenizer_option",
            default=tokenizer,
            metavar="NAME",
            help=f"{TOKENIZER_CHOICES}; default {tokenizer}",
        )
        self.add_argument("--out", default=name, metavar="NAME", help=f"name of the dataset; default {name}")
        self.add_argument(
            "--data-dir",
            default=DATA_DIR,
            type=Path,
            metavar="DIR",
            help="folder that holds the datasets; default data",
        )

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


# --- Reading sources --------------------------------------------------------------------------------------------------


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


def open_stream(hub_name, config, split, parquet_files):
    """Rows of a Hugging Face dataset, or of local parquet files where there are any, read as they are needed."""
    import datasets  # slow to import

    with user_error_from_source(hub_name, parquet_files):
        if parquet_files:
            datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # of a broken file our own error says it all
            return datasets.load_dataset(
                "parquet", data_files=[str(path) for path in parquet_files], split="train", streaming=True
            )
        return datasets.load_dataset(hub_name, config, split=split, streaming=True)


def stream_texts(dataset, hub_name, files):
    with user_error_from_source(hub_name, files):
        for row in dataset:
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
