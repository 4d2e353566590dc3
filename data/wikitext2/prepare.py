"""WikiText-2, raw. See data/wikitext.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.wikitext import prepare
from lib.errors import run_main

if __name__ == "__main__":
    run_main(lambda: prepare("wikitext2", "wikitext-2-raw-v1"))
