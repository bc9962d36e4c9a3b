"""`python -m kestrl_learner.sft.check`: loads what an SFT job learns from, without its model's weights."""

from __future__ import annotations

from collections.abc import Sequence

from kestrl._shared.checking import Facts, run_check
from kestrl._shared.plan.sft import SFTSettings
from kestrl.errors import SeveralProblems, UserInputError, problems_of
from kestrl_learner.sft.data import Item, left_out_warning, load_data, shared_warning


def check(settings: SFTSettings) -> Facts:
    """The number of conversations of each data set, the tokens of the longest row, and warnings.

    Raises:
        UserInputError: With a line for each data set that cannot be learned from.
    """
    problems: list[str] = []
    warnings: list[str] = []
    items: dict[str, Sequence[Item]] = {}
    longest_conversation = 0
    for name, data in {"train": settings.train, "validation": settings.validation}.items():
        if data is None:
            continue
        field = f"spec.data.{name}"
        try:
            loaded = load_data(settings, data, field)
        except UserInputError as error:
            problems += problems_of(error)
            continue
        items[name] = loaded.items
        longest_conversation = max(longest_conversation, loaded.longest)
        warnings += [left_out_warning(loaded, field)] if loaded.left_out else []
    if problems:
        raise SeveralProblems(list(dict.fromkeys(problems)))
    shared = shared_warning(settings, items["train"], items.get("validation", ()))
    warnings += [shared] if shared else []
    counts = {name: len(conversations) for name, conversations in items.items()}
    return {"conversations": counts, "longest": longest_conversation, "warnings": warnings}


if __name__ == "__main__":
    run_check(SFTSettings, check)
