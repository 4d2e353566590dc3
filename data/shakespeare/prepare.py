"""
Tiny Shakespeare, one megabyte of plays: the last tenth is the validation text.

    python data/shakespeare/prepare.py
    python data/shakespeare/prepare.py --from input.txt --tokenizer gpt2
"""

import hashlib
import http.client
import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.prepare import PrepareParser, read_text, write_dataset
from lib.errors import UserError, one_line, run_main

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def download():
    try:
        with urllib.request.urlopen(URL, timeout=60) as response:
            content = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"cannot download {URL} ({one_line(error)}): connect, or use --from FILE") from error
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise UserError(f"{URL} is incomplete or has changed: try again, or use --from FILE")
    return content.decode()


def main():
    parser = PrepareParser("shakespeare", __doc__, tokenizer="bytes")
    parser.source.add_argument(
        "--from", dest="file", type=Path, metavar="FILE", help="a local copy instead of a download"
    )
    args = parser.parse()
    text = read_text(args.file) if args.file else download()
    source = args.file.name if args.file else URL
    cut = len(text) * 9 // 10
    write_dataset(args.folder, {"train": [text[:cut]], "val": [text[cut:]]}, args.tokenizer, source)


if __name__ == "__main__":
    run_main(main)
