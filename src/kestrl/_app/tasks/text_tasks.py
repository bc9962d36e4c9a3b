"""Generated rows of two tasks by which other trainers are tested: reverse-text and alphabet-sort.

They follow the environments of the same names in `verifiers`, whose data sets are on a hub; these are generated, in the
same form. `letters` is reverse-text for a model that is too small for sentences.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from kestrl._app.tasks.splits import SPLITS, distinct
from kestrl._app.tasks.writing import write_rows
from kestrl.errors import UserInputError

TRANSCRIPTS = "transcripts"
REVERSE_PROMPT = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
LETTERS_PROMPT = "Reverse."
LETTERS = "ABCDEFGHKLMNPRSTUVWXYZ"
WORDS = (
    "river stone lamp garden window silver paper train market bridge morning winter apple table quiet yellow small",
    "open under over near between behind old new long bright heavy gentle early late walks turns holds finds keeps",
    "brings opens moves grows the a this every some",
)
FIRST_NAMES = (
    "Ada Ben Carla David Elena Felix Greta Hugo Irene Jonas Karin Liam Mona Nils Olga Paul Rosa Stefan Tara Viktor",
)
LAST_NAMES = (
    "Adler Brandt Costa Dietz Ebner Fischer Gruber Hansen Ito Jansen Keller Lorenz Meyer Novak Okafor Peters Roth",
    "Silva",
)


def _words(lines: tuple[str, ...]) -> list[str]:
    return [word for line in lines for word in line.split()]


def _distinct(split: str, seed: int, size: int, draw: Callable[[random.Random], str]) -> Iterator[str]:
    """Distinct texts of a split; raises as `distinct` does."""
    rng = random.Random(seed)  # noqa: S311 - seeded on purpose
    return distinct(split, size, lambda: draw(rng), items="texts")


def reverse_text(split: str, *, seed: int, size: int) -> list[dict[str, Any]]:
    """Sentences to reverse.

    Raises:
        UserInputError: There is no such split, or there are not as many texts.
    """
    words = _words(WORDS)

    def sentence(rng: random.Random) -> str:
        return " ".join(rng.choice(words) for _ in range(rng.randint(4, 12)))

    return [
        {
            "id": f"reverse-text-{split}-{index}",
            "prompt": [{"role": "system", "content": REVERSE_PROMPT}, {"role": "user", "content": text}],
            "ground_truth": text[::-1],
        }
        for index, text in enumerate(_distinct(split, seed, size, sentence))
    ]


def _spaced(rng: random.Random) -> str:
    return " ".join(rng.sample(LETTERS, 3))


def letters(split: str, *, seed: int, size: int) -> list[dict[str, Any]]:
    """Three letters to reverse.

    Raises:
        UserInputError: There is no such split, or there are not as many texts.
    """
    return [
        {
            "id": f"letters-{split}-{index}",
            "prompt": [{"role": "system", "content": LETTERS_PROMPT}, {"role": "user", "content": text}],
            "ground_truth": text[::-1],
        }
        for index, text in enumerate(_distinct(split, seed, size, _spaced))
    ]


def letters_transcripts(*, seed: int, size: int, mistakes: float) -> list[dict[str, Any]]:
    """Conversations that reverse letters, a share of them with two letters exchanged."""
    rng = random.Random(f"transcripts/{seed}")  # noqa: S311 - seeded on purpose
    rows: list[dict[str, Any]] = []
    for text in _distinct("train", seed, size, _spaced):
        answer = text[::-1].split(" ")
        if rng.random() < mistakes:
            first_place, second_place = rng.sample(range(len(answer)), 2)
            answer[first_place], answer[second_place] = answer[second_place], answer[first_place]
        rows.append(
            {
                "messages": [
                    {"role": "system", "content": LETTERS_PROMPT},
                    {"role": "user", "content": text},
                    {"role": "assistant", "content": " ".join(answer)},
                ]
            }
        )
    return rows


def alphabet_sort(split: str, *, seed: int, size: int) -> list[dict[str, Any]]:
    """Names to sort, in two or three turns: each later turn brings further names, which are to be marked.

    Raises:
        UserInputError: There is no such split, or there are not as many texts.
    """
    first_names, last_names = _words(FIRST_NAMES), _words(LAST_NAMES)

    def names(rng: random.Random) -> str:
        count = rng.randint(4, 9)
        firsts, lasts = rng.sample(first_names, count), rng.sample(last_names, count)
        return ",".join(f"{first}{last}" for first, last in zip(firsts, lasts, strict=True))

    drawn = enumerate(_distinct(split, seed, size, names))
    return [_sorting(f"alphabet-sort-{split}-{index}", text.split(",")) for index, text in drawn]


def _sorting(id_: str, names: list[str]) -> dict[str, Any]:
    turns = 3 if len(names) >= 6 else 2
    cuts = [len(names) * turn // turns for turn in range(turns + 1)]
    parts = [names[start:end] for start, end in pairwise(cuts)]
    questions = [_first_question(parts[0]), *map(_next_question, parts[1:])]
    sorted_names: list[str] = []
    expected: list[str] = []
    for number, part in enumerate(parts):
        new = set(part) if number else set[str]()
        sorted_names = sorted([*sorted_names, *part])
        expected.append("\n".join(f"{name} // new name!" if name in new else name for name in sorted_names))
    return {
        "id": id_,
        "prompt": [{"role": "user", "content": questions[0]}],
        "ground_truth": expected,
        "metadata": {"follow_ups": questions[1:]},
    }


def _first_question(names: list[str]) -> str:
    return (
        f"Sort these names in alphabetical order by FIRST name: {', '.join(names)}\n\nUse exactly this format:\n"
        "<alphabetical_sorted>\nName1\nName2\n</alphabetical_sorted>"
    )


def _next_question(names: list[str]) -> str:
    return (
        f"Now sort ALL of these names alphabetically by FIRST name: {', '.join(names)}\n\nThese are in addition to the "
        "prior list. Mark any NEW names (that weren't in the prior list) with `// new name!` at the end.\n\n"
        "Use exactly this format:\n<combined_alphabetical_sorted>\nName1\nName2 // new name!\n"
        "</combined_alphabetical_sorted>"
    )


def provide_reverse_text(path: str, size: int, seed: int, cache_dir: Path) -> Path:
    """The file of `demo://reverse-text/PATH`: a split, letters/SPLIT, or transcripts/PERCENT, which are of letters with
    that share of mistakes.

    Raises:
        UserInputError: There is no such path.
    """
    kind, _, argument = path.partition("/")
    if kind == TRANSCRIPTS and argument.isdecimal() and int(argument) <= 100:
        rows = letters_transcripts(seed=seed, size=size, mistakes=int(argument) / 100)
    elif kind == "letters" and argument in SPLITS:
        rows = letters(argument, seed=seed, size=size)
    elif path in SPLITS:
        rows = reverse_text(path, seed=seed, size=size)
    else:
        raise UserInputError(f"demo://reverse-text/{path}: give SPLIT, letters/SPLIT or transcripts/PERCENT")
    return _written("reverse-text", path, rows, seed, cache_dir)


def provide_alphabet_sort(path: str, size: int, seed: int, cache_dir: Path) -> Path:
    """The file of `demo://alphabet-sort/SPLIT`.

    Raises:
        UserInputError: There is no such split.
    """
    return _written("alphabet-sort", path, alphabet_sort(path, seed=seed, size=size), seed, cache_dir)


def _written(name: str, path: str, rows: list[dict[str, Any]], seed: int, cache_dir: Path) -> Path:
    file = cache_dir / f"{name}-{path.replace('/', '-')}-{seed}-{len(rows)}.jsonl"
    write_rows(file, rows)
    return file
