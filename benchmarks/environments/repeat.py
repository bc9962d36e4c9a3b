"""A class as TRL's `GRPOTrainer(environment_factory=Repeat)` takes it, of the standard library alone: search a word."""

from difflib import SequenceMatcher


def similarity(text: str, word: str) -> float:
    """From 0 to 1, which is the word alone."""
    return SequenceMatcher(None, text.strip(), word, autojunk=False).ratio()


class Repeat:
    """An episode: the model has to search for the word that it is asked about."""

    def reset(self, word: str, **_: object) -> None:
        self._word, self._reward = word, 0.0

    def search_emails(self, keywords: list[str]) -> str:
        """Finds mails that contain all keywords.

        Args:
            keywords: Words of the mail.
        """
        self._reward = max(self._reward, similarity(" ".join(keywords), self._word))
        return "Nothing was found."

    def get_reward(self) -> float:
        return self._reward
