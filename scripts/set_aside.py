"""Sets SST-2 training rows aside by whole sentence: public text, rows for tuning, the rest.

    python -m scripts.set_aside DATA/sst2/train.jsonl --output_dir out/split

SST-2's training rows are phrases: "a fine film" beside the sentence that holds it. A row that lies in
sentences of one part alone goes with these; one of several parts is a training row. Writes public.jsonl
(`{"sentence": ...}`, no labels), tune.jsonl and train.jsonl; always the same.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

Words = tuple[str, ...]


def phrases_of(words: Words) -> Iterator[Words]:
    """Yields every run of words, the whole among them."""
    ends = range(1, len(words) + 1)
    yield from (words[i:j] for j in ends for i in range(j))


def parts_of(texts: Sequence[str], sizes: dict[str, int]) -> list[str]:
    """Names each text's part, which has at least so many texts; "train" is the rest."""
    split = [tuple(text.split()) for text in texts]
    known, within = set(split), defaultdict[Words, set[Words]](set)
    for words in known:
        for phrase in phrases_of(words):
            if phrase in known:
                within[phrase].add(words)
    # Sentences are what lies in nothing else.
    sentences = sorted((w for w in known if within[w] == {w}), key=lambda w: (len(w), w))
    whole = {w: within[w] & set(sentences) for w in known}
    alone = Counter(next(iter(whole[w])) for w in split if len(whole[w]) == 1)
    random.Random(0).shuffle(sentences)
    part, left = dict[Words, str](), iter(sentences)
    for name, size in sizes.items():
        count = 0
        while count < size and (sentence := next(left, None)) is not None:
            part[sentence] = name
            count += alone[sentence]
    names = ({part.get(s, "train") for s in whole[w]} for w in split)
    return [of.pop() if len(of) == 1 else "train" for of in names]


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the three files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, help='lines of {"sentence": ..., "label": ...}')
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--public", type=int, default=2000, help="rows of public text")
    parser.add_argument("--tune", type=int, default=5000, help="rows for tuning")
    given = parser.parse_args(arguments)
    rows = [json.loads(line) for line in given.rows.read_text(encoding="utf-8").splitlines()]
    sizes = {"public": given.public, "tune": given.tune}
    parts = parts_of([row["sentence"] for row in rows], sizes)
    given.output_dir.mkdir(parents=True, exist_ok=True)
    for name in (*sizes, "train"):
        chosen = [row for row, part in zip(rows, parts, strict=True) if part == name]
        chosen = chosen[: sizes.get(name)]
        random.Random(0).shuffle(chosen)
        if name == "public":
            chosen = [{"sentence": row["sentence"]} for row in chosen]
        lines = "".join(json.dumps(row) + "\n" for row in chosen)
        (given.output_dir / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        print(f"{name}: {len(chosen)} rows")


if __name__ == "__main__":
    main()
