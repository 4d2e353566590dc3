"""Tokenizers: bytes, GPT-2's, or any Hugging Face tokenizer.json."""

import codecs
import contextlib
import json
import os
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tiktoken
from tokenizers import Tokenizer

from lib.errors import UserError, one_line, refuse, user_error_from_os
from lib.files import read_limited

MAX_TOKENIZER_BYTES = 1 << 26  # 64 MB; the largest in use have about half of that
MAX_VOCAB = 1 << 24  # far above any real vocabulary, far below a size that exhausts memory
TOKENIZER_CHOICES = "bytes, gpt2 or hf:FOLDER (a folder with a tokenizer.json)"

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
                    self.files[name] = read_limited(self.folder / name, MAX_TOKENIZER_BYTES)
        refuse("tokenizer.json" not in self.files, f"there is no tokenizer.json in {folder}")
        with self.user_error_from_rust():
            self.tokenizer = Tokenizer.from_buffer(self.files["tokenizer.json"])
        self.tokenizer.encode_special_tokens = True  # "</s>" in a text is four characters, not a control token
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        vocab = self.tokenizer.get_vocab(with_added_tokens=True)
        self.eot_token = self._find_eot_token(vocab)
        self.eot_id = vocab[self.eot_token]
        self.vocab_size = max(vocab.values()) + 1  # not the number of entries: ids may have holes
        refuse(self.vocab_size > MAX_VOCAB, f"{self.folder / 'tokenizer.json'} has ids of {MAX_VOCAB:,} and more")

    @contextlib.contextmanager
    def user_error_from_rust(self):
        """The package raises many kinds; a panic of its Rust code is no Exception and prints a page to stderr first."""
        stderr = os.dup(2)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            path = self.folder / "tokenizer.json"
            raise UserError(f"cannot use {path} ({one_line(error)}): fix it, or choose another tokenizer") from error
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            os.close(null)

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
        with self.user_error_from_rust():
            return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts):
        with self.user_error_from_rust():
            batch = [e.ids for e in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
            decoded_batch = self.tokenizer.decode_batch(batch, skip_special_tokens=False)
        for text, ids, decoded in zip(texts, batch, decoded_batch, strict=True):
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
        ids = np.asarray(ids, int).tolist()
        with self.user_error_from_rust():
            return self.tokenizer.decode(ids, skip_special_tokens=False)

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
