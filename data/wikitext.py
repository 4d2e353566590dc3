"""WikiText, the raw variants: what wikitext103/prepare.py and wikitext2/prepare.py share. An article is a document."""

from pathlib import Path

from data.prepare import PrepareParser, files_matching, open_rows, texts_of_rows, write_dataset
from lib.errors import UserError, user_error_from_os

HUB_NAME = "Salesforce/wikitext"
HUB_SPLITS = {"train": "train", "val": "validation"}
LOCAL_FILES = {
    "train": ("train*.parquet", "wiki.train.*", "train*.txt"),
    "val": ("validation*.parquet", "wiki.valid.*", "valid*.txt"),
}


def read_lines(files):
    for path in files:
        try:
            # newlines as they are: the default would translate \r, and splitlines() would also cut at other characters
            with user_error_from_os(f"read {path}"), open(path, encoding="utf-8", newline="\n") as file:
                yield from file
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text ({error.reason})") from error


def is_title(line):
    """' = Title = '; sections have ' = = Section = = '."""
    return line.startswith(" = ") and line.rstrip().endswith(" =") and not line.startswith(" = = ")


def articles(lines):
    """Joins lines to articles. Nothing is added or lost: the articles in a row are the source text."""
    article = []
    after_blank = True
    for line in lines:
        # a title stands after a blank line, unlike a formula in running text; the parquet files' blank lines are empty
        if after_blank and is_title(line) and any(part.strip() for part in article):
            yield "".join(article)
            article = []
        article.append(line)
        after_blank = not line.strip()
    yield "".join(article)


def prepare(name, docstring, config):
    """The command line of wikitext103/prepare.py or wikitext2/prepare.py; config is the variant's name on the Hub."""
    parser = PrepareParser(name, docstring, tokenizer="gpt2")
    parser.source.add_argument(
        "--from",
        dest="source_dir",
        type=Path,
        metavar="DIR",
        help="local copy instead of a download: train*.parquet and validation*.parquet, "
        "or wiki.train.raw and wiki.valid.raw, or train*.txt and valid*.txt",
    )
    args = parser.parse()
    documents = {}
    for split, hub_split in HUB_SPLITS.items():
        files = files_matching(args.source_dir, LOCAL_FILES[split]) if args.source_dir else []
        if files and files[0].suffix != ".parquet":
            lines = read_lines(files)
        else:
            lines = texts_of_rows(open_rows(HUB_NAME, config, hub_split, files), HUB_NAME, files)
        documents[split] = articles(lines)
    write_dataset(
        args.folder, documents, args.tokenizer, source=f"{config} from {'local files' if args.source_dir else HUB_NAME}"
    )
