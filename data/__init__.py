"""Datasets: NAME/prepare.py makes NAME/train.bin, NAME/val.bin and NAME/meta.json; common.py is what they share."""
