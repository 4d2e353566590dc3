"""
The README's pictures of the page, assets/page_light.png and page_dark.png, of the runs below some folders:

    small="--n_layer=4 --n_embd=64 --n_head=4 --block_size=64 --batch_tokens=2048 --max_steps=500 --learning_rate=4e-3"
    for mode in baseline method3_2 method4_2 denseformer hc; do
        python train.py config/$mode.py $small --eval_every=25 --sample_tokens=0
    done
    python train.py config/mudd.py $small --eval_every=25 &
    sleep 60; python tests/screenshots.py out

It needs a Chromium, as tests/test_page.py does.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from test_page import CHROMIUM, FLAGS, ROOT

with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
    subprocess.run([sys.executable, "-m", "tools.page", *sys.argv[1:], f"--out_dir={folder}/page"], check=True)
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
    for scheme in ("light", "dark"):
        page = browser.new_page(viewport={"width": 1280, "height": 1000}, color_scheme=scheme)
        page.goto(Path(folder, "page/index.html").as_uri())
        page.wait_for_selector("#val .main-svg")
        page.screenshot(path=ROOT / f"assets/page_{scheme}.png", full_page=True)
    browser.close()
