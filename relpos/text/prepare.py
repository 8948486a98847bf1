"""Tokenize a corpus in a process of its own, while another one reads it: python -m relpos.text.prepare STORE."""

import json
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer

from relpos.system.executors import end_with_parent
from relpos.system.files import read_json, write_text
from relpos.text.corpus import open_corpus
from relpos.text.store import TokenStore

SOURCE = "source.json"  # in the folder of a store: the corpus, its tokenizer and the separator
LOG = ".writer.log"


def start_writer(store: TokenStore) -> "subprocess.Popen[bytes] | None":
    """Write the missing chunks of a store in another process, which ends with this one; None if nothing is missing.

    Whoever reads the store waits for it, and writes the chunks itself should it end early.
    """
    store.look()
    if store.complete:
        return None
    store.folder.mkdir(parents=True, exist_ok=True)
    source = {"corpus": store.corpus.opening, "separator": store.separator, "tokenizer": store.tokenizer.to_str()}
    write_text(store.folder / SOURCE, json.dumps(source))
    command = [sys.executable, "-m", "relpos.text.prepare", str(store.folder)]
    with (store.folder / LOG).open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)


def main() -> int:
    """Write the store of the command line."""
    end_with_parent()
    folder = Path(sys.argv[1])
    source = read_json(folder / SOURCE)
    store = TokenStore(
        folder, open_corpus(**source["corpus"]), Tokenizer.from_str(source["tokenizer"]), source["separator"]
    )
    store.write_all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
