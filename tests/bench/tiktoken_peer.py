"""The other side of `tandem-bench tokenizer`: times tiktoken on the same files with the same vocabulary.
tiktoken_peer.py TOKENIZER_JSON FILE... prints a line "seconds tokens" a file: the best of three, one thread; 0 tokens
for a text that it gives up on (its regex may run out of stack). Exit status 3: tiktoken is not installed."""
import json
import os
import pathlib
import sys
import time

try:
    import tiktoken
except ImportError:
    sys.exit(3)


def byte_of_letter() -> dict:
    """tokenizer.json writes each byte as a letter: printable ones as themselves, the rest from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def load(path: str) -> tiktoken.Encoding:
    text = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    letters = byte_of_letter()
    ranks = {bytes(letters[c] for c in token): rank for token, rank in text["model"]["vocab"].items()}
    pattern = next(p["pattern"]["Regex"] for p in text["pre_tokenizer"]["pretokenizers"] if p["type"] == "Split")
    return tiktoken.Encoding("bench", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


encoding = load(sys.argv[1])
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic of its tells a long story
for name in sys.argv[2:]:
    document = pathlib.Path(name).read_bytes().decode("utf-8")
    best, n = float("inf"), 0
    for _ in range(3):
        begin = time.process_time()
        try:
            n = len(encoding.encode_ordinary(document))
        except BaseException:  # a panic is none of Exception's
            n = 0
            break
        best = min(best, time.process_time() - begin)
    print(best, n, flush=True)
