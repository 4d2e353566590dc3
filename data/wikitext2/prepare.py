"""
WikiText-2, raw: Wikipedia articles, from the Hugging Face Hub or a local copy. See data/wikitext.py.

    python data/wikitext2/prepare.py
    python data/wikitext2/prepare.py --from wikitext-2-raw --tokenizer hf:llama
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.wikitext import prepare
from lib.errors import run_main

if __name__ == "__main__":
    run_main(lambda: prepare("wikitext2", __doc__, "wikitext-2-raw-v1"))
